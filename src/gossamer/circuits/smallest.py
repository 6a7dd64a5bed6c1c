"""The smallest circuit by heads: keep the top k of a ranking, replace all the rest at once, for every k.

The run starts from the clean prompt; every component outside the circuit gets its activation from the corrupt run (or
zeros, or its mean). Two curves are made: in the first only heads are components and MLPs are free, that is computed
from whatever they are given; in the second MLPs are components too, ranked among the heads and replaced like them.
Both begin at k = 0, where every component is replaced and only embeddings (and free MLPs) see the clean prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, ClassVar

import numpy as np

from gossamer.circuits.effect import LEVELS, Curve, RandomCircuits
from gossamer.circuits.head_curves import keep_curve, pruning, random_circuits
from gossamer.circuits.patching import Component, Effects, effects, provenance
from gossamer.circuits.ranking import jaccard
from gossamer.circuits.runs import Batch, PairedRuns
from gossamer.circuits.scenarios import Ablation, check_ablation
from gossamer.circuits.search import Progress
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.tasks import Task

RANDOM_DRAWS = 20
SPLITS = 20  # of the prompts into halves
FEWEST_PROMPTS = 3  # of a template; fewer say nothing about a ranking


@dataclass(frozen=True)
class Stability:
    """Overlap (shared over all) of the top `size` heads ranked on different parts of the prompts.

    `n_templates` counts the templates with enough prompts; fewer than two have no overlap.
    """

    size: int
    halves: float | None
    templates: float | None
    n_templates: int

    def describe(self) -> str:
        """Both overlaps in words."""
        parts = {"halves of the prompts": self.halves, "templates": self.templates}
        known = [f"{share:.2f} between {name}" for name, share in parts.items() if share is not None]
        return f"overlap of the top {self.size} heads: {', '.join(known) or 'not known'}"


@dataclass(frozen=True, eq=False)
class HeadCircuits(Stored):
    """The ranking of a model's heads on a task, its curves, and what the circuit at `level` is worth."""

    FORMAT: ClassVar[str] = "gossamer head circuits"

    effects: Effects
    order: tuple[Component, ...]
    curve: Curve
    order_with_mlps: tuple[Component, ...]
    curve_with_mlps: Curve | None
    level: float
    random: RandomCircuits | None
    pruned: tuple[Component, ...]
    pruned_explained: float
    stability: Stability | None
    provenance: dict[str, Any] = field(default_factory=dict)

    def circuit(self, level: float | None = None) -> tuple[Component, ...]:
        """The smallest circuit at a level, most important first; empty if the level is not reached."""
        size = self.curve.smallest(self.level if level is None else level)
        return self.order[: size or 0]

    @property
    def curves(self) -> tuple[Curve, ...]:
        """Heads with free MLPs, and, where it was run, heads and MLPs."""
        return (self.curve,) if self.curve_with_mlps is None else (self.curve, self.curve_with_mlps)

    @property
    def levels(self) -> list[float]:
        """The usual levels and the one that circuits were looked for at."""
        return sorted({*LEVELS, self.level})

    def summary(self) -> str:
        """What is known beside the curves, in one line: pruning, chance, stability and areas."""
        said = []
        if np.isfinite(self.pruned_explained):
            said.append(
                f"heads for {self.level:.0%}: {len(self.circuit())}, of which pruning leaves {len(self.pruned)}"
            )
        if self.random is not None:
            said.append(self.random.describe("heads"))
        if self.stability is not None:
            said.append(self.stability.describe())
        said += [f"areas of {curve.unit}: {curve.describe_areas()}" for curve in self.curves]
        return "; ".join(said)

    def to_dict(self, levels: Sequence[float] | None = None) -> dict[str, Any]:
        """The circuits at each level, how stable they are and what random ones explain, as plain data."""
        stable, random = self.stability, self.random
        levels = self.levels if levels is None else levels
        return {
            "prompts": len(self.curve.baseline.clean_N),
            "level": self.level,
            "sizes": {curve.unit: {f"{level:g}": curve.smallest(level) for level in levels} for curve in self.curves},
            "areas": {curve.unit: curve.areas() for curve in self.curves},
            "metric clean": self.curve.baseline.clean,
            "metric corrupt": self.curve.baseline.corrupt,
            "near zero denominator": self.curve.baseline.is_weak,
            "heads": {f"{level:g}": [list(head) for head in self.circuit(level)] for level in levels},
            "heads left by pruning, at the level": [list(head) for head in self.pruned],
            "random heads, as many as at the level": None if random is None else random.to_dict(),
            "overlap of heads, halves of the prompts": None if stable is None else stable.halves,
            "overlap of heads, templates": None if stable is None else stable.templates,
            "gates flipped by restarts": list(self.effects.gate_flips),
            "rules": {curve.unit: curve.rule for curve in self.curves},
        }


