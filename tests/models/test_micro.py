"""The micro model's answers are those worked out by hand in its docstring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gossamer.attention import ForceShut, HeadOutput, tape
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, micro
from gossamer.models.micro import CLEAN, CORRUPT

LOGITS = {
    (False, CLEAN): [0, 0, 3, 1],
    (False, CORRUPT): [3 / 4, 3 / 4, 3 / 4, 7 / 4],
    (True, CLEAN): [0, 0, 4, 1],
    (True, CORRUPT): [0, 0, 0, 1],
}
PATCHED = {
    False: {(0, 0): 3, (0, 1): 1, (1, 0): 2, (1, 1): 1},
    True: {(0, 0): 4, (0, 1): 0, (1, 0): 4, (1, 1): 0},
}


def last(model: LoadedModel, prompt: str) -> Tensor:
    return model.logits(model.encode(prompt))[0, -1]


def metric(logits_V: Tensor) -> float:
    return float(logits_V[2] - logits_V[1])


@pytest.mark.parametrize(("gated", "prompt"), LOGITS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_logits(*, gated: bool, prompt: str, dtype: torch.dtype, tolerance: float) -> None:
    expected = torch.tensor(LOGITS[gated, prompt], dtype=dtype)
    torch.testing.assert_close(last(micro(gated=gated, dtype=dtype), prompt), expected, rtol=0, atol=tolerance)


def test_open_edges() -> None:
    model = micro(gated=True)
    with tape(model.hf, record=["open"]) as t:
        model.logits(model.encode(CLEAN))
    edges = [(layer, *edge) for layer in (0, 1) for edge in t["open", layer][0].nonzero().tolist()]
    before = [(0, 0, query, query - 1) for query in (1, 2, 3)]
    own = [(1, 1, position, position) for position in range(4)]
    assert edges == [*before, (1, 0, 3, 2), *own]


@pytest.mark.parametrize("gated", [False, True])
def test_one_head_patched_from_clean_into_corrupt(*, gated: bool) -> None:
    model = micro(gated=gated)
    with tape(model.hf, record=["head_output"]) as clean:
        model.logits(model.encode(CLEAN))
    for (layer, head), expected in PATCHED[gated].items():
        value = clean["head_output", layer][:, :, [head]]
        with tape(model.hf, replace=[HeadOutput(layer, [head], value)]):
            assert metric(last(model, CORRUPT)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("key", "expected"), [(2, -1), (1, 4)])
def test_one_edge_shut(key: int, expected: float) -> None:
    model = micro()
    mask_BHQK = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    mask_BHQK[0, 0, 3, key] = True
    with tape(model.hf, replace=[ForceShut(1, mask_BHQK)]):
        assert metric(last(model, CLEAN)) == pytest.approx(expected, abs=1e-12)


def test_weights_are_whole_numbers_and_it_is_not_for_saving(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = micro()
    assert all(torch.equal(weight, weight.round()) for weight in model.hf.parameters())
    with pytest.raises(GossamerError, match="cannot be saved"):
        model.save(tmp_path_factory.mktemp("micro") / "model")
