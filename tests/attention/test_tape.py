"""The tape: what it records is what ran, what it replaces takes effect, and what never fired is said."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.attention import (
    AttentionSite,
    ForceOpen,
    ForceShut,
    FrozenGates,
    HeadOutput,
    Weights,
    attentions_of,
    sampled_gates,
    tape,
    use_gossamer_attention,
)
from gossamer.errors import GossamerError

Make = Callable[..., PreTrainedModel]
Sites = Callable[[PreTrainedModel], list[AttentionSite]]
EVERYTHING = ("weights", "softmax", "scores", "gate", "open", "allowed", "q", "k", "v", "head_output")


@pytest.fixture
def model(gated: Make) -> PreTrainedModel:
    return gated("llama", "logit")


def logits_of(model: PreTrainedModel, ids_BT: Tensor, *replace: Any) -> Tensor:
    with torch.no_grad(), tape(model, replace=replace):
        return model(ids_BT).logits


def test_records_fit_together(model: PreTrainedModel, ids_BT: Tensor) -> None:
    with torch.no_grad(), tape(model, record=EVERYTHING) as t:
        model(ids_BT)
    assert t.layers("weights") == [0, 1]
    for layer in range(2):
        allowed = t["allowed", layer]
        scores = t["q", layer] @ t["k", layer].transpose(-1, -2) * 8**-0.5
        assert torch.allclose(t["scores", layer], scores.masked_fill(~allowed, -torch.inf))
        assert torch.allclose(t["softmax", layer], t["scores", layer].softmax(-1))
        assert torch.equal(t["open", layer], t["gate", layer] > 0)
        assert torch.equal(t["weights", layer], t["softmax", layer] * t["open", layer])
        assert torch.allclose(t["head_output", layer], (t["weights", layer] @ t["v", layer]).transpose(1, 2))
        assert 0 < t["open", layer].sum() < allowed.sum() * 4


def test_recording_changes_nothing_and_stays_in_the_graph(model: PreTrainedModel, ids_BT: Tensor) -> None:
    plain = model(ids_BT).logits
    with tape(model, record=EVERYTHING) as t:
        recorded = model(ids_BT).logits
    assert (plain - recorded).abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(recorded[:, -1].sum(), t["weights", 0])
    assert gradient.abs().sum() > 0


def test_small_records_do_not_need_matrices(
    model: PreTrainedModel, ids_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gossamer.attention.function as function

    def refuse(*_: Any) -> None:
        raise AssertionError("the reference was asked")

    monkeypatch.setattr(function, "gated_attention", refuse)
    with tape(model, record=["q", "k", "v", "head_output"], replace=[HeadOutput(0, 1, 0.0)]):
        model(ids_BT)
    model(ids_BT)


def test_several_forwards_are_kept_apart(model: PreTrainedModel, ids_BT: Tensor) -> None:
    with torch.no_grad(), tape(model, record="open", layers=[1]) as t:
        model(ids_BT)
        model(ids_BT.flip(0))
    first, second = t.calls("open", 1)
    assert torch.equal(first.flip(0), second)
    with pytest.raises(GossamerError, match="2 forwards"):
        _ = t["open", 1]
    with pytest.raises(GossamerError, match="does not record 'open' in layer 0"):
        _ = t["open", 0]


def test_nothing_replaced_and_everything_replaced(model: PreTrainedModel, ids_BT: Tensor) -> None:
    other = ids_BT.flip(1)
    with torch.no_grad(), tape(model, record=["head_output", "weights"]) as t:
        target = model(other).logits
    baseline = logits_of(model, ids_BT)
    own = logits_of(model, other, *(HeadOutput(layer, None, t["head_output", layer]) for layer in range(2)))
    assert (own - target).abs().max() < 1e-12
    ids = ids_BT.clone()
    ids[:, -1] = other[:, -1]  # the last position's own embedding decides what is added to
    heads = [HeadOutput(layer, None, t["head_output", layer]) for layer in range(2)]
    assert (logits_of(model, ids, *heads)[:, -1] - target[:, -1]).abs().max() < 1e-12
    assert (baseline - target).abs().max() > 1e-3


def test_a_head_is_replaced_at_rows_and_positions_only(model: PreTrainedModel, ids_BT: Tensor) -> None:
    replacement = HeadOutput(1, [2, 3], torch.full((2, 8), 5.0, dtype=torch.float64), positions=[4, -1], rows=1)
    with torch.no_grad():
        with tape(model, record=["head_output"]) as before:
            model(ids_BT)
        with tape(model, record=["head_output"], replace=[replacement]) as after:
            model(ids_BT)
    changed = before["head_output", 1] != after["head_output", 1]
    expected = torch.zeros_like(changed)
    for position in (4, 11):
        expected[1, position, 2:4] = True
    assert torch.equal(changed, expected)
    assert torch.equal(before["head_output", 0], after["head_output", 0])


def test_later_positions_cannot_affect_earlier_ones(model: PreTrainedModel, ids_BT: Tensor) -> None:
    baseline = logits_of(model, ids_BT)
    patched = logits_of(model, ids_BT, HeadOutput(0, None, 3.0, positions=range(6, 12)))
    assert torch.equal(baseline[:, :6], patched[:, :6])
    assert (baseline[:, 6:] - patched[:, 6:]).abs().max() > 1e-3


def test_a_patched_run_carries_gradients_to_the_patch(model: PreTrainedModel, ids_BT: Tensor) -> None:
    value = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    with tape(model, replace=[HeadOutput(0, 1, value)]):
        model(ids_BT).logits.sum().backward()
    assert value.grad is not None
    assert value.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["logit", "mass", "flow"])
def test_forcing_shut_a_closed_edge_is_exactly_nothing(gated: Make, ids_BT: Tensor, kind: str) -> None:
    model = gated("gpt2", kind)
    with torch.no_grad(), tape(model, record=["open", "allowed"]) as t:
        baseline = model(ids_BT).logits
    closed = [~t["open", layer] & t["allowed", layer] for layer in range(2)]
    assert all(mask.any() for mask in closed)
    assert torch.equal(logits_of(model, ids_BT, *(ForceShut(layer, closed[layer]) for layer in range(2))), baseline)
    assert torch.equal(logits_of(model, ids_BT, *(ForceOpen(layer, t["open", layer]) for layer in range(2))), baseline)
    one_open = torch.zeros_like(closed[0])
    one_open.view(-1)[t["open", 0].view(-1).nonzero()[-1]] = True
    assert not torch.equal(logits_of(model, ids_BT, ForceShut(0, one_open)), baseline)


def test_forbidden_pairs_stay_shut_when_forced_open(model: PreTrainedModel, ids_BT: Tensor) -> None:
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad(), tape(model, record=["open", "allowed", "weights"], replace=[ForceOpen(0, everything)]) as t:
        model(ids_BT)
    assert torch.equal(t["open", 0], t["allowed", 0].expand_as(t["open", 0]))
    assert (t["weights", 0].triu(1) == 0).all()


def test_values_behind_frozen_closed_gates_do_nothing(gated: Make, ids_BT: Tensor) -> None:
    """With the gates of one run frozen into another, a token that nobody may read moves nobody else."""
    model = gated("llama", "logit")
    hidden = torch.zeros(1, 1, 12, 12, dtype=torch.bool)
    hidden[..., 6:, 5] = True
    shut = [ForceShut(layer, hidden) for layer in range(2)]
    scores_fixed = [Weights(layer, torch.full((2, 4, 12, 12), 0.1).tril().double() * ~hidden) for layer in range(2)]
    changed = ids_BT.clone()
    changed[:, 5] = changed[:, 5] % 39 + 1
    for replace, tolerance in ((scores_fixed, 0.0), ([*shut, *scores_fixed], 0.0)):
        difference = (logits_of(model, ids_BT, *replace) - logits_of(model, changed, *replace)).abs().amax((0, 2))
        assert (difference[:5] == 0).all()
        assert difference[5] > 1e-6
        assert (difference[6:] <= tolerance).all()


def test_frozen_gates_repeat_a_pattern(model: PreTrainedModel, ids_BT: Tensor) -> None:
    with torch.no_grad(), tape(model, record=["open"]) as t:
        baseline = model(ids_BT).logits
    frozen = [FrozenGates(layer, t["open", layer]) for layer in range(2)]
    assert torch.equal(logits_of(model, ids_BT, *frozen), baseline)
    changed = ids_BT.clone()
    changed[:, 0] = changed[:, 0] % 39 + 1
    with torch.no_grad(), tape(model, record=["open"], replace=frozen) as again:
        model(changed)
    assert all(torch.equal(again["open", layer], t["open", layer]) for layer in range(2))


def test_weights_of_some_heads(model: PreTrainedModel, ids_BT: Tensor) -> None:
    uniform = torch.full((2, 1, 12, 12), 0.25).tril()
    with torch.no_grad():
        with tape(model, record=["weights"]) as before:
            model(ids_BT)
        with tape(model, record=["weights"], replace=[Weights(0, uniform, heads=[1])]) as after:
            model(ids_BT)
    assert torch.equal(after["weights", 0][:, 1], uniform[:, 0].double())
    kept = [0, 2, 3]
    assert torch.equal(after["weights", 0][:, kept], before["weights", 0][:, kept])


def test_an_ungated_model_can_be_recorded_and_cut(plain: Make, sites: Sites, ids_BT: Tensor) -> None:
    model = plain("gpt_neox")
    use_gossamer_attention(model, sites(model))
    with torch.no_grad(), tape(model, record=["weights", "open", "allowed"]) as t:
        baseline = model(ids_BT).logits
    assert torch.allclose(t["weights", 0].sum(-1), torch.ones(()).double())
    assert torch.equal(t["open", 0], t["allowed", 0].expand_as(t["open", 0]))
    cut = torch.zeros(4, 12, 12, dtype=torch.bool)
    cut[2, 9, 3] = True
    moved = (logits_of(model, ids_BT, ForceShut(1, cut)) - baseline).abs().amax((0, 2))
    assert moved[9] > 1e-6
    assert (moved[torch.arange(12) != 9] < 1e-12).all()
    with pytest.raises(GossamerError, match="no gates"), tape(model, record=["gate"]):
        model(ids_BT)


def test_tapes_nest(model: PreTrainedModel, ids_BT: Tensor) -> None:
    zero = HeadOutput(0, 0, 0.0)
    outer_tape = tape(model, record=["head_output"])
    with torch.no_grad(), outer_tape as outer, tape(model, record=["open"], replace=[zero]) as inner:
        model(ids_BT)
    assert (outer["head_output", 0][:, :, 0] == 0).all()
    assert inner["open", 1].any()


def test_two_models_and_two_threads_never_see_each_other(gated: Make, ids_BT: Tensor) -> None:
    one, two = gated("gpt2", "logit"), gated("gpt2", "logit")
    other = copy.deepcopy(one)
    expected = one(ids_BT).logits
    with tape(one, record=["open"], replace=[HeadOutput(0, None, 0.0)]) as t:
        assert torch.equal(two(ids_BT).logits, expected)
        assert torch.equal(other(ids_BT).logits, expected)
        assert t.layers("open") == []
        from_thread: list[Tensor] = []
        thread = threading.Thread(target=lambda: from_thread.append(one(ids_BT).logits))
        thread.start()
        thread.join()
        assert torch.equal(from_thread[0], expected)
        assert t.layers("open") == []
        assert not torch.equal(one(ids_BT).logits, expected)
    assert torch.equal(one(ids_BT).logits, expected)


def test_a_copy_of_a_flow_gated_model_is_its_own(gated: Make, ids_BT: Tensor) -> None:
    model = gated("llama", "flow")
    twin = copy.deepcopy(model)
    expected = model(ids_BT).logits
    with torch.no_grad():
        for _, attention in attentions_of(model):
            attention.gate.offset_H.fill_(-1e4)
    assert torch.equal(twin(ids_BT).logits, expected)
    assert not torch.equal(model(ids_BT).logits, expected)


def test_what_never_fired_is_an_error(model: PreTrainedModel, ids_BT: Tensor) -> None:
    with pytest.raises(GossamerError, match="Nothing was recorded for 'open'"), tape(model, record=["open"]):
        pass
    with (
        pytest.raises(GossamerError, match="HeadOutput in layer 1 never fired"),
        tape(model, replace=[HeadOutput(1, 0, 0.0)]),
    ):
        pass
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with (
        pytest.raises(GossamerError, match="ForceShut in layer 0 never fired"),
        tape(model, replace=[ForceShut(0, mask)]),
    ):
        pass
    with pytest.raises(KeyError), tape(model, record=["open"]):
        raise KeyError("an error inside the block is not replaced by ours")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": ["weight"]}, "Did you mean 'weights'"),
        ({"record": ["open"], "layers": [5]}, "names layer 5"),
        ({"replace": [HeadOutput(7, 0, 0.0)]}, "names layer 7"),
        ({"replace": [HeadOutput(0, 9, 0.0)]}, "names head"),
        ({"replace": [HeadOutput(0, 0, 0.0, positions=[40])]}, "names position"),
        ({"replace": [HeadOutput(0, 0, 0.0, rows=[0.5])]}, "whole numbers"),
        ({"replace": [HeadOutput(0, 0, torch.zeros(3))]}, "does not fit"),
        ({"replace": [ForceShut(0, torch.ones(12, 11, dtype=torch.bool))]}, "does not fit"),
        ({"replace": [ForceOpen(0, torch.ones(12, 12))]}, "boolean mask"),
    ],
)
def test_mistakes_are_named(model: PreTrainedModel, ids_BT: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GossamerError, match=message), tape(model, **options):
        model(ids_BT)


def test_a_model_without_gossamers_attention_is_refused(plain: Make) -> None:
    with pytest.raises(GossamerError, match="does not run on Gossamer's attention"), tape(plain("gpt2"), record=["q"]):
        pass


def test_a_tape_sees_sampled_gates(model: PreTrainedModel, ids_BT: Tensor) -> None:
    with sampled_gates(model, tau=1.0, seed=1) as run:
        plain = model(ids_BT).logits
    with sampled_gates(model, tau=1.0, seed=1) as again, tape(model, record=["open", "gate"]) as t:
        taped = model(ids_BT).logits
    assert (plain - taped).abs().max() < 1e-12
    assert run.expected_open.item() == pytest.approx(again.expected_open.item())
    assert run.open_pairs == sum(int(t["open", layer].sum()) for layer in range(2))
    assert not torch.equal(t["open", 0], t["gate", 0] > 0)


@pytest.mark.parametrize("record", [[], ["weights"]])
def test_a_watcher_sees_every_tile(model: PreTrainedModel, ids_BT: Tensor, record: list[str]) -> None:
    with torch.no_grad(), tape(model, record=["weights", "allowed"]) as expected:
        model(ids_BT)
    seen = [torch.zeros(2, 4, 12, 12, dtype=torch.float64) for _ in range(2)]

    def watch(layer: int, tile: Any, softmax_BHQK: Tensor, open_BHQK: Tensor | None) -> None:
        assert open_BHQK is not None
        seen[layer][tile.batch, tile.head, tile.query, tile.key] = softmax_BHQK * (open_BHQK > 0)

    with torch.no_grad(), tape(model, record=record, watch=watch):
        model(ids_BT)
    assert all(torch.allclose(seen[layer], expected["weights", layer]) for layer in range(2))
    with pytest.raises(GossamerError, match="Nothing was watched"), tape(model, watch=watch):
        pass
