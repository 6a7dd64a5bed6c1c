from __future__ import annotations

import pytest
import torch

from gossamer.attention import ForceOpen, ForceShut, tape
from gossamer.corpus import Sequences
from gossamer.evaluate.baselines import (
    CALIBRATION_SEQUENCES,
    Climb,
    LocalWindow,
    Rule,
    ScoreThreshold,
    WeightThreshold,
    baseline,
    rules_for,
    window_mask,
)
from gossamer.evaluate.report import BaselinePoint
from gossamer.models import LoadedModel
from gossamer.sparsify import Density, measure
from gossamer.sparsify.density import density_of
from gossamer.sparsify.forward import cross_entropy_sum, logits_of, model_inputs, target_tensor


@pytest.mark.parametrize("which", ["text", "packed"])
def test_ladders_begin_with_the_dense_model_and_open_fewer_and_fewer(
    dense: LoadedModel, which: str, request: pytest.FixtureRequest
) -> None:
    text = request.getfixturevalue(which).rows(slice(0, 2))
    whole = measure(dense.hf, text, batch=4).loss
    for rule in rules_for(dense, text):
        rungs = [*rule.settings[:: max(1, len(rule.settings) // 8)], rule.settings[-1]]
        measured = [rule.measure(setting, text) for setting in rungs]
        densities = [density.of_document_pairs for _, density in measured]
        assert densities[0] == 1, rule.name
        assert measured[0][0] == pytest.approx(whole, abs=1e-4), rule.name
        assert densities == sorted(densities, reverse=True), rule.name
        assert densities[-1] < 0.4, rule.name
        assert abs(measured[-1][0] - whole) > 1e-3, rule.name


def test_the_dense_model_is_left_alone(dense: LoadedModel, text: Sequences) -> None:
    before = {name: tensor.clone() for name, tensor in dense.hf.state_dict().items()}
    for rule in rules_for(dense, text):
        rule.measure(rule.settings[-1], text)
    assert not dense.is_sparse
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.hf.state_dict().items())


def test_the_weight_threshold_cuts_by_softmax_weight(dense: LoadedModel, text: Sequences) -> None:
    """By the tape alone: layer 0's small weights are cut first, then layer 1's, which see what is left."""
    threshold, inputs = 0.1, model_inputs(text, "cpu")
    shut: list[ForceShut] = []
    for layer in range(2):
        with tape(dense.hf, record=("softmax",), replace=shut) as recorded, torch.no_grad():
            dense.hf(**inputs)
        shut.append(ForceShut(layer, recorded["softmax", layer] <= threshold))
    with tape(dense.hf, record=("weights",), replace=shut) as recorded, torch.no_grad():
        nats = cross_entropy_sum(logits_of(dense.hf, inputs, bf16=False), target_tensor(text, "cpu"))
    n_open = sum(int((recorded["weights", layer] > 0).sum()) for layer in range(2))
    loss, density = WeightThreshold(dense).measure(threshold, text)
    assert density.open_edges == n_open
    assert 0.05 < density.of_causal_pairs < 0.95
    assert loss == pytest.approx(float(nats) / (5 * 23), abs=1e-5)


def test_the_score_threshold_keeps_the_share_it_is_asked_for(dense: LoadedModel, text: Sequences) -> None:
    text = text.rows(slice(0, CALIBRATION_SEQUENCES))
    rule = ScoreThreshold(dense, text)
    rule.measure(0.8, text)
    everything = [ForceOpen(1, torch.ones(1, 1, 1, 1, dtype=torch.bool))]
    everything += [ForceOpen(0, torch.ones(1, 1, 1, 1, dtype=torch.bool))]
    with tape(rule.model.hf, record=("softmax", "gate"), replace=everything) as recorded, torch.no_grad():
        rule.model.hf(**model_inputs(text, "cpu"))
    for layer in range(2):
        softmax_BHQK = recorded["softmax", layer]
        kept_H = (softmax_BHQK * (recorded["gate", layer] > 0)).sum((0, 2, 3)) / softmax_BHQK.sum((0, 2, 3))
        assert (kept_H >= 0.8 - 1e-4).all()
        assert (kept_H < 0.84).all()


@pytest.mark.parametrize("width", [1, 3, 24])
def test_window_masks_by_hand(packed: Sequences, width: int) -> None:
    assert packed.segments_NT is not None
    mask_BQK = window_mask(packed, width).expand(len(packed), -1, -1)
    starts = {0: 0, 1: 5, 2: 16}
    for query in range(packed.length):
        for key in range(packed.length):
            segment = packed.segments_NT[0, query]
            same = packed.segments_NT[0, key] == segment
            expected = key <= query and same and (query - key < width or key == starts[segment])
            assert bool(mask_BQK[0, query, key]) == expected
    whole = window_mask(Sequences(packed.ids_NT), width)[0]
    assert int(whole[20].sum()) == min(21, width + 1)


def test_the_windows_softmax_runs_over_the_window(dense: LoadedModel, text: Sequences) -> None:
    loss, density = LocalWindow(dense, text.length).measure(2.0, text)
    ids = torch.as_tensor(text.ids_NT)
    with tape(dense.hf, record=("weights",)) as recorded, torch.no_grad():
        logits = dense.hf(ids, attention_mask=window_mask(text, 2)[:, None]).logits
    torch.testing.assert_close(recorded["weights", 1].sum(-1), torch.ones(5, 4, 24))
    by_hand = cross_entropy_sum(logits, target_tensor(text, "cpu")) / (5 * 23)
    assert loss == pytest.approx(float(by_hand), abs=1e-6)
    assert density.per_query_and_head == pytest.approx((1 + 2 + 3 * 22) / 24)


class Line(Rule):
    """A rule whose loss and density are known: rung r keeps 1 - r/100 of the pairs and costs (r/100)²."""

    name, what = "line", "a made-up rule"
    settings = tuple(rung / 100 for rung in range(101))

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.measured: list[float] = []

    def measure(self, setting: float, text: Sequences) -> tuple[float, Density]:
        self.measured.append(setting)
        return 2 + setting**2, density_of(text, open_edges=round(1e6 * (1 - setting)), n_layers=1, n_heads=1)


def test_bisection_finds_the_sparsest_rung_that_holds(dense: LoadedModel, text: Sequences) -> None:
    rule = Line(dense)
    pairs = 5 * 24 * 25 // 2
    sparse = BaselinePoint(0.0, 1e6 * 0.275 / pairs, 0.0, 0.0501)
    found = baseline(rule, text, dense_loss=2.0, sparse=sparse, slack=0.01)
    assert found.at_sparse_loss is not None
    assert found.at_slack is not None
    assert found.at_sparse_loss.setting == 0.22  # 0.22² = 0.0484, 0.23² = 0.0529
    assert found.at_slack.setting == 0.09 or found.at_slack.difference == pytest.approx(0.01)
    assert found.at_sparse_density.setting == 0.72
    assert len(rule.measured) == len(set(rule.measured)) < 40
    densities = [point.of_causal_pairs for point in found.curve]
    assert densities == sorted(densities, reverse=True)


def test_a_loss_below_the_dense_models_is_never_reached(dense: LoadedModel, text: Sequences) -> None:
    sparse = BaselinePoint(0.0, 0.3, 0.0, -0.02)
    assert baseline(Line(dense), text, dense_loss=2.0, sparse=sparse, slack=0.01).at_sparse_loss is None


def test_rungs_are_measured_once(dense: LoadedModel, text: Sequences) -> None:
    rule = Line(dense)
    climb = Climb(rule, text, 2.0)
    assert climb.point(3) is climb.point(3)
    assert rule.measured == [0.03]
