"""What a comparison of two models' circuits holds: the curves of both on every task, and the table made from them.

Ratios are dense over sparse: above 1 the sparse model needs fewer. "Over all" is the median of the tasks' ratios. A row
is weak where the difference of the clean and the corrupt metric, the denominator of its ratios, is near zero. A size
is missing where the level is never reached, and where it is reached with nothing kept: single attention edges are
shut, not replaced, so that "nothing" is no corrupt run and may lie anywhere between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gossamer.circuits.edges import EdgeCircuits, EdgeScores
from gossamer.circuits.effect import LEVELS, Curve, Estimate, Floats, RandomCircuits, estimate, finite, size_ratio
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
    attention_edges: Curve
    random_edges: RandomCircuits | None

    @property
    def curves(self) -> dict[str, Curve]:
        """Every curve under the name of what it counts."""
        curves = {"heads": self.heads.curve}
        if self.heads.curve_with_mlps is not None:
            curves["heads and MLPs"] = self.heads.curve_with_mlps
        curves |= {"edges": self.edges.curve, "edges at heads": self.edges_at_heads.curve}
        return curves | {self.attention_edges.unit: self.attention_edges}


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

    def overlap(self, level: float) -> float:
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
    patched = int(model.edges.check["gates flipped with all edges"])
    return f"{text}, gates flipped by rounding: {restarted} of {gates:,} in restarted runs, {patched} in edge patching"


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
    """One line of the table: how many of `unit` reach `level`; None where a model does not get there, or needs none."""

    task: str
    unit: str
    level: float
    dense: Estimate | None
    sparse: Estimate | None
    ratio: Estimate | None
    is_weak: bool


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
                for found in self.tasks:
                    dense, sparse = found.dense.curves[unit], found.sparse.curves[unit]
                    ends = [_size(curve, level) for curve in (dense, sparse)]
                    ratio = None if None in ends else size_ratio(dense, sparse, level)
                    yield Row(found.task, unit, level, ends[0], ends[1], ratio, found.is_weak)
                if len(self.tasks) > 1:
                    yield self._over_all(unit, level)

    def _over_all(self, unit: str, level: float) -> Row:
        pairs = [(found.dense.curves[unit], found.sparse.curves[unit]) for found in self.tasks]
        if any(_size(curve, level) is None for pair in pairs for curve in pair):
            return Row(OVERALL, unit, level, None, None, None, any(found.is_weak for found in self.tasks))
        dense = _median([curve.smallest(level) for curve, _ in pairs], [c.smallest_samples(level) for c, _ in pairs])
        sparse = _median([curve.smallest(level) for _, curve in pairs], [c.smallest_samples(level) for _, c in pairs])
        ratios = [size_ratio(*pair, level) for pair in pairs]
        samples = [
            larger.smallest_samples(level) / _positive(smaller.smallest_samples(level)) for larger, smaller in pairs
        ]
        ratio = _median([None if ratio is None else ratio.value for ratio in ratios], samples)
        return Row(OVERALL, unit, level, dense, sparse, ratio, any(found.is_weak for found in self.tasks))

    def notes(self) -> list[str]:
        """What is printed with the table; rules are said once for all tasks that share them."""
        by_rules: dict[str, list[str]] = {}
        for found in self.tasks:
            by_rules.setdefault("\n".join(rules_in_words(found.rules)), []).append(found.task)
        lines = [*(found.beside() for found in self.tasks), *DEFINITIONS]
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


def _size(curve: Curve, level: float) -> Estimate | None:
    """The size that reaches a level; None where it is not reached, or, on some prompts at least, with nothing kept."""
    reached_with_none = curve.sizes_S[0] == 0 and curve.interval_S()[1][0] >= level
    return None if reached_with_none else curve.smallest_estimate(level)


def _positive(samples_R: Floats) -> Floats:
    return np.where(samples_R > 0, samples_R, np.nan)


def _median(values: Sequence[float | None], samples: Sequence[Floats]) -> Estimate | None:
    """The median over tasks with its interval over prompts; None if a task has no value."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    return estimate(float(np.median(known)), np.median(np.stack(samples), axis=0))


def _plain_row(row: Row) -> dict[str, Any]:
    ends = {name: _plain_estimate(getattr(row, name)) for name in ("dense", "sparse", "ratio")}
    return {"task": row.task, "unit": row.unit, "level": row.level, "near zero denominator": row.is_weak} | ends


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
        "areas": {unit: curve.areas() for unit, curve in model.curves.items()},
        "edges": {f"{level:g}": model.edges.edges(level)[:LISTED_EDGES] for level in levels},
        "edges on paths": {f"{level:g}": model.edges.on_paths(level) for level in levels},
        "of these touching attention": {f"{level:g}": model.edges.attention_edges(level) for level in levels},
        "random edges, as many": None if random is None else random.to_dict(),
        "score remainder": model.edge_scores.remainder,
        "checks of edge patching": model.edges.check,
    }
