"""Edge patching against a slow, obvious engine, and scores against interventions, in double precision."""

from __future__ import annotations

from collections.abc import Callable

import edge_models
import numpy as np
import pytest
import torch
from edge_models import FAMILIES, gated, make_task, tiny
from slow_edges import FrozenNorm, SlowEdges, freeze_norms
from torch import Tensor, nn

from gossamer import GateConfig, GossamerError, LoadedModel, gate
from gossamer.attention import FrozenGates, Weights, tape
from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.edge_attribution import Attribution
from gossamer.circuits.edge_metrics import metric_of
from gossamer.circuits.edge_patching import patched_logits
from gossamer.circuits.edges import EdgeCircuits, EdgeScores, edge_circuits, edge_scores, random_edge_circuits
from gossamer.circuits.streams import Parts, recorded

TOLERANCE = 1e-9
BOTH = [pytest.param(tiny, id="dense"), pytest.param(gated, id="gated")]
Make = Callable[..., LoadedModel]


def circuit_logits(model: LoadedModel, kept_SR: np.ndarray | Tensor) -> Tensor:
    parts, batch = Parts.of(model), make_task().tokens[0]
    corrupt, _ = recorded(parts, batch.corrupt_BT)
    return patched_logits(parts, batch.clean_BT, corrupt, torch.as_tensor(kept_SR))


def graph_of(model: LoadedModel) -> ComponentGraph:
    return Parts.of(model).graph


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_edges_are_the_clean_run_and_none_the_corrupt_one(family: str, make: Make) -> None:
    model, batch = make(family), make_task().tokens[0]
    everything_SR = graph_of(model).is_edge_SR
    clean_BV, corrupt_BV = (model.logits(ids)[:, -1] for ids in (batch.clean_BT, batch.corrupt_BT))
    assert (clean_BV - corrupt_BV).abs().max() > 0.1
    torch.testing.assert_close(circuit_logits(model, everything_SR), clean_BV, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(circuit_logits(model, everything_SR & False), corrupt_BV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_patched_runs_equal_the_slow_engine(family: str, make: Make) -> None:
    """Random circuits, and circuits that lack a single edge of each kind."""
    model = make(family)
    graph, batch = graph_of(model), make_task().tokens[0]
    slow = SlowEdges(model, batch.clean_BT, batch.corrupt_BT)
    generator = np.random.default_rng(0)
    lacking = {graph.receivers[receiver].kind: edge for edge, (_, receiver) in enumerate(graph.edges_E2)}
    assert set(lacking) == {"q", "k", "v", "mlp", "logits"}
    circuits = [graph.mask(np.flatnonzero(generator.random(graph.n_edges) < share)) for share in (0.2, 0.5, 0.9)]
    circuits += [graph.is_edge_SR & ~graph.mask([edge]) for edge in lacking.values()]
    found: list[Tensor] = []
    for kept_SR in circuits:
        expected_BV = slow.logits(kept_SR)
        torch.testing.assert_close(circuit_logits(model, kept_SR), expected_BV, atol=TOLERANCE, rtol=0)
        found.append(expected_BV)
    different = {round(float(logits_BV.sum()), 6) for logits_BV in found}
    assert len(different) >= len(circuits) - 1


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_slope_of_real_patching(family: str, make: Make) -> None:
    """Every kind of edge, far from any flip: the kept share of one edge moved a little, everything else clean."""
    model, task = make(family), make_task()
    parts, batch, metric = Parts.of(model), task.tokens[0], metric_of(task, "task")
    attribution = Attribution(parts, metric, "gradient", 1)
    attribution.add(batch)
    corrupt, _ = recorded(parts, batch.corrupt_BT)
    graph, step = parts.graph, 1e-5
    slopes: dict[str, list[float]] = {}
    for source, receiver in graph.edges_E2[::4].tolist():
        ends = []
        for direction in (step, -step):
            kept_SR = torch.from_numpy(graph.is_edge_SR).double()
            kept_SR[source, receiver] += direction
            logits_BV = patched_logits(parts, batch.clean_BT, corrupt, kept_SR)
            ends.append(float(metric(logits_BV, batch, logits_BV).sum()))
        slope = (ends[0] - ends[1]) / (2 * step)
        assert attribution.score_SR[source, receiver] == pytest.approx(slope, abs=1e-6)
        slopes.setdefault(graph.receivers[receiver].kind, []).append(abs(slope))
    assert all(max(found) > 1e-4 for found in slopes.values())
    assert not attribution.score_SR[~torch.from_numpy(graph.is_edge_SR)].any()


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "olmo2", "qwen3"])
def test_frozen_patterns_and_norms_make_attribution_exact(family: str, make: Make) -> None:
    """Attention patterns, gates and norms frozen, MLPs linear: first order is everything."""
    model, task = make(family), make_task()
    batch, metric = task.tokens[0], metric_of(task, "task")
    for block in model.anatomy.blocks:
        block.mlp = nn.Linear(model.anatomy.d_model, model.anatomy.d_model).double()
    freeze_norms(model, batch.clean_BT)
    model = edge_models.again(model)
    with tape(model.hf, record=["weights"]) as heard:
        model.logits(batch.clean_BT)
    assert any(isinstance(module, FrozenNorm) for module in model.hf.modules())
    frozen = [Weights(layer, heard["weights", layer]) for layer in heard.layers("weights")]
    parts = Parts.of(model)
    with tape(model.hf, replace=frozen):
        attribution = Attribution(parts, metric, "gradient", 1)
        clean_B, _ = attribution.add(batch)
        corrupt, _ = recorded(parts, batch.corrupt_BT)
        largest = 0.0
        for source, receiver in parts.graph.edges_E2.tolist():
            kept_SR = torch.from_numpy(parts.graph.is_edge_SR.copy())
            kept_SR[source, receiver] = False
            patched_BV = patched_logits(parts, batch.clean_BT, corrupt, kept_SR)
            effect = float((clean_B - metric(patched_BV, batch, patched_BV)).sum())
            score = float(attribution.score_SR[source, receiver])
            assert score == pytest.approx(effect, abs=TOLERANCE)
            if parts.graph.receivers[receiver].kind in ("q", "k"):
                assert abs(score) < TOLERANCE
            largest = max(largest, abs(effect))
    assert largest > 1e-2


