"""Predictions against measurements, pooled: figures worked out by other means, on rows made up and on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from edge_models import gated, make_task
from random_transcoders import random_transcoders
from scipy.stats import spearmanr

from gossamer import GossamerError
from gossamer.attribution.agreement import Ablated, Agreement, ablate_clusters


def rows_of(n_prompts: int, *, noise: float) -> Agreement:
    generator = np.random.default_rng(0)
    rows = []
    for prompt in range(n_prompts):
        for cluster in range(5):
            predicted = float(generator.normal())
            measured = predicted + noise * float(generator.normal())
            task = "even" if prompt % 2 == 0 else "odd"
            rows.append(Ablated(task, f"prompt {prompt}", f"cluster {cluster}", 2.0, predicted, -measured, measured))
    return Agreement(tuple(rows), {})


def test_figures_are_those_of_the_pooled_rows_with_intervals_over_prompts() -> None:
    agreement = rows_of(20, noise=0.7)
    rank = agreement.spearman()
    predicted_N = agreement.predicted_N("graph")
    assert rank.value == pytest.approx(spearmanr(predicted_N, agreement.measured_N).statistic)
    assert 0 < rank.low < rank.value < rank.high < 1
    same = np.sign(predicted_N) == np.sign(agreement.measured_N)
    assert agreement.same_sign(negligible=0.0).value == pytest.approx(same.mean())
    large = np.abs(predicted_N) >= 0.25 * 2.0
    assert agreement.counted_N(negligible=0.25).sum() == large.sum()
    assert agreement.same_sign(negligible=0.25).value == pytest.approx(same[large].mean())
    assert agreement.same_sign(negligible=0.25).value > agreement.same_sign(negligible=0.0).value
    assert (agreement.spearman("replacement").value, agreement.same_sign("replacement").value) == pytest.approx((-1, 0))
    odd = agreement.of_task("odd")
    assert {row.task for row in odd.rows} == {"odd"}
    assert len(odd.rows) == 50


def test_perfect_predictions_leave_no_doubt() -> None:
    agreement = rows_of(6, noise=0.0)
    for figure in (agreement.spearman(), agreement.same_sign()):
        assert (figure.value, figure.low, figure.high) == pytest.approx((1, 1, 1))


def test_clusters_of_every_prompt_are_ablated(tmp_path) -> None:
    model = gated("gpt2")
    task = make_task(3)
    told: list[tuple[int, int]] = []
    agreement = ablate_clusters(
        model, random_transcoders(model, "cross-layer"), [task], per_prompt=2, progress=lambda *at: told.append(at)
    )
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert 3 <= len(agreement.rows) <= 6
    clean_V = model.logits(task.tokens[0].clean_BT)[:, -1].double()
    metrics = task.score(clean_V, task.tokens[0])
    assert sorted({row.metric for row in agreement.rows}) == pytest.approx(sorted(metrics.tolist()))
    assert any(abs(row.measured) > 1e-6 for row in agreement.rows)
    assert Agreement.load(agreement.save(tmp_path / "agreement.safetensors")) == agreement
    with pytest.raises(GossamerError, match="no prompt to test predictions on"):
        ablate_clusters(model, random_transcoders(model, "cross-layer"), [])