def smallest_circuit(
    model: LoadedModel,
    task: Task,
    *,
    level: float = 0.9,
    ablation: Ablation = "corrupt",
    by_magnitude: bool = False,
    with_mlps: bool = True,
    prune: bool = True,
    random_draws: int = RANDOM_DRAWS,
    seed: int = 0,
    batch: Batch = "auto",
    progress: Progress | None = None,
) -> HeadCircuits:
    """Rank heads by their denoising effect, draw both curves, and look at the circuit that reaches `level`."""
    check_ablation(ablation)
    if not 0 < level <= 1:
        raise GossamerError(f"A level is a share between 0 and 1, not {level}; try 0.9.")
    runs = PairedRuns(model, task, whole=ablation != "corrupt", batch=batch, progress=progress)
    found = effects(model, task, runs=runs)
    order = tuple(found.ranking(by_magnitude=by_magnitude))
    order_both = tuple(found.ranking(mlps=True, by_magnitude=by_magnitude)) if with_mlps else ()
    rule = ranking_rule(by_magnitude=by_magnitude)
    curve = keep_curve(runs, order, ablation=ablation, mlps="free", rule=rule)
    both = keep_curve(runs, order_both, ablation=ablation, mlps="replaced", rule=rule) if with_mlps else None
    size = curve.smallest(level) or 0
    draws = random_draws if size else 0
    left = pruning(runs, order[:size], level=level, ablation=ablation) if prune and size else ((), float("nan"))
    return HeadCircuits(
        effects=found,
        order=order,
        curve=curve,
        order_with_mlps=order_both,
        curve_with_mlps=both,
        level=level,
        random=random_circuits(runs, size, draws, ablation=ablation, seed=seed) if draws else None,
        pruned=left[0],
        pruned_explained=left[1],
        stability=stability(found, task, size, by_magnitude=by_magnitude, seed=seed) if size else None,
        provenance=provenance(model, task) | {"seed": seed, "random_draws": random_draws},
    )


def ranking_rule(*, by_magnitude: bool) -> str:
    """The ranking in words."""
    size = "size of the denoising effect" if by_magnitude else "denoising effect"
    return f"{size}, largest first, no effect at all last, ties by (layer, head)"


def stability(found: Effects, task: Task, size: int, *, by_magnitude: bool = False, seed: int = 0) -> Stability:
    """How much of the top `size` heads remains when only a part of the prompts ranks them."""

    def top(prompts: np.ndarray) -> list[Component]:
        return found.ranking(by_magnitude=by_magnitude, prompts=prompts)[:size]

    generator = np.random.default_rng(seed)
    halves = []
    for _ in range(SPLITS if len(task) > 1 else 0):
        shuffled = generator.permutation(len(task))
        halves.append(jaccard(top(shuffled[::2]), top(shuffled[1::2])))
    templates = np.array([pair.template for pair in task.pairs])
    rows_of = [np.flatnonzero(templates == name) for name in np.unique(templates)]
    tops = [top(rows) for rows in rows_of if len(rows) >= FEWEST_PROMPTS]
    across = [jaccard(one, other) for one, other in combinations(tops, 2)]
    return Stability(size, _mean(halves), _mean(across), n_templates=len(tops))


def _mean(overlaps: Sequence[float | None]) -> float | None:
    known = [share for share in overlaps if share is not None]
    return float(np.mean(known)) if known else None


def overlap(dense: HeadCircuits, sparse: HeadCircuits, level: float = 0.9) -> float | None:
    """How many heads the circuits of two models share, over all heads in either; None if both are empty."""
    return jaccard(dense.circuit(level), sparse.circuit(level))


def table(circuits: HeadCircuits, levels: Sequence[float] | None = None) -> list[dict[str, Any]]:
    """One row a level: the smallest size with its interval, heads free of MLPs first."""
    rows = []
    for level in circuits.levels if levels is None else levels:
        rows.append({"level": level} | {curve.unit: curve.smallest_estimate(level) for curve in circuits.curves})
    return rows