@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2"])
def test_integrated_gradients_add_up_without_flips(family: str) -> None:
    task = make_task()
    scores = edge_scores(tiny(family), task, steps=40)
    assert scores.remainder is not None
    assert abs(scores.remainder) < 2e-3 * max(1.0, abs(scores.baseline.difference))
    coarse = edge_scores(tiny(family), task, steps=2)
    assert coarse.remainder is not None
    assert abs(coarse.remainder) > abs(scores.remainder)


def test_the_remainder_is_the_sum_of_the_jumps_where_gates_flip() -> None:
    model, task = gated("gpt2"), make_task(1)
    parts, batch, metric = Parts.of(model), task.tokens[0], metric_of(task, "task")
    ends = [recorded(parts, ids)[0].written_SBTD[0] for ids in (batch.corrupt_BT, batch.clean_BT)]

    def at(share: float) -> tuple[Tensor, list[Tensor]]:
        hook = model.anatomy.blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: ((torch.lerp(*ends, share), *args[1:]), kwargs), with_kwargs=True
        )
        with tape(model.hf, record=["open"]) as heard:
            logits_BV = model.logits(batch.clean_BT)[:, -1]
        hook.remove()
        pattern = torch.cat([heard["open", layer].flatten() for layer in heard.layers("open")])
        return metric(logits_BV, batch, logits_BV), pattern

    def jumps(low: float, high: float) -> tuple[float, int]:
        """The metric's jumps between two shares: bisected until nothing smooth is left."""
        (low_B, low_open), (high_B, high_open) = at(low), at(high)
        if torch.equal(low_open, high_open):
            return 0.0, 0
        if high - low < 1e-9:
            return float((high_B - low_B).sum()), 1
        middle = (low + high) / 2
        left, right = jumps(low, middle), jumps(middle, high)
        return left[0] + right[0], left[1] + right[1]

    jumped = [jumps(step / 20, (step + 1) / 20) for step in range(20)]
    assert sum(count for _, count in jumped) > 0
    scores = edge_scores(model, task, steps=400)
    assert scores.remainder == pytest.approx(sum(jump for jump, _ in jumped), abs=2e-2)
    assert abs(scores.remainder) > 0.1  # type: ignore[arg-type]


