"""Every figure of a comparison, of one model's patterns and of an attribution, by name: functions of a saved result.

Whoever adds a result to a comparison adds its figures to `OF_A_PAIR`: the command line, the page and the documentation
go through these tables.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from gossamer.attribution.pair import AttributedPair
from gossamer.circuits.comparison import Comparison as CircuitComparison
from gossamer.circuits.comparison import TaskComparison
from gossamer.circuits.smallest import HeadCircuits
from gossamer.compare.comparison import ROLES, Comparison, Side
from gossamer.errors import GossamerError, nearest
from gossamer.figures.before_after import before_after
from gossamer.figures.circuit_comparison import circuit_comparison
from gossamer.figures.curves import edge_curves, head_circuits
from gossamer.figures.density_map import density_of_maps
from gossamer.figures.graph_diff import graph_diff
from gossamer.figures.head_grid import head_grid
from gossamer.figures.label_transitions import label_transitions
from gossamer.figures.scatter_matrix import scatter_matrix
from gossamer.figures.statistics_sheet import statistics_sheet
from gossamer.figures.taxonomy_gallery import taxonomy_gallery
from gossamer.patterns.reading import ModelPatterns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Head = tuple[int, int]
Result = Comparison | ModelPatterns | AttributedPair | CircuitComparison | HeadCircuits
ON_MAPS = ("heads", "prompt", "edges", "without_first")
STRONGEST = 9  # heads shown of a model whose curve never reaches the level
SCATTERED, BESIDE = 6, 3  # heads in a scatter matrix and before and after, unless named


@dataclass(frozen=True)
class View:
    """What a reader may choose; a figure takes what concerns it."""

    heads: tuple[Head, ...] = ()
    prompt: int | None = None  # the first, unless the figure knows a better one
    edges: tuple[tuple[int, int], ...] = ()
    without_first: bool = False
    measure: str = "pearson"

    def chosen(self) -> list[str]:
        """What is not as it would be anyway."""
        return [part.name for part in fields(self) if getattr(self, part.name) != part.default]


@dataclass(frozen=True)
class Kind:
    """One figure: what there is to see in it, how it is drawn from a result, and which choices it takes."""

    caption: str
    draw: Callable[[Any, View], Figure]
    possible: Callable[[Any], bool] = lambda result: True
    takes: tuple[str, ...] = ()


def circuit_grid(pair: Comparison, **options: Any) -> Figure:
    """The circuits' heads in order of importance; where the level is never reached, the strongest heads."""
    what = f"{pair.level:.0%} of {pair.task}"
    shown = [
        _shown_heads(side, name, pair.circuit(role), what)
        for name, (role, side) in zip(pair.names, pair.sides.items(), strict=True)
    ]
    defaults: dict[str, Any] = {"heads": [heads for heads, _ in shown], "titles": [title for _, title in shown]}
    return head_grid([side.maps for side in pair.sides.values()], **(defaults | options))


def _shown_heads(side: Side, name: str, circuit: list[Head], what: str) -> tuple[list[Head], str]:
    if circuit:
        return circuit, f"{name}: {len(circuit)} of {len(side.maps.heads)} heads for {what}"
    strongest = list(side.heads.order[:STRONGEST])
    return strongest, f"{name}: no circuit reaches the level; its {len(strongest)} strongest heads"


def _grid(pair: Comparison, view: View) -> Figure:
    named = {"heads": [view.heads] * 2, "titles": pair.names} if view.heads else {}
    return circuit_grid(pair, prompt=view.prompt or 0, edges=view.edges, without_first=view.without_first, **named)


def _every_head(pair: Comparison, view: View) -> Figure:
    maps = [side.maps for side in pair.sides.values()]
    return head_grid(
        maps, prompt=view.prompt or 0, columns=maps[0].n_heads, edges=view.edges, without_first=view.without_first
    )


def _gallery(role: str) -> Callable[[Comparison, View], Figure]:
    def draw(pair: Comparison, view: View) -> Figure:
        return taxonomy_gallery(pair.sides[role].maps, pair.sides[role].report, prompt=view.prompt)

    return draw


