"""Circuits of heads (and MLPs): what is kept, what stands in for all the rest at once, and the metric that is left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from gossamer.circuits.effect import Bools, Curve, Floats, RandomCircuits
from gossamer.circuits.patching import Component
from gossamer.circuits.ranking import random_masks, top_masks
from gossamer.circuits.runs import PairedRuns
from gossamer.circuits.scenarios import Ablation, Scenarios, measure

Mlps = Literal["free", "replaced"]


def keep_curve(
    runs: PairedRuns,
    order: Sequence[Component],
    *,
    ablation: Ablation = "corrupt",
    mlps: Mlps = "free",
    sizes: Sequence[int] | None = None,
    rule: str = "as given",
) -> Curve:
    """The metric with the first k components of `order` kept and all the others replaced at once, for every k.

    `order` names every head once and, where MLPs are to be replaced, every MLP as the head behind the last.
    """
    sizes = range(len(order) + 1) if sizes is None else sizes
    expected = runs.parts.n_layers * (runs.parts.n_heads + (mlps == "replaced"))
    assert len(order) == len(set(order)) == expected, "a ranking names every component once"
    kept_SC = np.zeros((len(sizes), runs.parts.n_layers * (runs.parts.n_heads + 1)), dtype=bool)
    kept_SC[:, _flat(runs, order)] = top_masks(np.arange(len(order)), sizes)
    metric_SN = masked_metric(runs, kept_SC, ablation=ablation, mlps=mlps)
    return Curve(
        unit="heads" if mlps == "free" else "heads and MLPs",
        total=len(order),
        sizes_S=np.asarray(sizes, dtype=np.int64),
        metric_SN=metric_SN,
        baseline=runs.baseline,
        rule={"ranking": rule, "left out": f"replaced by {_in_words(ablation)}", "MLPs": _mlps_in_words(mlps)},
    )


def _in_words(ablation: Ablation) -> str:
    return {
        "corrupt": "their activations on the corrupt prompt",
        "zero": "zeros",
        "mean": "their mean over all corrupt prompts and positions",
    }[ablation]


def _mlps_in_words(mlps: Mlps) -> str:
    return (
        "free: computed from what they are given" if mlps == "free" else "components: ranked and replaced as heads are"
    )


def _flat(runs: PairedRuns, components: Sequence[Component]) -> list[int]:
    return [layer * (runs.parts.n_heads + 1) + head for layer, head in components]


def _replacing_the_rest(runs: PairedRuns, kept_SC: Bools, ablation: Ablation, mlps: Mlps) -> Scenarios:
    replaced_SLC = ~kept_SC.reshape(len(kept_SC), runs.parts.n_layers, -1)
    mlps_SL = replaced_SLC[..., -1] & (mlps == "replaced")
    return Scenarios(np.ascontiguousarray(replaced_SLC[..., :-1]), np.ascontiguousarray(mlps_SL), ablation)


def masked_metric(runs: PairedRuns, kept_SC: Bools, *, ablation: Ablation = "corrupt", mlps: Mlps = "free") -> Floats:
    """The metric [S, N] of circuits given as masks over layers times (heads and the MLP)."""
    return measure(runs, _replacing_the_rest(runs, kept_SC, ablation, mlps), base="clean")


def circuit_metric(
    runs: PairedRuns, circuits: Sequence[Sequence[Component]], *, ablation: Ablation = "corrupt", mlps: Mlps = "free"
) -> Floats:
    """The metric [S, N] of circuits given as lists of components."""
    kept_SC = np.zeros((len(circuits), runs.parts.n_layers * (runs.parts.n_heads + 1)), dtype=bool)
    for mask_C, components in zip(kept_SC, circuits, strict=True):
        mask_C[_flat(runs, components)] = True
    return masked_metric(runs, kept_SC, ablation=ablation, mlps=mlps)


def random_circuits(
    runs: PairedRuns, size: int, draws: int, *, ablation: Ablation = "corrupt", seed: int = 0
) -> RandomCircuits:
    """Random sets of `size` heads kept, MLPs free: what the ranking is worth beside chance."""
    n_layers, n_heads = runs.parts.n_layers, runs.parts.n_heads
    generator = np.random.default_rng([seed, n_layers * n_heads, size])
    kept_DLH = random_masks(n_layers * n_heads, size, draws, generator).reshape(draws, n_layers, n_heads)
    kept_DLC = np.concatenate([kept_DLH, np.zeros((draws, n_layers, 1), dtype=bool)], axis=2)
    metric_DN = masked_metric(runs, kept_DLC.reshape(draws, -1), ablation=ablation)
    return RandomCircuits(size, metric_DN, runs.baseline)


def pruning(
    runs: PairedRuns, circuit: Sequence[Component], *, level: float, ablation: Ablation = "corrupt"
) -> tuple[tuple[Component, ...], float]:
    """Drop, from the least important head on, each one without which the circuit still reaches the level.

    One pass, so the result needs every one of its heads given those that were kept when it was tried.
    """
    kept = list(circuit)
    explained = float(runs.baseline.explained(circuit_metric(runs, [kept], ablation=ablation))[0])
    for component in reversed(circuit):
        rest = [other for other in kept if other != component]
        without = float(runs.baseline.explained(circuit_metric(runs, [rest], ablation=ablation))[0])
        if without >= level:
            kept, explained = rest, without
    return tuple(kept), explained