def test_frozen_gates_leave_no_remainder() -> None:
    model, task = gated("llama"), make_task()
    with tape(model.hf, record=["open"]) as heard:
        model.logits(task.tokens[0].clean_BT)
    frozen = [FrozenGates(layer, heard["open", layer]) for layer in heard.layers("open")]
    with tape(model.hf, replace=frozen):
        scores = edge_scores(model, task, steps=40)
    assert scores.remainder == pytest.approx(0, abs=1e-2)
    assert abs(edge_scores(model, task, steps=40).remainder or 0) > 0.05


def test_activation_paths_add_up_for_every_layer_of_sources() -> None:
    """Edges out of one MLP sum to what the metric loses when that MLP alone is given its corrupt output."""
    model, task = tiny("gpt_neox in sequence"), make_task()
    parts, batch, metric = Parts.of(model), task.tokens[0], metric_of(task, "task")
    scores = edge_scores(model, task, method="activations", steps=60)
    corrupt, _ = recorded(parts, batch.corrupt_BT)
    source = parts.graph.mlp_source(0)
    hook = model.anatomy.mlps[0].register_forward_hook(lambda *_: corrupt.written_SBTD[source])
    patched_BV = model.logits(batch.clean_BT)[:, -1]
    hook.remove()
    expected = scores.baseline.clean - float(metric(patched_BV, batch, patched_BV).mean())
    found = scores.score_E[parts.graph.edges_E2[:, 0] == source].sum()
    assert abs(expected) > 1e-2
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("metric", ["logit difference", "probability difference", "divergence"])
@pytest.mark.parametrize("method", ["inputs", "clean-corrupt"])
def test_scores_do_not_depend_on_the_batch_size(method: str, metric: str) -> None:
    model, task = gated("qwen3"), make_task(5)
    together = edge_scores(model, task, method=method, metric=metric, steps=3)  # type: ignore[arg-type]
    one_by_one = edge_scores(model, task, method=method, metric=metric, steps=3, batch=2)  # type: ignore[arg-type]
    np.testing.assert_allclose(one_by_one.score_E, together.score_E, atol=1e-10)
    assert together.order_E.tolist() == one_by_one.order_E.tolist()
    assert np.abs(together.score_E).max() > 1e-3


def test_scores_leave_the_model_as_it_was() -> None:
    model = tiny("llama")
    wanted = {name: parameter.requires_grad for name, parameter in model.hf.named_parameters()}
    edge_scores(model, make_task())
    assert {name: parameter.requires_grad for name, parameter in model.hf.named_parameters()} == wanted
    assert all(parameter.grad is None for parameter in model.hf.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.anatomy.blocks)


def test_gpt2_small_has_the_published_number_of_edges() -> None:
    graph = ComponentGraph(n_layers=12, n_heads=12, n_key_heads=12, parallel=False)
    assert graph.n_edges == 32_491
    assert graph.edge_name(0) == "input->a0.h0<q>"
    for name in ("a0.h1->m0", "m0->a3.h2<q>", "m11->logits"):
        assert name in {graph.edge_name(edge) for edge in range(graph.n_edges)}