def _head_curves(role: str) -> Callable[[Comparison, View], Figure]:
    return lambda pair, view: head_circuits(pair.sides[role].heads, level=pair.level)


def _density(role: str) -> Callable[[Comparison, View], Figure]:
    return lambda pair, view: density_of_maps(pair.sides[role].maps)


def _before_after(pair: Comparison, view: View) -> Figure:
    heads = view.heads or alive_first(pair)[:BESIDE]
    return before_after(pair.dense.maps, pair.sparse.maps, heads, prompt=view.prompt or 0, edges=view.edges)


def _scatter(pair: Comparison, view: View) -> Figure:
    heads = view.heads or alive_first(pair)[:SCATTERED]
    relations = [pair.relations.of_model(number) for number in range(len(ROLES))]
    return scatter_matrix([side.maps for side in pair.sides.values()], relations, heads, measure=view.measure)


def alive_first(pair: Comparison) -> list[Head]:
    """The sparse model's heads by importance for the task, those that carry something before the dead ones."""
    dead_LH = pair.statistics.sparse.dead
    return sorted(pair.sparse.heads.order, key=lambda head: bool(dead_LH[head]))


def _circuits(pair: Comparison, view: View) -> Figure:
    assert pair.circuits is not None
    found = pair.circuits.on(pair.task)
    units = ("heads", "edges", found.dense.attention_edges.unit)
    return circuit_comparison(
        {unit: {"dense": found.dense.curves[unit], "sparse": found.sparse.curves[unit]} for unit in units},
        title=f"{pair.task}: {pair.description}",
        notes=found.notes(),
        level=pair.level,
    )


def _edge_curves(pair: Comparison, view: View) -> Figure:
    assert pair.circuits is not None
    found = pair.circuits.on(pair.task)
    curves = {"dense": found.dense.attention_edges, "sparse": found.sparse.attention_edges}
    title = f"{pair.task}: single attention edges"
    return edge_curves(curves, title=title, notes=[found.beside()], level=pair.level)


def _has_edges(pair: Comparison) -> bool:
    return pair.circuits is not None


def _sketch_of_example(pair: Comparison, view: View) -> Figure:
    assert pair.attribution is not None
    return pair.attribution.example.sketch()


def _is_attributed(pair: Comparison) -> bool:
    return pair.attribution is not None


OF_A_PAIR: dict[str, Kind] = {
    "head-grid": Kind("The heads each model needs, most important first. White is exactly zero.", _grid, takes=ON_MAPS),
    "circuits": Kind("Explained effect against what is kept; feet mark the size for the level.", _circuits, _has_edges),
    "heads-dense": Kind("The dense model: effect of each head, and circuits of growing size.", _head_curves("dense")),
    "heads-sparse": Kind("The sparse model: the same.", _head_curves("sparse")),
    "attention-edges": Kind("Explained effect against single attention edges kept.", _edge_curves, _has_edges),
    "every-head": Kind(
        "Every head of both models on one prompt, a row a layer.",
        _every_head,
        takes=("prompt", "edges", "without_first"),
    ),
    "before-after": Kind(
        "The sparse model's most important heads, before and after.", _before_after, takes=("heads", "prompt", "edges")
    ),
    "density-dense": Kind("Open edges of the dense model, head by head.", _density("dense")),
    "density-sparse": Kind("Open edges of the sparse model. Crossed: never open on these prompts.", _density("sparse")),
    "gallery-dense": Kind("The dense model's clearest head of every class.", _gallery("dense"), takes=("prompt",)),
    "gallery-sparse": Kind("The sparse model's clearest head of every class.", _gallery("sparse"), takes=("prompt",)),
    "transitions": Kind(
        "What becomes of a head: its label in the dense model (rows) and in the sparse one.",
        lambda pair, view: label_transitions(pair.dense.report, pair.sparse.report),
    ),
    "statistics": Kind(
        "Every dot is a head; on the line nothing changed. Statements with their answers below.",
        lambda pair, view: statistics_sheet(pair.statistics),
    ),
    "scatter-matrix": Kind(
        "Do two heads do the same thing? Weight against weight on the same edges.", _scatter, takes=("heads", "measure")
    ),
    "attribution": Kind(
        "The heads that carry the answer over one hop; red squares: the hop.", _sketch_of_example, _is_attributed
    ),
}


