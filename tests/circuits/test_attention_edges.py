"""Single attention edges against whole forwards with forced-shut edges."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from edge_models import gated, tiny
from patching_tasks import make_task, score

from gossamer.attention import ForceShut, FrozenGates, tape
from gossamer.circuits.attention_curves import edge_curve
from gossamer.circuits.attention_edges import AttentionEdges, attention_edges
from gossamer.circuits.effect import Baseline
from gossamer.errors import GossamerError
from gossamer.models.micro import micro
from gossamer.tasks import Pair, Task, TokenBatch

EXACT = {"rtol": 0, "atol": 1e-9}
CASES = [("gpt2", tiny), ("gpt_neox", gated), ("llama", gated), ("olmo2", gated), ("gemma2", gated)]
NAMES = [f"{family} {make.__name__}" for family, make in CASES]


def shut(model, task, prompt: int, edges: list[tuple[int, int, int, int]]) -> float:
    """The metric of one prompt, alone and whole, with some edges forced shut."""
    batch = next(batch for batch in task.tokens if prompt in batch.rows)
    row = batch.rows.index(prompt)
    n_tokens = batch.clean_BT.shape[1]
    masks = [torch.zeros(1, model.anatomy.n_heads, n_tokens, n_tokens, dtype=torch.bool) for _ in range(2)]
    for layer, head, query, key in edges:
        masks[layer][0, head, query, key] = True
    one = TokenBatch((0,), *(t[[row]] for t in (batch.clean_BT, batch.corrupt_BT, batch.answers_BA, batch.wrong_BW)))
    with tape(model.hf, replace=[ForceShut(layer, mask) for layer, mask in enumerate(masks)]):
        return float(score(model, task, one, one.clean_BT)[0])


def rows(edges: AttentionEdges, chosen) -> list[tuple[int, int, int, int]]:
    columns = (edges.layer_E, edges.head_E, edges.query_E, edges.key_E)
    return [tuple(int(column[index]) for column in columns) for index in chosen]  # type: ignore[misc]


@pytest.mark.parametrize(("family", "make"), CASES, ids=NAMES)
def test_single_edges_equal_whole_forwards(family, make) -> None:
    model, task = make(family), make_task(3)
    edges = attention_edges(model, task, scoring="ablation")
    generator = np.random.default_rng(0)
    for index in generator.choice(len(edges), 12, replace=False):
        prompt = int(edges.prompt_E[index])
        expected = edges.baseline.clean_N[prompt] - shut(model, task, prompt, rows(edges, [index]))
        np.testing.assert_allclose(edges.score_E[index], expected, **EXACT)
    assert np.abs(edges.score_E).max() > 1e-3
    causal = {7: 28, 9: 45}
    n_heads = 2 * model.anatomy.n_heads
    for batch in task.tokens:
        counts = edges.per_prompt_N[list(batch.rows)]
        every = n_heads * causal[batch.clean_BT.shape[1]]
        assert ((counts < every) if model.is_sparse else (counts == every)).all()
    last = (edges.layer_E == 1) & (edges.query_E < 6)
    np.testing.assert_allclose(edges.score_E[last], 0, **EXACT)  # only the answer's position reads the last layer


@pytest.mark.parametrize(("family", "make"), CASES[:3], ids=NAMES[:3])
@pytest.mark.parametrize("mode", ["keep", "cut"])
def test_the_curve_equals_whole_forwards(family, make, mode) -> None:
    model, task = make(family), make_task(3)
    edges = attention_edges(model, task, scoring="gradient")
    sizes = (0, 3, 11, 30)
    curve = edge_curve(model, task, edges, mode=mode, sizes=sizes)
    rank_E = edges.ranks()
    for prompt in range(3):
        for size in sizes:
            mine = edges.prompt_E == prompt
            outside = mine & ((rank_E >= size) if mode == "keep" else (rank_E < size))
            closed = every_closed_edge(edges, prompt, task, model) if mode == "keep" else []
            expected = shut(model, task, prompt, rows(edges, np.flatnonzero(outside)) + closed)
            np.testing.assert_allclose(curve.metric_SN[curve.sizes_S == size][0, prompt], expected, **EXACT)
    end = curve.metric_SN[-1]
    if mode == "keep":
        np.testing.assert_allclose(end, edges.baseline.clean_N, **EXACT)
        assert np.abs(curve.metric_SN[0] - end).max() > 1e-3
    else:
        np.testing.assert_allclose(curve.metric_SN[0], edges.baseline.clean_N, **EXACT)


def every_closed_edge(edges: AttentionEdges, prompt: int, task: Task, model) -> list[tuple[int, int, int, int]]:
    """Pairs that are no edges of the prompt: an intervention could open their gates, and they are kept shut too."""
    batch = next(batch for batch in task.tokens if prompt in batch.rows)
    n_tokens = batch.clean_BT.shape[1]
    mine = set(rows(edges, np.flatnonzero(edges.prompt_E == prompt)))
    pairs = ((q, k) for q in range(n_tokens) for k in range(q + 1))
    every = {(layer, head, *pair) for pair in pairs for layer in range(2) for head in range(model.anatomy.n_heads)}
    return sorted(every - mine)


@pytest.mark.parametrize(("family", "make"), CASES[:4], ids=NAMES[:4])
def test_gradient_is_the_derivative_of_scaling_the_edge(family, make) -> None:
    """Against finite differences of one weight, with every gate frozen."""
    model, task = make(family), make_task(3)
    edges = attention_edges(model, task, scoring="gradient")
    batch = task.tokens[1]
    with tape(model.hf, record=("weights", "open")) as heard:
        model.logits(batch.clean_BT)
    frozen = [FrozenGates(layer, heard["open", layer]) for layer in range(2)]
    mine = np.flatnonzero(np.isin(edges.prompt_E, batch.rows))
    for index in mine[np.argsort(-np.abs(edges.score_E[mine]))[:4]]:
        layer, head, query, key = rows(edges, [index])[0]
        row, step = batch.rows.index(int(edges.prompt_E[index])), 1e-5
        metrics = []
        for sign in (1, -1):
            weights = heard["weights", layer].clone()
            weights[row, head, query, key] *= 1 + sign * step
            from gossamer.attention import Weights

            with tape(model.hf, replace=[*frozen, Weights(layer, weights)]):
                metrics.append(float(score(model, task, batch, batch.clean_BT)[row]))
        assert edges.score_E[index] == pytest.approx((metrics[0] - metrics[1]) / (2 * step), rel=1e-4, abs=1e-8)


def test_integrated_scores_add_up_where_patterns_are_frozen() -> None:
    """Sum of a prompt's scores = metric with all weights minus metric with none, up to the steps of the integral."""
    from gossamer.circuits import attention_edges as module

    model, task = tiny("gpt2", size=0.2), make_task(3)
    found = {}
    for steps in (2, 40):
        before, module.STEPS = module.STEPS, steps
        edges = attention_edges(model, task, scoring="integrated")
        module.STEPS = before
        sums_N = np.bincount(edges.prompt_E, edges.score_E)
        nothing = edge_curve(model, task, edges, sizes=[]).metric_SN[0]
        found[steps] = np.abs(sums_N - (edges.baseline.clean_N - nothing)).max()
    assert found[40] < 1e-3
    assert found[40] < found[2]


