"""What a comparison of two models' circuits holds: the curves of both on every task, and the table made from them.

Ratios are dense over sparse: above 1 the sparse model needs fewer. "Over all" is the median over the tasks that have a
ratio; the others are named. A row is weak where the difference of the clean and the corrupt metric, the denominator of
its ratios, is near zero. A size is missing where the level is never reached; of single attention edges, which are shut
and not replaced, also where none kept reaches it (see `effect.ShutCurve`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gossamer.circuits.edges import EdgeCircuits, EdgeScores
from gossamer.circuits.effect import (
    LEVELS,
    Curve,
    Estimate,
    Floats,
    RandomCircuits,
    ShutCurve,
    estimate,
    finite,
    size_ratio,
)
from gossamer.circuits.smallest import HeadCircuits, overlap
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError, nearest

OVERALL = "over all"
DEFINITIONS = (
    "explained effect: (m(circuit) - m(corrupt)) / (m(clean) - m(corrupt)), means over prompts first",
    "smallest circuit: the size from which the curve stays at or above the level",
)
LISTED_EDGES = 1_000


@dataclass(frozen=True, eq=False)
class ModelCircuits:
    """One model on one task."""

    name: str
    accuracy: float
    heads: HeadCircuits
    edge_scores: EdgeScores
    edges: EdgeCircuits
    edges_at_heads: EdgeCircuits
    attention_edges: ShutCurve
    random_edges: RandomCircuits | None

    @property
    def curves(self) -> dict[str, Curve]:
        """Every curve under the name of what it counts."""
        curves = {"heads": self.heads.curve}
        if self.heads.curve_with_mlps is not None:
            curves["heads and MLPs"] = self.heads.curve_with_mlps
        curves |= {"edges": self.edges.curve, "edges at heads": self.edges_at_heads.curve}
        return curves | {self.attention_edges.unit: self.attention_edges}

    def summary(self) -> str:
        """What is known beside the curves, in one line."""
        random = "" if self.random_edges is None else f"; {self.random_edges.describe('edges')}"
        areas = f"areas of edges: {self.edges.curve.describe_areas()}"
        return f"{self.heads.summary()}{random}; {areas}"


@dataclass(frozen=True, eq=False)
class TaskComparison:
    """Both models on one task."""

    task: str
    description: str
    metric: str
    chance: float
    prompts: int
    dense: ModelCircuits
    sparse: ModelCircuits

    @property
    def is_weak(self) -> bool:
        """Whether a model's metric differs too little between clean and corrupt prompts to divide by."""
        return any(model.heads.curve.baseline.is_weak for model in (self.dense, self.sparse))

    def overlap(self, level: float) -> float | None:
        """How many heads the circuits of both models share, over all heads in either."""
        return overlap(self.dense.heads, self.sparse.heads, level)

    @property
    def rules(self) -> dict[str, dict[str, str]]:
        """The definitions in use, by what is counted."""
        return {unit: curve.rule for unit, curve in self.dense.curves.items()}

    def beside(self) -> str:
        """What stands beside every ratio: prompts, accuracies, both metrics of both models, flipped gates."""
        ends = "; ".join(
            f"{role} {_described(model)}" for role, model in (("dense", self.dense), ("sparse", self.sparse))
        )
        return f"{self.task} ({self.prompts} prompts, {self.metric}): {ends}"

    def summaries(self) -> list[str]:
        """What is known of each model beside its curves, and of both."""
        roles = {"dense": self.dense, "sparse": self.sparse}
        lines = [f"{self.task}, {role}: {model.summary()}" for role, model in roles.items()]
        level = self.dense.heads.level
        shared = self.overlap(level)
        if shared is not None:
            lines.append(f"{self.task}: overlap of both models' heads for {level:.0%}: {shared:.2f}")
        return lines

    def notes(self) -> list[str]:
        """What is printed with every figure of this task."""
        return [self.beside(), *DEFINITIONS, *rules_in_words(self.rules)]


