"""The fast engine against one whole forward per component, and what must hold of any patching."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from edge_models import gated, tiny
from patching_tasks import make_task, naive, same_prompts, score

from gossamer.attention import HeadOutput, tape
from gossamer.circuits.edge_measure import EdgeMeasure
from gossamer.circuits.edge_metrics import metric_of
from gossamer.circuits.effect import Baseline
from gossamer.circuits.patching import Effects, effects, every_component, position_effects
from gossamer.circuits.runs import PairedRuns
from gossamer.circuits.scenarios import Scenarios, mean_activations, measure
from gossamer.circuits.streams import Parts
from gossamer.errors import GossamerError
from gossamer.models.micro import micro
from gossamer.tasks import Task

EXACT = {"rtol": 0, "atol": 1e-9}
FAMILIES = ("gpt2", "gpt_neox", "llama", "olmo2", "qwen3", "gemma2")
CASES = [(family, make, "denoising") for family in FAMILIES for make in (tiny, gated)]
CASES += [("gpt2", tiny, "noising"), ("llama", gated, "noising")]
NAMES = [f"{family} {make.__name__} {method}" for family, make, method in CASES]


@pytest.mark.parametrize(("family", "make", "method"), CASES, ids=NAMES)
def test_fast_equals_one_forward_per_component(family, make, method) -> None:
    base, source = ("corrupt", "clean") if method == "denoising" else ("clean", "corrupt")
    model, task = make(family), make_task()
    fast = effects(model, task, method=method)
    heads_LHN, mlps_LN = naive(model, task, base=base, source=source)
    np.testing.assert_allclose(fast.heads_LHN, heads_LHN, **EXACT)
    np.testing.assert_allclose(fast.mlps_LN, mlps_LN, **EXACT)
    assert np.abs(fast.effect_LH).max() > 0.01
    assert fast.effect_LH.std() > 1e-3
    assert fast.gate_flips[0] == 0
    assert (fast.gate_flips[1] > 0) == model.is_sparse


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_zero_ablation_equals_one_forward_per_component(family) -> None:
    model, task = gated(family), make_task()
    fast = effects(model, task, method="zero")
    heads_LHN, mlps_LN = naive(model, task, base="clean", source="zero")
    np.testing.assert_allclose(fast.heads_LHN, heads_LHN, **EXACT)
    np.testing.assert_allclose(fast.mlps_LN, mlps_LN, **EXACT)
    assert np.abs(fast.effect_LH).max() > 0.01


def test_mean_ablation_puts_in_the_mean_over_corrupt_prompts_and_positions() -> None:
    model, task = tiny("gpt2"), make_task()
    fast = effects(model, task, method="mean")
    outputs = []
    for batch in task.tokens:
        with tape(model.hf, record=("head_output",)) as heard:
            model.logits(batch.corrupt_BT)
        outputs.append(heard["head_output", 1][:, :, 2].flatten(0, 1))
    mean_E = torch.cat(outputs).mean(0)
    torch.testing.assert_close(mean_activations(PairedRuns(model, task, whole=True)).heads_L[1][0, 0, 2], mean_E)
    for batch in task.tokens:
        with tape(model.hf, replace=[HeadOutput(1, 2, mean_E)]):
            expected = score(model, task, batch, batch.clean_BT)
        np.testing.assert_allclose(fast.heads_LHN[1, 2, list(batch.rows)], expected, **EXACT)


def test_hand_worked_answers_of_the_micro_model() -> None:
    from patching_tasks import Pair, Task, TokenBatch

    batch = TokenBatch(
        (0,), torch.tensor([[0, 1, 2, 1]]), torch.tensor([[0, 3, 2, 1]]), torch.tensor([[2]]), torch.tensor([[1]])
    )
    pair = Pair("a b a", "c b a", ("b",), ("a",), "micro")
    task = Task("micro", "induction", (pair,), (batch,), "wrong answers", "logit difference", 0.5, 0)
    dense = effects(micro(), task)
    assert (dense.baseline.clean, dense.baseline.corrupt) == (pytest.approx(3), pytest.approx(0))
    np.testing.assert_allclose(dense.effect_LH, [[1, 1 / 3], [2 / 3, 1 / 3]], atol=1e-9)
    sparse = effects(micro(gated=True), task)
    np.testing.assert_allclose(sparse.heads_LHN[..., 0], [[4, 0], [4, 0]], atol=1e-9)
    assert dense.ranking() == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert sparse.ranking() == [(0, 0), (1, 0), (0, 1), (1, 1)]  # ties by (layer, head)


@pytest.mark.parametrize("family", ["gpt_neox", "olmo2"])
def test_nothing_patched_is_the_baseline_and_everything_patched_the_other_run(family) -> None:
    """All heads and MLPs from the other run leave only the embedding of the base run at the last position."""
    model, task = gated(family), make_task(first=(3, 2))
    for batch in task.tokens:  # the answer's own token is the same in both prompts
        batch.corrupt_BT[:, -1] = batch.clean_BT[:, -1]
    runs = PairedRuns(model, task)
    shape = (runs.parts.n_layers, runs.parts.n_heads)
    everything_RLH = np.stack([np.zeros(shape, dtype=bool), np.ones(shape, dtype=bool)])
    scenarios = Scenarios(everything_RLH, everything_RLH.any(-1), "clean")
    metric_RN = measure(runs, scenarios, base="corrupt")
    np.testing.assert_allclose(metric_RN[0], runs.baseline.corrupt_N, **EXACT)
    np.testing.assert_allclose(metric_RN[1], runs.baseline.clean_N, **EXACT)
    assert np.abs(runs.baseline.clean_N - runs.baseline.corrupt_N).min() > 1e-4


def test_equal_prompts_have_no_effects() -> None:
    task = same_prompts(make_task())
    found = effects(gated("llama"), task)
    for patched in (found.heads_LHN, found.mlps_LN, edge_circuits_of_equal_prompts(task)):
        np.testing.assert_allclose(patched, np.broadcast_to(found.baseline.clean_N, patched.shape), **EXACT)
    assert found.baseline.is_weak
    assert np.isnan(found.effect_LH).all()


def edge_circuits_of_equal_prompts(task: Task) -> np.ndarray:
    """The metric of circuits with none, some and all of the edges."""
    model = gated("llama")
    parts = Parts.of(model)
    generator = np.random.default_rng(0)
    shares = [generator.random(parts.graph.n_edges) < share for share in (0, 0.5, 1)]
    some = [parts.graph.mask(np.flatnonzero(kept_E)) for kept_E in shares]
    return EdgeMeasure(parts, task, metric_of(task, "task"), 4).circuits(some)


class OffEverySecondTime:
    """A hook in front of a block that moves its input on every second call, as far as gates must notice."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: object, args: tuple[torch.Tensor, ...], kwargs: dict) -> object:  # type: ignore[type-arg]
        self.calls += 1
        if self.calls % 2:
            return None
        if args:
            return (args[0].flip(-1), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"].flip(-1)}


def test_gates_that_flip_are_counted_in_both_runs() -> None:
    model, task = gated("gpt2"), make_task(2)
    runs = PairedRuns(model, task)
    assert runs.gate_flips()[0] == 0
    gates = sum(2 * 3 * (batch.clean_BT.shape[1] - 1) * batch.clean_BT.shape[1] for batch in task.tokens[1:])
    assert runs.gate_flips()[1] > gates
    counted = []
    for which in ("clean", "corrupt"):
        hook = model.anatomy.blocks[1].register_forward_pre_hook(OffEverySecondTime(), with_kwargs=True)
        counted.append(sum(runs._flips(group, which)[0] for group in runs.groups))  # type: ignore[arg-type]
        hook.remove()
    assert min(counted) >= 1
    hook = model.anatomy.blocks[1].register_forward_pre_hook(OffEverySecondTime(), with_kwargs=True)
    assert runs.gate_flips()[0] == sum(counted)
    hook.remove()


def test_gates_that_flip_in_edge_patching_are_counted(monkeypatch) -> None:
    model, task = gated("gpt2"), make_task(4)
    measure = EdgeMeasure(Parts.of(model), task, metric_of(task, "task"), 1)
    quiet = measure.check()
    assert (quiet["gates flipped with all edges"], quiet["gates flipped with no edge"]) == (0, 0)
    assert quiet["gates compared"] == sum(2 * 2 * 3 * len(b) * b.clean_BT.shape[1] ** 2 for b in task.tokens)
    plainly, calls = EdgeMeasure._with_gates, count()

    def flipping_one(self: EdgeMeasure, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits_BV, opened = plainly(self, run)
        if next(calls) % 2:  # the patched run, behind the plain one
            opened[1][0, 0, 0, 0] ^= True
        return logits_BV, opened

    monkeypatch.setattr(EdgeMeasure, "_with_gates", flipping_one)
    found = measure.check()
    assert (found["gates flipped with all edges"], found["gates flipped with no edge"]) == (4, 4)  # one a prompt


@pytest.mark.parametrize("make", [tiny, gated])
def test_a_model_that_answers_otherwise_when_taken_up_again_is_refused(make, monkeypatch) -> None:
    whole = PairedRuns.restart
    monkeypatch.setattr(PairedRuns, "restart", lambda *arguments: whole(*arguments) + 0.1)
    with pytest.raises(GossamerError, match="does not give the same answer when its blocks are called one by one"):
        PairedRuns(make("gpt2"), make_task(2))


def test_a_flipped_gate_excuses_another_answer(monkeypatch) -> None:
    whole = PairedRuns.restart
    monkeypatch.setattr(PairedRuns, "restart", lambda *arguments: whole(*arguments) + 0.1)
    monkeypatch.setattr(PairedRuns, "_flips", lambda *arguments: (1, 100))
    assert len(PairedRuns(gated("gpt2"), make_task(2)).groups) == 2


def test_a_part_of_the_prompts_is_ranked_by_the_difference_over_all() -> None:
    """The last prompts' own difference has the other sign: divided by it, the best head would come last."""
    baseline = Baseline(np.array([4.0, 4.0, 4.0, -0.5]), np.array([0.0, 0.0, 0.0, 0.5]))
    heads_LHN = baseline.corrupt_N + np.array([[[3.0] * 4, [1.0] * 4, [-1.0] * 4]])
    found = Effects("denoising", heads_LHN, baseline.corrupt_N[None], baseline, (0, 0), {})
    assert found.ranking() == found.ranking(prompts=[3]) == [(0, 0), (0, 1), (0, 2)]
    noising = Effects(
        "noising", baseline.clean_N - heads_LHN + baseline.corrupt_N, heads_LHN[:, 0], baseline, (0, 0), {}
    )
    assert noising.ranking(prompts=[3]) == [(0, 0), (0, 1), (0, 2)]


def test_runs_that_no_memory_holds_are_refused_with_their_size(monkeypatch) -> None:
    model, task = tiny("gpt2"), make_task(2)
    held = sum(
        tensor.numel() * tensor.element_size()
        for group in PairedRuns(model, task).groups
        for run in (group.clean, group.corrupt)
        for tensor in (*run.hidden_LNSD, *run.heads_LNSHE, *run.mlps_LNSD)
    )
    monkeypatch.setattr("gossamer.circuits.runs.memory_of", lambda device: held)
    PairedRuns(model, task)
    monkeypatch.setattr("gossamer.circuits.runs.memory_of", lambda device: held - 1)
    with pytest.raises(GossamerError, match=r"runs of 2 prompts of random take 0 GB, and cpu has 0 GB; take fewer"):
        PairedRuns(model, task)


def test_masks_of_single_edges_count_in_what_fits_the_memory(monkeypatch) -> None:
    runs = PairedRuns(tiny("gpt2"), make_task(2))
    assert runs.rows_per_forward(9, 0, masked=True) <= runs.rows_per_forward(9, 0)
    monkeypatch.setattr("gossamer.circuits.runs.MEMORY_BUDGET", 10**6)
    assert runs.rows_per_forward(9, 0, masked=True) < runs.rows_per_forward(9, 0)


def test_batch_size_changes_nothing() -> None:
    model, task = gated("gpt2"), make_task()
    auto = effects(model, task)
    for batch in (1, 5):
        small = effects(model, task, batch=batch)
        np.testing.assert_allclose(small.heads_LHN, auto.heads_LHN, **EXACT)
        assert small.ranking() == auto.ranking()


def test_progress_counts_every_row() -> None:
    seen: list[tuple[int, int]] = []
    model, task = tiny("gpt2"), make_task()
    effects(model, task, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(every_component(2, 3, "clean")) * len(task)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("method", ["denoising", "zero"])
def test_single_positions(method) -> None:
    """Each head at each position, against the tape on whole prompts; before the first difference nothing happens."""
    model, task = gated("llama"), make_task()
    found = position_effects(model, task, method=method)
    for batch in task.tokens:
        rows = list(batch.rows)
        length = batch.clean_BT.shape[1]
        assert np.isnan(found.heads_LHTN[:, :, length:, rows]).all()
        with tape(model.hf, record=("head_output",)) as heard:
            model.logits(batch.clean_BT)
        for layer, head, position in ((0, 1, 0), (0, 1, 3), (1, 2, length - 1), (0, 3, 5)):
            value = heard["head_output", layer][:, [position]][:, :, [head]] if method == "denoising" else 0.0
            with tape(model.hf, replace=[HeadOutput(layer, head, value, positions=position)]):
                expected = score(model, task, batch, batch.corrupt_BT if method == "denoising" else batch.clean_BT)
            np.testing.assert_allclose(found.heads_LHTN[layer, head, position, rows], expected, **EXACT)
    assert np.nanmax(np.abs(found.effect_LHT)) > 0.01
    if method == "denoising":
        first = found.heads_LHTN[:, :, 0]
        np.testing.assert_allclose(first, np.broadcast_to(found.baseline.corrupt_N, first.shape), **EXACT)
        later_N = found.heads_LHTN[1, :, :-1]  # in the last layer only the answer's position counts
        long = list(task.tokens[1].rows)
        np.testing.assert_allclose(
            later_N[..., long], np.broadcast_to(found.baseline.corrupt_N[long], later_N[..., long].shape), **EXACT
        )


def test_later_positions_of_a_probability_metric_in_float32_stay_close() -> None:
    model, task = tiny("gpt2"), make_task(metric="probability difference")
    exact = effects(model, task)
    model.hf.float()
    single = effects(model, task)
    np.testing.assert_allclose(single.heads_LHN, exact.heads_LHN, atol=1e-5)
    assert single.provenance["dtype"] == "float32"


def test_effects_survive_their_file_and_rank_parts_of_the_prompts(tmp_path: Path) -> None:
    found = effects(tiny("gpt2"), make_task())
    loaded = Effects.load(found.save(tmp_path / "effects.safetensors"))
    assert loaded.ranking() == found.ranking()
    assert loaded.provenance == found.provenance
    assert loaded.gate_flips == (0, 0)
    assert len(found.ranking(mlps=True)) == 8
    assert sorted(found.ranking(prompts=[0, 1, 2])) == sorted(found.ranking())
    interval = found.interval(*found.ranking()[0])
    assert interval.low <= interval.value <= interval.high


def test_mistakes_get_a_sentence() -> None:
    model, task = tiny("gpt2"), make_task()
    with pytest.raises(GossamerError, match="denoising"):
        effects(model, task, method="denoise")  # type: ignore[arg-type]
    with pytest.raises(GossamerError, match="at least one row"):
        effects(model, task, batch=0)
    scenarios = every_component(2, 3, "zero")
    with pytest.raises(GossamerError, match="whole=True"):
        measure(PairedRuns(model, task), scenarios, base="clean")


def test_hooks_are_gone_afterwards() -> None:
    model, task = tiny("gpt2"), make_task()
    before = score(model, task, task.tokens[0], task.tokens[0].clean_BT)
    effects(model, task)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.hf.modules())
    assert torch.equal(before, score(model, task, task.tokens[0], task.tokens[0].clean_BT))
