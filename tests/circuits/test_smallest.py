"""The curve over heads against whole forwards with many heads replaced, pruning, random circuits and stability."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edge_models import gated, tiny
from patching_tasks import make_task, record, score

from gossamer.attention import HeadOutput, tape
from gossamer.circuits import head_curves
from gossamer.circuits.edge_measure import EdgeMeasure
from gossamer.circuits.edges import random_edge_circuits
from gossamer.circuits.effect import Baseline, smallest_from
from gossamer.circuits.head_curves import circuit_metric, keep_curve, pruning, random_circuits
from gossamer.circuits.patching import Effects, effects
from gossamer.circuits.runs import PairedRuns
from gossamer.circuits.smallest import HeadCircuits, overlap, smallest_circuit, stability
from gossamer.errors import GossamerError

EXACT = {"rtol": 0, "atol": 1e-9}


def naive_circuit(model, task, kept, *, mlps: bool) -> np.ndarray:
    """One whole forward of the clean prompts with everything outside `kept` from the corrupt run."""
    metric_N = np.zeros(len(task))
    n_heads = model.anatomy.n_heads
    for batch in task.tokens:
        heard, written = record(model, batch.corrupt_BT)
        out = [(layer, head) for layer in range(2) for head in range(n_heads) if (layer, head) not in kept]
        edits = [HeadOutput(layer, head, heard["head_output", layer][:, :, [head]]) for layer, head in out]
        handles = [
            model.anatomy.mlp_writers[layer].register_forward_hook(lambda m, args, output, value=written[layer]: value)
            for layer in range(2)
            if mlps and (layer, n_heads) not in kept
        ]
        with tape(model.hf, replace=edits):
            metric_N[list(batch.rows)] = score(model, task, batch, batch.clean_BT)
        for handle in handles:
            handle.remove()
    return metric_N


@pytest.mark.parametrize(("family", "make"), [("gpt2", tiny), ("gpt_neox", gated), ("llama", gated), ("olmo2", tiny)])
@pytest.mark.parametrize("mlps", ["free", "replaced"])
def test_the_curve_equals_whole_forwards(family, make, mlps) -> None:
    model, task = make(family), make_task(3)
    runs = PairedRuns(model, task)
    order = effects(model, task, runs=runs).ranking(mlps=mlps == "replaced")
    curve = keep_curve(runs, order, mlps=mlps)
    assert curve.total == len(order)
    assert curve.is_complete
    for size in (0, 1, 3, len(order) - 1, len(order)):
        expected = naive_circuit(model, task, order[:size], mlps=mlps == "replaced")
        np.testing.assert_allclose(curve.metric_SN[size], expected, **EXACT)
    np.testing.assert_allclose(curve.metric_SN[-1], runs.baseline.clean_N, **EXACT)
    assert curve.metric_SN.std(0).max() > 1e-3


def test_everything_about_the_smallest_circuit_in_one_result(tmp_path: Path) -> None:
    model, task = gated("gpt2"), make_task(6)
    found = smallest_circuit(model, task, random_draws=5)
    size = smallest_from(found.curve.explained_S, found.curve.sizes_S, 0.9)
    assert len(found.circuit()) == size
    assert found.circuit() == found.order[:size]
    assert found.pruned_explained >= 0.9
    assert set(found.pruned) <= set(found.circuit())
    assert found.random is not None
    assert found.random.metric_DN.shape == (5, 6)
    assert found.stability is not None
    assert found.stability.n_templates == 2
    assert found.curve_with_mlps is not None
    assert found.curve_with_mlps.total == 8
    assert overlap(found, found) == 1
    loaded = HeadCircuits.load(found.save(tmp_path / "heads.safetensors"))
    assert loaded.circuit() == found.circuit()
    assert loaded.order == found.order
    assert loaded.stability == found.stability
    assert loaded.curve.rule == found.curve.rule
    assert loaded.curve.cpr == found.curve.cpr
    assert "free" in found.curve.rule["MLPs"]


def test_zero_and_mean_ablation_end_at_the_clean_run_too() -> None:
    model, task = tiny("gpt2"), make_task(3)
    seen = []
    for ablation in ("zero", "mean"):
        runs = PairedRuns(model, task, whole=True)
        curve = keep_curve(runs, [(layer, head) for layer in range(2) for head in range(3)], ablation=ablation)
        np.testing.assert_allclose(curve.metric_SN[-1], runs.baseline.clean_N, **EXACT)
        seen.append(curve.metric_SN[0])
    assert np.abs(seen[0] - seen[1]).max() > 1e-3


def test_what_pruning_leaves_is_needed() -> None:
    model, task = tiny("llama"), make_task(4)
    runs = PairedRuns(model, task)
    order = effects(model, task, runs=runs).ranking()
    everything = [*order]
    kept, explained = pruning(runs, everything, level=0.5)
    assert explained >= 0.5
    assert len(kept) < len(everything)
    np.testing.assert_allclose(runs.baseline.explained(circuit_metric(runs, [kept]))[0], explained)
    rest = kept[1:]  # the most important head was tried last, among the companions it has now
    assert runs.baseline.explained(circuit_metric(runs, [rest]))[0] < 0.5


def test_random_circuits_are_reproducible() -> None:
    runs = PairedRuns(tiny("gpt2"), make_task(3))
    one, other = (random_circuits(runs, 2, 6, seed=seed) for seed in (0, 0))
    np.testing.assert_array_equal(one.metric_DN, other.metric_DN)
    assert one.metric_DN.std(0).max() > 0


def test_stability_compares_different_prompts() -> None:
    """Each head acts on the prompts of one half only: rankings of parts overlap as far as the parts do."""
    task = make_task(6)  # the templates alternate
    assert [pair.template for pair in task.pairs] == ["template 0", "template 1"] * 3
    baseline = Baseline(np.full(6, 4.0), np.zeros(6))
    even_N = np.array([1.0, 0.0] * 3)
    heads_LHN = np.stack([[3 * even_N, 2 * even_N], [3 * (1 - even_N), 1.5 * np.ones(6)]])
    found = Effects("denoising", heads_LHN, np.zeros((2, 6)), baseline, (0, 0), {})
    assert found.ranking(prompts=[0, 2, 4])[:2] == [(0, 0), (0, 1)]
    assert found.ranking(prompts=[1, 3, 5])[:2] == [(1, 0), (1, 1)]
    assert stability(found, task, 2).templates == 0
    assert stability(found, task, 3).templates == pytest.approx(2 / 4)
    halves = stability(found, task, 2).halves
    assert halves is not None
    assert 0 < halves < 1
    assert stability(found, make_task(4), 2).templates is None  # two prompts of each: too few to rank by


def test_random_circuits_have_their_size(monkeypatch) -> None:
    seen: list[np.ndarray] = []
    measured = EdgeMeasure.circuits
    monkeypatch.setattr(EdgeMeasure, "circuits", lambda self, kept: seen.extend(kept) or measured(self, kept))
    random_edge_circuits(tiny("gpt2"), make_task(3), 30, draws=3)
    assert [int(kept_SR.sum()) for kept_SR in seen] == [30] * 3
    drawn: list[np.ndarray] = []
    masked = head_curves.masked_metric
    monkeypatch.setattr(
        head_curves, "masked_metric", lambda runs, kept, **how: drawn.extend(kept) or masked(runs, kept, **how)
    )
    random_circuits(PairedRuns(tiny("gpt2"), make_task(3)), 2, 4)
    assert [int(kept_C.sum()) for kept_C in drawn] == [2] * 4


def test_a_ranking_that_every_half_agrees_on_is_stable() -> None:
    model, task = tiny("gpt2"), make_task(6)
    found = effects(model, task)
    assert stability(found, task, 6).halves == 1  # all six heads, whatever the ranking
    two = stability(found, task, 2)
    assert two.halves is not None
    assert 0 <= two.halves <= 1
    assert two.templates is not None


def test_mistakes_get_a_sentence() -> None:
    model, task = tiny("gpt2"), make_task(3)
    with pytest.raises(GossamerError, match="ablation"):
        smallest_circuit(model, task, ablation="median")  # type: ignore[arg-type]
    with pytest.raises(GossamerError, match="between 0 and 1"):
        smallest_circuit(model, task, level=90)