def test_hand_worked_edges_of_the_micro_model() -> None:
    batch = TokenBatch(
        (0,), torch.tensor([[0, 1, 2, 1]]), torch.tensor([[0, 3, 2, 1]]), torch.tensor([[2]]), torch.tensor([[1]])
    )
    pair = Pair("a b a", "c b a", ("b",), ("a",), "micro")
    task = Task("micro", "induction", (pair,), (batch,), "wrong answers", "logit difference", 0.5, 0)
    dense = attention_edges(micro(), task, scoring="ablation")
    lost = dict(zip(rows(dense, range(len(dense))), dense.score_E, strict=True))
    assert lost[1, 0, 3, 2] == pytest.approx(3 - -1)
    assert lost[1, 0, 3, 1] == pytest.approx(3 - 4)
    sparse = attention_edges(micro(gated=True), task, scoring="ablation")
    assert len(sparse) == 8
    kept = edge_curve(micro(gated=True), task, sparse)
    assert kept.smallest(0.9) == 2  # copying one token back, and the induction edge
    assert kept.rule["left out"].startswith("forced shut")


def test_the_refined_grid_finds_what_running_every_size_finds() -> None:
    model, task = gated("gpt2"), make_task(4)
    edges = attention_edges(model, task)
    grid = edge_curve(model, task, edges, levels=(0.9,))
    every = edge_curve(model, task, edges, sizes=range(int(edges.per_prompt_N.max()) + 1))
    shared = np.isin(every.sizes_S, grid.sizes_S)
    np.testing.assert_allclose(every.metric_SN[shared], grid.metric_SN, **EXACT)
    size = grid.smallest(0.9)
    assert size is not None
    exact = every.smallest(0.9)
    assert exact is not None
    assert every.is_complete
    assert 0 <= size - exact <= max(1, 0.02 * size)


