"""Edges of the component graph: their scores, and the circuits of the best n of them, verified by real edge patching.

    scores = edge_scores(model, task)             # integrated-gradient edge attribution, a few backward passes
    found = edge_circuits(model, task, scores)    # the top n edges, for many n, each measured exactly
    found.curve.smallest(0.9), found.attention_edges(0.9)

Rule: the n edges of largest |score| are kept, ties in the order of receivers, then sources; every other edge carries
what its source wrote in the corrupt run. Edges without a path from the embedding to the logits count in n and have no
effect; how many edges do lie on one stands beside n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np

from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.edge_attribution import METHODS, Attribution, Method
from gossamer.circuits.edge_measure import EdgeMeasure, batch_size
from gossamer.circuits.edge_metrics import metric_label, metric_of
from gossamer.circuits.effect import LEVELS, Baseline, Bools, Curve, Floats, Ints, RandomCircuits
from gossamer.circuits.patching import provenance
from gossamer.circuits.ranking import random_masks, ranked
from gossamer.circuits.runs import Batch
from gossamer.circuits.search import SEARCH, Progress, searched
from gossamer.circuits.store import Stored
from gossamer.circuits.streams import Parts
from gossamer.errors import GossamerError, nearest
from gossamer.models import LoadedModel
from gossamer.tasks import Task

Among = Literal["all", "attention"]


@dataclass(frozen=True, eq=False)
class EdgeScores(Stored):
    """A score for every edge: what the metric is estimated to lose when the edge gets its corrupt value.

    `remainder` (method `inputs` only) is the metric's difference minus the scores of the edges out of the embedding:
    what gate flips on the way contributed, and the error of the quadrature.
    """

    FORMAT: ClassVar[str] = "gossamer edge scores"

    graph: ComponentGraph
    score_E: Floats
    method: str
    steps: int
    metric: str
    baseline: Baseline
    remainder: float | None
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def order_E(self) -> Ints:
        """Edges from the largest |score| to the smallest."""
        return ranked(self.score_E, by_magnitude=True)

    def score_of(self, name: str) -> float:
        """The score of an edge by name, such as `a0.h1->m2` or `m0->a3.h2<q>`."""
        names = [self.graph.edge_name(edge) for edge in range(self.graph.n_edges)]
        if name not in names:
            raise GossamerError(f"There is no edge {name!r} in this graph.{nearest(name, names)}")
        return float(self.score_E[names.index(name)])

    def top(self, n: int) -> list[tuple[str, float]]:
        """The best n edges by name, with their scores."""
        return [(self.graph.edge_name(int(edge)), float(self.score_E[edge])) for edge in self.order_E[:n]]


@dataclass(frozen=True, eq=False)
class EdgeCircuits(Stored):
    """The circuits of the top n edges for many n, measured by real edge patching.

    `among` says what n counts: `all` edges, or only those that touch a head (`attention`) while the rest (between
    embedding, MLPs and logits, where no gate acts) is always kept. `on_paths_S` and `attention_S` count, for each size,
    the kept edges on a path from the embedding to the logits, and those of them that touch a head.
    """

    FORMAT: ClassVar[str] = "gossamer edge circuits"

    graph: ComponentGraph
    among: Among
    order_E: Ints
    curve: Curve
    on_paths_S: Ints
    attention_S: Ints
    check: dict[str, float]
    provenance: dict[str, Any] = field(default_factory=dict)

    def edges(self, level: float) -> list[str]:
        """The edges, by name, of the smallest circuit for a level (empty where no circuit gets there)."""
        size = self.curve.smallest(level)
        return [self.graph.edge_name(int(edge)) for edge in self.order_E[: size or 0]]

    @property
    def gate_flips(self) -> tuple[int, int]:
        """How many gates rounding flipped in patched runs that should equal the clean or corrupt one, of how many."""
        flips = sum(count for name, count in self.check.items() if name.startswith("gates flipped"))
        return int(flips), int(self.check.get("gates compared", 0))

    def on_paths(self, level: float) -> int | None:
        """How many of these lie on a path from the embedding to the logits."""
        return self._count(self.on_paths_S, level)

    def attention_edges(self, level: float) -> int | None:
        """How many of these on paths touch a head."""
        return self._count(self.attention_S, level)

    def _count(self, counts_S: Ints, level: float) -> int | None:
        size = self.curve.smallest(level)
        return None if size is None else int(counts_S[int(np.flatnonzero(self.curve.sizes_S == size)[0])])


def edge_scores(
    model: LoadedModel,
    task: Task,
    *,
    method: Method = "inputs",
    steps: int = 5,
    metric: str = "task",
    batch: Batch = "auto",
    progress: Progress | None = None,
) -> EdgeScores:
    """Score every edge of a model on a task; see `edge_attribution` for the methods and what a score means."""
    _check_method(method, steps, metric)
    parts = Parts.of(model)
    attribution = Attribution(parts, metric_of(task, metric), method, steps)
    clean_N, corrupt_N = np.zeros(len(task)), np.zeros(len(task))
    done = 0
    for rows in task.batches(batch_size(parts, task, batch)):
        clean_B, corrupt_B = attribution.add(rows)
        clean_N[list(rows.rows)], corrupt_N[list(rows.rows)] = clean_B.cpu().numpy(), corrupt_B.cpu().numpy()
        done += len(rows)
        if progress is not None:
            progress(done, len(task))
    score_SR = attribution.score_SR.numpy() / len(task)
    baseline = Baseline(clean_N, corrupt_N)
    return EdgeScores(
        graph=parts.graph,
        score_E=score_SR[parts.graph.edges_E2[:, 0], parts.graph.edges_E2[:, 1]],
        method=method,
        steps=steps if method in ("inputs", "activations") else 1,
        metric=metric_label(task, metric),
        baseline=baseline,
        remainder=float(baseline.difference - score_SR[0].sum()) if method == "inputs" else None,
        provenance=provenance(model, task),
    )


def _check_method(method: str, steps: int, metric: str) -> None:
    if method not in METHODS:
        raise GossamerError(
            f"There is no attribution method {method!r}; choose one of {', '.join(METHODS)}.{nearest(method, METHODS)}"
        )
    if steps < 1:
        raise GossamerError(f"Integrated gradients need at least one step, not {steps}.")
    if method == "gradient" and metric == "divergence":
        raise GossamerError(
            "The divergence from the clean run has no gradient at the clean run; use the method 'inputs' with it."
        )


def edge_circuits(
    model: LoadedModel,
    task: Task,
    scores: EdgeScores,
    *,
    among: Among = "all",
    metric: str = "task",
    levels: Sequence[float] = LEVELS,
    batch: Batch = "auto",
    progress: Progress | None = None,
) -> EdgeCircuits:
    """The curve of the top n edges for many n, every circuit run for real; n for each level by grid and bisection."""
    parts = Parts.of(model)
    graph = parts.graph
    if scores.graph != graph:
        raise GossamerError(f"These scores are of another graph than {model.name}'s; score the edges of this model.")
    measure = EdgeMeasure(parts, task, metric_of(task, metric), batch_size(parts, task, batch))
    order_E, kept = _ranking(scores, among)
    total, baseline = len(order_E), measure.baseline
    sizes_S, metric_SN = searched(
        lambda sizes: measure.circuits([kept(size) for size in sizes]), total, baseline, levels, progress
    )
    unit = "edges" if among == "all" else "edges at heads"
    curve = Curve(unit, total, sizes_S, metric_SN, baseline, _rule(scores, among))
    on_paths_S, attention_S = _counts(graph, [kept(int(size)) for size in sizes_S], among)
    found = provenance(model, task)
    return EdgeCircuits(graph, among, order_E, curve, on_paths_S, attention_S, measure.check(), found)


def _ranking(scores: EdgeScores, among: Among) -> tuple[Ints, Callable[[int], Bools]]:
    """The edges that are counted, best first, and from a size to the circuit [S, R] that keeps so many of them."""
    graph, order_E = scores.graph, scores.order_E
    touching_E = graph.touches_attention_E
    if among == "attention":
        order_E = order_E[touching_E[order_E]]
    always_SR = graph.mask(np.flatnonzero(~touching_E) if among == "attention" else [])
    return order_E, lambda size: always_SR | graph.mask(order_E[:size])


def _rule(scores: EdgeScores, among: Among) -> dict[str, str]:
    steps = f", {scores.steps} steps" if scores.method in ("inputs", "activations") else ""
    return {
        "ranking": f"|score| of edge attribution patching ({scores.method}{steps}; metric {scores.metric})",
        "left out": "an edge outside the circuit carries what its source wrote in the corrupt run",
        "counted": "all edges" if among == "all" else "edges that touch a head; all others are kept",
        "MLPs": "nodes of the graph like heads",
        "search": SEARCH,
    }


def _counts(graph: ComponentGraph, kept_CSR: Sequence[Bools], among: Among) -> tuple[Ints, Ints]:
    attention_SR = graph.mask(np.flatnonzero(graph.touches_attention_E))
    on_paths = [graph.on_paths(kept_SR) for kept_SR in kept_CSR]
    attention = np.array([int((kept_SR & attention_SR).sum()) for kept_SR in on_paths])
    counted = attention if among == "attention" else np.array([int(kept_SR.sum()) for kept_SR in on_paths])
    return counted, attention


def random_edge_circuits(
    model: LoadedModel,
    task: Task,
    size: int,
    *,
    draws: int = 5,
    seed: int = 0,
    metric: str = "task",
    batch: Batch = "auto",
) -> RandomCircuits:
    """Circuits of `size` edges drawn at random from all, measured in the same way: what a ranking is worth."""
    parts = Parts.of(model)
    graph, generator = parts.graph, np.random.default_rng([seed, size])
    measure = EdgeMeasure(parts, task, metric_of(task, metric), batch_size(parts, task, batch))
    masks = [graph.mask(np.flatnonzero(kept_E)) for kept_E in random_masks(graph.n_edges, size, draws, generator)]
    return RandomCircuits(size, measure.circuits(masks), measure.baseline)