def _described(model: ModelCircuits) -> str:
    single = model.attention_edges
    text = f"{model.name}: accuracy {100 * model.accuracy:.1f} %, {model.heads.curve.baseline.describe()}"
    text += f", explained with no attention edge: {single.explained_S[0]:.2f}"
    restarted, gates = model.heads.effects.gate_flips
    if not gates:
        return text
    patched, compared = model.edges.gate_flips
    return (
        f"{text}, gates flipped by rounding: {restarted} of {gates:,} in restarted runs, {patched} of {compared:,} in"
        " edge patching"
    )


def rules_in_words(rules: Mapping[str, Mapping[str, str]]) -> list[str]:
    """A line for each thing that is counted; what it has in common with the one before is not said again."""
    lines = []
    before: tuple[str, Mapping[str, str]] = ("", {})
    for unit, rule in rules.items():
        new = {name: text for name, text in rule.items() if before[1].get(name) != text}
        alike = set(rule) == set(before[1]) and len(new) < len(rule)
        start, said = (f"{unit} as {before[0]}, but ", new) if alike else (f"{unit}, ", rule)
        lines.append(start + "; ".join(f"{name}: {text}" for name, text in said.items()))
        before = (unit, rule)
    return lines


@dataclass(frozen=True)
class Row:
    """One line of the table: how many of `unit` reach `level`; None where a model does not get there.

    `with_none` names the models ("dense", "sparse") that get there with nothing kept where that is no size, `missing`
    the tasks without a ratio, which "over all" leaves out.
    """

    task: str
    unit: str
    level: float
    dense: Estimate | None
    sparse: Estimate | None
    ratio: Estimate | None
    is_weak: bool
    with_none: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Comparison(Stored):
    """Both models on all tasks."""

    FORMAT: ClassVar[str] = "gossamer circuit comparison"

    tasks: tuple[TaskComparison, ...]
    skipped: tuple[str, ...]
    provenance: dict[str, Any] = field(default_factory=dict)

    def on(self, task: str) -> TaskComparison:
        """The comparison on one task."""
        for found in self.tasks:
            if found.task == task:
                return found
        names = [found.task for found in self.tasks]
        raise GossamerError(f"This comparison has no task {task!r}; it has {', '.join(names)}.{nearest(task, names)}")

    def heads(self, task: str, level: float = 0.9) -> dict[str, list[tuple[int, int]]]:
        """The selected heads (layer, head) of both models, most important first; for the head grid."""
        found = self.on(task)
        return {"dense": list(found.dense.heads.circuit(level)), "sparse": list(found.sparse.heads.circuit(level))}

    def edges(self, task: str, level: float = 0.9) -> dict[str, list[str]]:
        """The selected edges of both models by name, most important first."""
        found = self.on(task)
        return {"dense": found.dense.edges.edges(level), "sparse": found.sparse.edges.edges(level)}

    @property
    def levels(self) -> list[float]:
        """The usual levels and the one that circuits were looked for at."""
        return sorted({*LEVELS, *(found.dense.heads.level for found in self.tasks)})

    def table(self, levels: Sequence[float] | None = None) -> list[Row]:
        """Heads and edges for each level, per task and (with more than one task) over all."""
        return list(self._rows(self.levels if levels is None else levels))

    def _rows(self, levels: Sequence[float]) -> Iterator[Row]:
        for level in levels:
            for unit in self.tasks[0].dense.curves if self.tasks else ():
                yield from (_row(found, unit, level) for found in self.tasks)
                if len(self.tasks) > 1:
                    yield self._over_all(unit, level)

    def _over_all(self, unit: str, level: float) -> Row:
        rows = [_row(found, unit, level) for found in self.tasks]
        known = [(found, row) for found, row in zip(self.tasks, rows, strict=True) if row.ratio is not None]
        missing = tuple(row.task for row in rows if row.ratio is None)
        is_weak = any(found.is_weak for found, _ in known)
        if not known:
            return Row(OVERALL, unit, level, None, None, None, is_weak, missing=missing)
        dense_TR = [found.dense.curves[unit].smallest_samples(level) for found, _ in known]
        sparse_TR = [found.sparse.curves[unit].smallest_samples(level) for found, _ in known]
        ratio_TR = [dense_R / _positive(sparse_R) for dense_R, sparse_R in zip(dense_TR, sparse_TR, strict=True)]
        return Row(
            OVERALL,
            unit,
            level,
            _median([row.dense for _, row in known], dense_TR),
            _median([row.sparse for _, row in known], sparse_TR),
            _median([row.ratio for _, row in known], ratio_TR),
            is_weak,
            missing=missing,
        )

    def notes(self) -> list[str]:
        """What is printed with the table; rules are said once for all tasks that share them."""
        by_rules: dict[str, list[str]] = {}
        for found in self.tasks:
            by_rules.setdefault("\n".join(rules_in_words(found.rules)), []).append(found.task)
        lines = [line for found in self.tasks for line in (found.beside(), *found.summaries())]
        lines += DEFINITIONS
        for rules, names in by_rules.items():
            lines += [f"rules of {', '.join(names)}:"] if len(by_rules) > 1 else []
            lines += rules.split("\n")
        return [*lines, *(f"left out: {why}" for why in self.skipped)]

    def to_dict(self, levels: Sequence[float] | None = None) -> dict[str, Any]:
        """The table, the rules, the selected heads and edges and what stands beside every ratio, as plain data."""
        levels = self.levels if levels is None else levels
        return {
            "table": [_plain_row(row) for row in self.table(levels)],
            "tasks": [_plain_task(found, levels) for found in self.tasks],
            "skipped": list(self.skipped),
            "provenance": self.provenance,
        }