def test_ties_go_to_the_earlier_layer_head_query_and_key() -> None:
    places = [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 2, 0), (0, 0, 1, 1), (0, 0, 1, 0), (0, 1, 2, 1)]
    layer_E, head_E, query_E, key_E = np.array(places).T
    score_E = np.array([1.0, -1.0, 1.0, 1.0, -1.0, 2.0])
    baseline = Baseline(np.ones(1), np.zeros(1))
    where = (np.zeros(6, dtype=np.int64), layer_E, head_E, query_E, key_E)
    edges = AttentionEdges("gradient", *where, np.ones(6), score_E, baseline, {})
    assert edges.ranks().tolist() == [5, 4, 3, 2, 1, 0]
    assert edges.ranks(by_magnitude=False).tolist() == [3, 5, 2, 1, 4, 0]


def test_edges_scored_on_other_prompts_are_refused() -> None:
    """As many prompts, of the same lengths, in the same order: only what they say differs."""
    model, task = tiny("gpt2"), make_task(3)
    edges = attention_edges(model, task)
    assert edge_curve(model, make_task(3), edges, sizes=[2]).sizes_S[1] == 2
    other = replace(task, tokens=tuple(replace(batch, clean_BT=batch.clean_BT.flip(1)) for batch in task.tokens))
    for wrong in (other, make_task(4)):
        with pytest.raises(GossamerError, match="scored on other prompts than those of random"):
            edge_curve(model, wrong, edges, sizes=[2])


def test_batch_size_changes_nothing_and_files_keep_everything(tmp_path: Path) -> None:
    model, task = gated("gpt2"), make_task(3)
    for scoring in ("ablation", "integrated"):
        auto = attention_edges(model, task, scoring=scoring)  # type: ignore[arg-type]
        small = attention_edges(model, task, scoring=scoring, batch=3)  # type: ignore[arg-type]
        places = [sorted(zip(e.prompt_E, rows(e, range(len(e))), e.score_E, strict=True)) for e in (auto, small)]
        assert [place[:2] for place in places[0]] == [place[:2] for place in places[1]]
        np.testing.assert_allclose([place[2] for place in places[0]], [place[2] for place in places[1]], **EXACT)
    loaded = AttentionEdges.load(auto.save(tmp_path / "edges.safetensors"))
    np.testing.assert_array_equal(loaded.ranks(), auto.ranks())
    assert loaded.scoring == "integrated"


def test_an_unknown_scoring_gets_a_sentence() -> None:
    with pytest.raises(GossamerError, match="gradient"):
        attention_edges(tiny("gpt2"), make_task(3), scoring="gradients")  # type: ignore[arg-type]