def _chosen_grid(one: ModelPatterns, view: View) -> Figure:
    return head_grid(
        one.maps,
        heads=[view.heads] if view.heads else None,
        prompt=view.prompt or 0,
        columns=9 if view.heads else one.maps.n_heads,
        edges=view.edges,
        without_first=view.without_first,
    )


def _scatter_of_one(one: ModelPatterns, view: View) -> Figure:
    return scatter_matrix([one.maps], [one.relations], view.heads or one.clearest()[:SCATTERED], measure=view.measure)


OF_ONE_MODEL: dict[str, Kind] = {
    "head-grid": Kind("Every head on one prompt, a row a layer. White is exactly zero.", _chosen_grid, takes=ON_MAPS),
    "gallery": Kind(
        "The clearest head of every class.",
        lambda one, view: taxonomy_gallery(one.maps, one.report, prompt=view.prompt),
        takes=("prompt",),
    ),
    "density": Kind("Open edges, head by head.", lambda one, view: density_of_maps(one.maps)),
    "scatter-matrix": Kind(
        "Do two heads do the same thing? Weight against weight on the same edges.",
        _scatter_of_one,
        lambda one: len(one.clearest()) >= 2,
        takes=("heads", "measure"),
    ),
}


def _difference(pair: AttributedPair, view: View) -> Figure:
    found = pair.difference()
    assert found is not None
    return graph_diff(found)


OF_AN_ATTRIBUTION: dict[str, Kind] = {
    "sketch": Kind(
        "The heads that carry the answer over one hop; red squares: the hop.", lambda pair, view: pair.sketch()
    ),
    "graph-diff": Kind(
        "From the dense model's graph of features to the sparse one's, features of one layer and token together.",
        _difference,
        lambda pair: pair.difference() is not None,
    ),
}
OF_HEADS: dict[str, Kind] = {
    "heads": Kind("The effect of each head, and circuits of growing size.", lambda found, view: head_circuits(found))
}
KINDS: dict[type, dict[str, Kind]] = {
    Comparison: OF_A_PAIR,
    ModelPatterns: OF_ONE_MODEL,
    AttributedPair: OF_AN_ATTRIBUTION,
    HeadCircuits: OF_HEADS,
}


def _of_task(found: TaskComparison, result: CircuitComparison, view: View) -> Figure:
    drawn = {"dense": found.dense.random_edges, "sparse": found.sparse.random_edges}
    random = {role: (one.size, list(one.explained_D)) for role, one in drawn.items() if one is not None}
    return circuit_comparison(
        {unit: {"dense": curve, "sparse": found.sparse.curves[unit]} for unit, curve in found.dense.curves.items()},
        title=f"{found.task}: {found.description}",
        notes=found.notes(),
        level=found.dense.heads.level,
        random={"edges": random} if random else None,
    )


def figures_of(result: Result) -> dict[str, Kind]:
    """The figures that can be drawn from a result; of circuits one a task, under its name."""
    if isinstance(result, CircuitComparison):
        caption = "Explained effect against what is kept; feet mark the size for the level."
        return {task.task: Kind(caption, partial(_of_task, task)) for task in result.tasks}
    return {name: kind for name, kind in KINDS[type(result)].items() if kind.possible(result)}


def draw(result: Result, name: str, view: View | None = None) -> Figure:
    """One figure of a result; a choice that it has no use for is refused."""
    kinds = figures_of(result)
    if name not in kinds:
        raise GossamerError(f"This result has no figure {name!r}; it has {', '.join(kinds)}.{nearest(name, kinds)}")
    view = view or View()
    for choice in view.chosen():
        if choice not in kinds[name].takes:
            taken = ", ".join(kinds[name].takes) or "nothing to choose"
            raise GossamerError(f"The figure {name} has no use for a choice of {choice}; it takes {taken}.")
    return kinds[name].draw(result, view)
