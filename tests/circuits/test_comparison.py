"""What is said about circuits of two models: rules, the table, medians over tasks, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from edge_models import gated, make_task, tiny

from gossamer import GossamerError, LoadedModel
from gossamer.circuits.compare import compare, least_accuracy, require_able
from gossamer.circuits.comparison import OVERALL, Comparison, ModelCircuits, TaskComparison, rules_in_words
from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.edges import EdgeCircuits, EdgeScores
from gossamer.circuits.effect import Baseline, Curve, RandomCircuits, ShutCurve
from gossamer.circuits.pair import require_pair
from gossamer.circuits.patching import Effects
from gossamer.circuits.smallest import HeadCircuits, Stability
from gossamer.corpus import tokenizer as own_tokenizer

PROMPTS = 4
BASELINE = Baseline(np.full(PROMPTS, 4.0), np.zeros(PROMPTS))
GRAPH = ComponentGraph(n_layers=1, n_heads=2, n_key_heads=2, parallel=False)


def jump(unit: str, total: int, size: int | None, *, none: float = 0.0) -> Curve:
    """A curve that explains `none` with nothing kept and everything from `size` on; with None it never gets there."""
    sizes_S = np.arange(total + 1)
    share_S = np.where(sizes_S >= (total + 1 if size is None else size), 1.0, none)
    kind = ShutCurve if unit.startswith("attention") else Curve
    return kind(unit, total, sizes_S, 4 * np.repeat(share_S[:, None], PROMPTS, 1), BASELINE, {"ranking": unit})


def heads_of(size: int | None) -> HeadCircuits:
    effects = Effects("denoising", np.ones((2, 10, PROMPTS)), np.ones((2, PROMPTS)), BASELINE, (3, 1_000), {})
    drawn = RandomCircuits(5, 4 * np.full((3, PROMPTS), 0.25), BASELINE)
    stability = Stability(5, 0.75, None, 1)
    order = tuple((layer, head) for layer in range(2) for head in range(10))
    curve = jump("heads", 20, size)
    return HeadCircuits(effects, order, curve, (), None, 0.9, drawn, order[:2], 0.95, stability, {})


def model(name: str, heads: int | None, edges: int | None, single: int | None, *, none: float = 0.0) -> ModelCircuits:
    scores = EdgeScores(GRAPH, np.zeros(GRAPH.n_edges), "inputs", 5, "logit difference", BASELINE, 0.0)
    flips = {"gates flipped with all edges": 2.0, "gates flipped with no edge": 1.0, "gates compared": 500.0}
    counts, order_E = np.arange(GRAPH.n_edges + 1), np.arange(GRAPH.n_edges)
    found = [
        EdgeCircuits(GRAPH, among, order_E, jump(unit, GRAPH.n_edges, edges), counts, counts, flips)
        for among, unit in (("all", "edges"), ("attention", "edges at heads"))
    ]
    random = RandomCircuits(7, 4 * np.full((2, PROMPTS), 0.5), BASELINE)
    single_curve = jump("attention edges a prompt", 60, single, none=none)
    assert isinstance(single_curve, ShutCurve)
    return ModelCircuits(name, 1.0, heads_of(heads), scores, *found, single_curve, random)


def task(name: str, dense: ModelCircuits, sparse: ModelCircuits) -> TaskComparison:
    return TaskComparison(name, f"about {name}", "logit difference", 0.5, PROMPTS, dense, sparse)


def three() -> Comparison:
    """Ratios of heads 4, 2 and 10; of edges 3 where the sparse model gets there."""
    return Comparison(
        (
            task("one", model("D", 8, 9, 40), model("S", 2, 3, 4)),
            task("two", model("D", 12, 9, 40, none=0.6), model("S", 6, 3, 8)),
            task("three", model("D", 20, 9, 40), model("S", 2, None, 10)),
        ),
        (),
    )


def rows_of(found: Comparison, unit: str, level: float = 0.9) -> dict[str, tuple[float | None, ...]]:
    rows = [row for row in found.table([level]) if row.unit == unit]
    return {row.task: tuple(None if e is None else e.value for e in (row.dense, row.sparse, row.ratio)) for row in rows}


def test_rules_refer_to_one_another_only_where_they_have_the_same_parts() -> None:
    heads = {"ranking": "by effect", "left out": "replaced"}
    both = {"ranking": "by effect", "left out": "shut"}
    single = {"ranking": "by weight", "left out": "shut", "MLPs": "free"}
    assert rules_in_words({"heads": heads, "both": both, "single": single}) == [
        "heads, ranking: by effect; left out: replaced",
        "both as heads, but left out: shut",
        "single, ranking: by weight; left out: shut; MLPs: free",
    ]
    fewer = {"ranking": "by weight", "left out": "shut"}
    assert rules_in_words({"single": single, "fewer": fewer})[1] == "fewer, ranking: by weight; left out: shut"


def test_the_table_holds_both_sizes_dense_over_sparse_and_medians() -> None:
    assert rows_of(three(), "heads") == {
        "one": (8, 2, 4),
        "two": (12, 6, 2),
        "three": (20, 2, 10),
        OVERALL: (12, 2, 4),  # medians; the means are 13.3, 3.3 and 5.3
    }
    (overall,) = [row for row in three().table([0.9]) if (row.unit, row.task) == ("heads", OVERALL)]
    assert overall.ratio is not None
    assert (overall.ratio.low, overall.ratio.high) == (4, 4)
    assert overall.missing == ()


def test_over_all_names_the_tasks_without_a_size() -> None:
    rows = {row.task: row for row in three().table([0.9]) if row.unit == "edges"}
    assert rows["three"].sparse is None
    assert rows["three"].ratio is None
    assert rows[OVERALL].missing == ("three",)
    assert rows_of(three(), "edges")[OVERALL] == (9, 3, 3)


def test_a_level_that_nothing_kept_reaches_has_a_size_only_where_nothing_is_the_corrupt_run() -> None:
    """Shutting edges puts nothing in their place: with none kept the metric may lie anywhere between the two runs."""
    single = {row.task: row for row in three().table([0.5]) if row.unit == "attention edges a prompt"}
    assert single["two"].dense is None
    assert single["two"].with_none == ("dense",)
    assert single["one"].with_none == ()
    assert single[OVERALL].missing == ("two",)
    free = Comparison((task("none", model("D", 4, 9, 40), model("S", 0, 3, 4)),), ())
    assert rows_of(free, "heads") == {"none": (4, 0, None)}
    written = {row["unit"]: row for row in free.to_dict([0.9])["table"]}
    assert written["heads"]["sparse"] == {"value": 0, "low": 0, "high": 0}
    assert written["heads"]["reached with none"] == []


def test_what_is_known_beside_the_curves_is_printed() -> None:
    notes = "\n".join(three().notes())
    for said in (
        "one, dense: heads for 90%: 8, of which pruning leaves 2",
        "3 random circuits of 5 heads explain 0.25 (0.25 to 0.25)",
        "2 random circuits of 7 edges explain 0.50",
        "overlap of the top 5 heads: 0.75 between halves of the prompts",
        "areas of heads: CPR",
        "gates flipped by rounding: 3 of 1,000 in restarted runs, 3 of 500 in edge patching",
        "one: overlap of both models' heads for 90%: 0.25",
    ):
        assert said in notes, said
    areas = three().to_dict([0.9])["tasks"][0]["dense"]["areas"]
    assert set(areas) == {"heads", "edges", "edges at heads"}  # shut edges have no corrupt run to begin at


def test_a_comparison_survives_its_file(tmp_path: Path) -> None:
    loaded = Comparison.load(three().save(tmp_path / "circuits.safetensors"))
    assert loaded.table() == three().table()
    assert json.dumps(loaded.to_dict()) == json.dumps(three().to_dict())


def pair_of_models() -> tuple[LoadedModel, LoadedModel]:
    dense, sparse = (replace(make("gpt2"), optional_tokenizer=own_tokenizer.load()) for make in (tiny, gated))
    return dense, sparse


def test_a_gated_model_is_not_the_dense_one() -> None:
    dense, sparse = pair_of_models()
    require_pair(dense, sparse)
    with pytest.raises(GossamerError, match="give the dense model first"):
        require_pair(sparse, dense)


def test_tasks_of_one_name_are_refused() -> None:
    dense, sparse = pair_of_models()
    with pytest.raises(GossamerError, match="Two of the tasks are named random"):
        compare(dense, sparse, [make_task(), make_task(4)])
    with pytest.raises(GossamerError, match="Two of the tasks are named copy"):
        compare(dense, sparse, ["copy", "copy"])
    with pytest.raises(GossamerError, match="give the dense model first"):
        compare(sparse, dense, "copy")


def test_what_was_found_is_handed_on_after_every_task() -> None:
    seen: list[list[str]] = []
    tasks = [make_task(4), replace(make_task(4, seed=1), name="other")]
    found = compare(
        *pair_of_models(),
        tasks,
        force=True,
        mlps=False,
        random_draws=5,
        so_far=lambda part: seen.append([one.task for one in part.tasks]),
    )
    assert seen == [["random"], ["random", "other"]]
    assert "heads and MLPs" not in found.tasks[0].dense.curves
    for model in (one for task in found.tasks for one in (task.dense, task.sparse)):
        drawn = [random for random in (model.heads.random, model.random_edges) if random is not None]
        assert [len(random.explained_D) for random in drawn] == [5, 2]
    none = compare(*pair_of_models(), make_task(4), force=True, random_draws=0).tasks[0]
    assert {one.heads.random for one in (none.dense, none.sparse)} == {None}
    assert {one.random_edges for one in (none.dense, none.sparse)} == {None}


def test_a_model_must_be_halfway_from_chance_to_perfect(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task()
    assert task.chance == 0.5
    assert least_accuracy(task.chance) == 0.75
    for share, able in ((0.76, True), (0.75, True), (0.74, False)):
        monkeypatch.setitem(require_able.__globals__, "accuracy", lambda hf, task, share=share: share)
        if able:
            assert require_able(tiny("gpt2"), task) == share
        else:
            with pytest.raises(GossamerError, match=r"accuracy is 74\.0%.*needed 75\.0%"):
                require_able(tiny("gpt2"), task)


def test_a_comparison_of_everything_passes_its_effort_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `gossamer compare`: whether MLPs are components, and how many random circuits are drawn."""
    from gossamer.compare import run

    heard: dict[str, object] = {}

    def listen(*models: object, **how: object) -> Comparison:
        heard.update(how)
        return three()

    monkeypatch.setattr(run, "compare_circuits", listen)
    effort = run.Effort(mlps=False, random_draws=0, steps=3)
    one = replace(make_task(), name="one")
    how = {"level": 0.9, "seed": 0, "force": True, "say": lambda message: None}
    run._circuits(*pair_of_models(), one, effort, **how)  # type: ignore[arg-type]
    assert (heard["mlps"], heard["random_draws"], heard["steps"]) == (False, 0, 3)
