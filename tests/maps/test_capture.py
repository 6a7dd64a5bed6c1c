"""Captured maps are what the tape's reference path records, edge by edge, on every kind of prompt."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from gossamer.attention import ForceShut, tape
from gossamer.corpus import Sequences
from gossamer.errors import GossamerError
from gossamer.maps.capture import capture
from gossamer.models.loaded import LoadedModel

Maker = Callable[..., LoadedModel]
Recorder = Callable[[LoadedModel, torch.Tensor], dict[str, torch.Tensor]]


def test_every_edge_is_the_tapes(model: LoadedModel, ids_BT: torch.Tensor, recorded: Recorder) -> None:
    maps = capture(model, ids_BT, floor=0)
    expected = recorded(model, ids_BT)
    causal = int(maps.n_allowed.sum()) * 6
    assert maps.n_edges == int(expected["open"].sum())
    assert (maps.n_edges < causal) == model.is_sparse  # gated: some edges are closed
    assert maps.n_edges > 0.02 * causal
    for prompt in range(3):
        for layer, head in maps.heads:
            truth_QK = expected["weights"][layer, prompt, head].numpy()
            np.testing.assert_allclose(maps.matrix(layer, head, prompt), truth_QK, rtol=1e-6, atol=1e-9)


def test_rows_are_what_they_were_before_the_gate(model: LoadedModel, ids_BT: torch.Tensor, recorded: Recorder) -> None:
    maps = capture(model, ids_BT)
    softmax = recorded(model, ids_BT)["softmax"].permute(0, 2, 1, 3, 4)  # [L, H, B, Q, K]
    entropy = torch.special.entr(softmax).sum(-1).flatten(2).numpy()
    np.testing.assert_allclose(maps.rows.entropy, entropy, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(maps.rows.first, softmax[..., 0].flatten(2).numpy(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("floor", [0.0, 0.02, 0.2])
def test_mass_below_the_floor_is_kept_by_row(
    model: LoadedModel, ids_BT: torch.Tensor, floor: float, recorded: Recorder
) -> None:
    maps = capture(model, ids_BT, floor=floor)
    expected = recorded(model, ids_BT)
    assert maps.n_edges == 0 or maps.weight.min() >= floor
    carried = expected["weights"].sum(-1).permute(0, 2, 1, 3).flatten(2).numpy()
    np.testing.assert_allclose(maps.row_sums(), carried, rtol=1e-5, atol=1e-7)
    n_open = expected["open"].sum(-1).permute(0, 2, 1, 3).flatten(2).numpy()
    np.testing.assert_array_equal(maps.open_edges(), n_open)
    assert (maps.mass_below_floor() > 0) == (floor > 0)


def test_dense_models_get_a_floor_and_gated_ones_none(ids_BT: torch.Tensor, tiny: Maker) -> None:
    assert capture(tiny(gated=True), ids_BT).floor == 0
    assert capture(tiny(gated=False), ids_BT).floor > 0


def test_prompts_of_different_lengths_keep_their_order(ids_BT: torch.Tensor, tiny: Maker) -> None:
    model = tiny(gated=True)
    rows = [ids_BT[0, :7].tolist(), ids_BT[1].tolist(), ids_BT[2, :7].tolist()]
    maps = capture(model, rows)
    assert maps.lengths == (7, 41, 7)
    for prompt, row in enumerate(rows):
        alone = capture(model, [row])
        for layer, head in maps.heads:
            np.testing.assert_allclose(maps.matrix(layer, head, prompt), alone.matrix(layer, head), atol=1e-9)


def test_packed_documents_do_not_see_each_other(ids_BT: torch.Tensor, tiny: Maker) -> None:
    model = tiny(gated=False)
    segments = np.array([[0] * 15 + [1] * 26])
    maps = capture(model, Sequences(ids_BT[:1].numpy(), segments), floor=0)
    assert maps.documents == ((0, 15),)
    second = capture(model, [ids_BT[0, 15:].tolist()], floor=0)
    for layer, head in maps.heads:
        matrix_QK = maps.matrix(layer, head)
        assert not matrix_QK[15:, :15].any()
        np.testing.assert_allclose(matrix_QK[15:, 15:], second.matrix(layer, head), atol=1e-8)
    np.testing.assert_array_equal(maps.rows.first[:, :, 15:], second.rows.first)


def test_a_watch_sees_what_another_tape_shuts(ids_BT: torch.Tensor, tiny: Maker) -> None:
    model = tiny(gated=True)
    shut = torch.zeros(1, 1, 41, 41, dtype=torch.bool)
    shut[..., 0] = True
    free = capture(model, ids_BT)
    with tape(model.hf, replace=[ForceShut(1, shut)]):
        maps = capture(model, ids_BT)
    assert any((free.head(1, head, prompt).key == 0).any() for head in range(3) for prompt in range(3))
    assert not any((maps.head(1, head, prompt).key == 0).any() for head in range(3) for prompt in range(3))


def test_what_cannot_be_captured_is_refused(ids_BT: torch.Tensor, tiny: Maker) -> None:
    model = tiny(gated=True)
    with pytest.raises(GossamerError, match="at least one prompt"):
        capture(model, [])
    with pytest.raises(GossamerError, match="does not fit"):
        capture(model, torch.zeros(1, 49, dtype=torch.long))
    with pytest.raises(GossamerError, match="floor"):
        capture(model, ids_BT, floor=1.0)
    with pytest.raises(GossamerError, match="padding"):
        capture(model, Sequences(ids_BT.numpy(), np.full((3, 41), -1)))


def test_a_dense_model_opens_every_edge_however_light(ids_BT: torch.Tensor, tiny: Maker) -> None:
    """Scores so far apart that most weights underflow to zero are still no gate."""
    model = tiny(gated=False)
    with torch.no_grad():
        for block in model.hf.transformer.h:
            block.attn.c_attn.weight.mul_(100)
    maps = capture(model, ids_BT)
    assert (maps.matrix(0, 0, 0) == 0).sum() > 41 * 40 / 2 + 100
    assert maps.density() == 1
    np.testing.assert_array_equal(maps.open_edges(), np.broadcast_to(maps.n_allowed, maps.open_edges().shape))
    np.testing.assert_allclose(maps.row_sums(), 1, atol=1e-6)