def _row(found: TaskComparison, unit: str, level: float) -> Row:
    curves = {"dense": found.dense.curves[unit], "sparse": found.sparse.curves[unit]}
    return Row(
        found.task,
        unit,
        level,
        curves["dense"].smallest_estimate(level),
        curves["sparse"].smallest_estimate(level),
        size_ratio(curves["dense"], curves["sparse"], level),
        found.is_weak,
        with_none=tuple(role for role, curve in curves.items() if curve.reached_with_none(level)),
    )


def _positive(samples_R: Floats) -> Floats:
    return np.where(samples_R > 0, samples_R, np.nan)


def _median(sizes_T: Sequence[Estimate | None], samples_TR: Sequence[Floats]) -> Estimate:
    """The median over tasks with its interval over prompts."""
    values_T = [size.value for size in sizes_T if size is not None]
    assert len(values_T) == len(samples_TR), "every task has a size"
    return estimate(float(np.median(values_T)), np.median(np.stack(samples_TR), axis=0))


def _plain_row(row: Row) -> dict[str, Any]:
    ends = {name: _plain_estimate(getattr(row, name)) for name in ("dense", "sparse", "ratio")}
    about = {"task": row.task, "unit": row.unit, "level": row.level, "near zero denominator": row.is_weak}
    return about | {"reached with none": list(row.with_none), "tasks left out": list(row.missing)} | ends


def _plain_estimate(found: Estimate | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    return {"value": finite(found.value), "low": finite(found.low), "high": finite(found.high)}


def _plain_task(found: TaskComparison, levels: Sequence[float]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "task": found.task,
        "metric": found.metric,
        "chance": found.chance,
        "prompts": found.prompts,
        "rules": found.rules,
    }
    about["overlap of heads, dense and sparse"] = {f"{level:g}": found.overlap(level) for level in levels}
    return about | {"dense": _plain_model(found.dense, levels), "sparse": _plain_model(found.sparse, levels)}


def _plain_model(model: ModelCircuits, levels: Sequence[float]) -> dict[str, Any]:
    random = model.random_edges
    about = {"model": model.name, "accuracy": model.accuracy, **model.heads.to_dict(levels)}
    about["explained with no attention edge"] = finite(float(model.attention_edges.explained_S[0]))
    return about | {
        "areas": {unit: curve.areas() for unit, curve in model.curves.items() if not isinstance(curve, ShutCurve)},
        "edges": {f"{level:g}": model.edges.edges(level)[:LISTED_EDGES] for level in levels},
        "edges on paths": {f"{level:g}": model.edges.on_paths(level) for level in levels},
        "of these touching attention": {f"{level:g}": model.edges.attention_edges(level) for level in levels},
        "random edges, as many": None if random is None else random.to_dict(),
        "score remainder": model.edge_scores.remainder,
        "checks of edge patching": model.edges.check,
    }