def test_parallel_blocks_have_no_edges_from_heads_to_the_mlp_beside_them() -> None:
    for parallel in (False, True):
        graph = ComponentGraph(n_layers=2, n_heads=2, n_key_heads=1, parallel=parallel)
        names = {graph.edge_name(edge) for edge in range(graph.n_edges)}
        assert ("a0.h1->m0" in names) is not parallel
        assert {"a0.h1->m1", "a0.h1->a1.g0<k>", "a0.h0->a1.h1<q>"} <= names
        assert "a1.h0->a1.g0<k>" not in names


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_edges_off_every_path_change_nothing(family: str) -> None:
    model = gated(family)
    graph, generator = graph_of(model), np.random.default_rng(1)
    kept_SR = graph.mask(np.flatnonzero(generator.random(graph.n_edges) < 0.25))
    on_paths_SR = graph.on_paths(kept_SR)
    assert 0 < on_paths_SR.sum() < kept_SR.sum()
    torch.testing.assert_close(circuit_logits(model, on_paths_SR), circuit_logits(model, kept_SR), atol=1e-12, rtol=0)


def test_edges_that_touch_attention() -> None:
    graph = ComponentGraph(n_layers=2, n_heads=2, n_key_heads=2, parallel=False)
    rest = {graph.edge_name(int(edge)) for edge in np.flatnonzero(~graph.touches_attention_E)}
    assert rest == {"input->m0", "input->m1", "m0->m1", "input->logits", "m0->logits", "m1->logits"}


@pytest.mark.parametrize("among", ["all", "attention"])
def test_the_curve_of_edges(among: str, tmp_path: object) -> None:
    model, task = gated("gpt2"), make_task(4)
    scores = edge_scores(model, task)
    found = edge_circuits(model, task, scores, among=among)  # type: ignore[arg-type]
    touching = scores.graph.touches_attention_E
    assert found.curve.total == (touching.sum() if among == "attention" else scores.graph.n_edges)
    assert found.curve.explained_S[-1] == pytest.approx(1)
    if among == "all":
        assert found.curve.explained_S[0] == pytest.approx(0)
    size = found.curve.smallest(0.9)
    assert size is not None
    assert found.curve.explained_S[found.curve.sizes_S >= size].min() >= 0.9
    assert 0 < (found.attention_edges(0.9) or 0) <= (found.on_paths(0.9) or 0) <= size == len(found.edges(0.9))
    assert found.check["gates flipped with all edges"] == 0
    assert found.check["largest logit error with all edges"] < 1e-12
    smaller = edge_circuits(model, task, scores, among=among, batch=1)  # type: ignore[arg-type]
    np.testing.assert_allclose(smaller.curve.metric_SN, found.curve.metric_SN, atol=1e-10)


def test_results_come_back_from_disk(tmp_path: object) -> None:
    model, task = tiny("gpt2"), make_task()
    scores = edge_scores(model, task)
    circuits = edge_circuits(model, task, scores)
    again = EdgeScores.load(scores.save(f"{tmp_path}/scores.safetensors"))
    np.testing.assert_array_equal(again.score_E, scores.score_E)
    assert again.top(5) == scores.top(5)
    assert EdgeCircuits.load(circuits.save(f"{tmp_path}/circuits.safetensors")).edges(0.9) == circuits.edges(0.9)


def test_random_circuits_of_a_size() -> None:
    found = random_edge_circuits(tiny("gpt2"), make_task(), 30, draws=3)
    assert found.explained_D.shape == (3,)
    assert len(set(found.explained_D)) == 3


def test_what_has_no_edges_is_refused_in_a_sentence() -> None:
    task, flow, half = make_task(), gate(tiny("gpt2"), GateConfig("flow", 1.0)), tiny("gpt2")
    half.hf.to(torch.bfloat16)
    with pytest.raises(GossamerError, match="flow gate"):
        edge_scores(flow, task)
    with pytest.raises(GossamerError, match=r"load gpt2 with dtype=torch\.float32"):
        edge_scores(half, task)
    with pytest.raises(GossamerError, match="no gradient at the clean run"):
        edge_scores(tiny("gpt2"), task, method="gradient", metric="divergence")
    with pytest.raises(GossamerError, match="Did you mean 'inputs'"):
        edge_scores(tiny("gpt2"), task, method="input")  # type: ignore[arg-type]
    scores = edge_scores(tiny("gpt2"), task)
    with pytest.raises(GossamerError, match="another graph"):
        edge_circuits(tiny("llama"), task, scores)
