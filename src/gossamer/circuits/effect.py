"""What a circuit explains, defined once for heads, edges and attention edges.

    pair       a clean and a corrupt prompt; m is the task's metric, one number a prompt
    baseline   m of the untouched model on the clean and on the corrupt prompts
    explained  (mean m(circuit) - mean m(corrupt)) / (mean m(clean) - mean m(corrupt)): a ratio of means over pairs
    curve      explained against the size of the circuit, from nothing kept to everything kept
    smallest   for a level such as 0.9: the smallest size from which the curve STAYS at or above it
    areas      over the share of components kept, from 0 to 1, as the MIB benchmark defines them: of the curve whose
               floor is the metric of the EMPTY circuit; CPR = area under it, CMD = area between it and 1

Intervals are 95 % bootstraps over prompts. The resamples depend on the number of prompts only, so two models measured
on the same prompts are resampled alike and their ratios are paired.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gossamer.circuits.store import Stored

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEVELS = (0.5, 0.8, 0.9, 0.95)
RESAMPLES = 1_000
CONFIDENCE = 0.95
WEAK_STANDARD_ERRORS = 2.0


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def resampling_counts(n_prompts: int) -> Floats:
    """How often each prompt is drawn in each resample [R, N]; a function of the number of prompts only."""
    picks_RN = np.random.default_rng(0).integers(0, n_prompts, (RESAMPLES, n_prompts))
    return np.stack([np.bincount(picks, minlength=n_prompts) for picks in picks_RN]).astype(np.float64)


def estimate(value: float, samples_R: Floats) -> Estimate:
    """The value with the interval of its resamples (those without a meaning left out)."""
    samples_R = samples_R[np.isfinite(samples_R)]
    if len(samples_R) == 0:
        return Estimate(float(value), float("nan"), float("nan"))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(samples_R, [tail, 1 - tail])
    return Estimate(float(value), float(low), float(high))


@dataclass(frozen=True, eq=False)
class Baseline:
    """The metric of the untouched model on every clean and every corrupt prompt, in the task's order."""

    clean_N: Floats
    corrupt_N: Floats

    @property
    def clean(self) -> float:
        """Mean metric on the clean prompts."""
        return float(self.clean_N.mean())

    @property
    def corrupt(self) -> float:
        """Mean metric on the corrupt prompts: the floor of every curve."""
        return float(self.corrupt_N.mean())

    @property
    def difference(self) -> float:
        """What there is to explain: the denominator of every ratio."""
        return float((self.clean_N - self.corrupt_N).mean())

    @property
    def is_weak(self) -> bool:
        """Whether the denominator is near zero (two standard errors, or tiny beside the metrics) or of one prompt."""
        difference_N = self.clean_N - self.corrupt_N
        if len(difference_N) < 2:
            return True  # one prompt says nothing of the next
        error = difference_N.std(ddof=1) / np.sqrt(len(difference_N))
        size = max(np.abs(self.clean_N).mean(), np.abs(self.corrupt_N).mean())
        return bool(abs(self.difference) <= max(WEAK_STANDARD_ERRORS * error, 1e-6 * size))

    def explained(self, metric_N: Floats) -> Floats:
        """The explained effect of metrics [..., N], averaged over prompts first: [...]. NaN over a zero denominator."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (np.asarray(metric_N).mean(-1) - self.corrupt) / np.float64(self.difference)
        return np.where(np.isfinite(ratio), ratio, np.nan)

    def explained_samples(self, metric_SN: Floats) -> Floats:
        """The explained effect [S, R] of metrics [S, N] in every resample of the prompts."""
        counts_RN = self._counts_RN
        corrupt_R = counts_RN @ self.corrupt_N
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (np.asarray(metric_SN) @ counts_RN.T - corrupt_R) / (counts_RN @ self.clean_N - corrupt_R)
        return np.where(np.isfinite(ratio), ratio, np.nan)

    @cached_property
    def _counts_RN(self) -> Floats:
        return resampling_counts(len(self.clean_N))

    def describe(self) -> str:
        """Both metrics, and a warning where their difference is too small to divide by."""
        text = f"metric {self.clean:.3f} clean, {self.corrupt:.3f} corrupt"
        if not self.is_weak:
            return text
        if len(self.clean_N) == 1:
            return f"{text}: one prompt only, intervals mean nothing"
        return f"{text}: the difference is near zero, ratios mean little"


def smallest_from(explained_S: Floats, sizes_S: Ints, level: float) -> int | None:
    """The smallest of the sizes from which the explained effect stays at or above the level."""
    below = np.flatnonzero(~(explained_S >= level))
    first = 0 if len(below) == 0 else int(below[-1]) + 1
    return int(sizes_S[first]) if first < len(sizes_S) else None


@dataclass(frozen=True, eq=False)
class Curve(Stored):
    """The metric of circuits of growing size: nothing kept first, everything kept last.

    `rule` says in words how components were ranked, what stands in for those left out and what MLPs did; it is printed
    with every figure. `total` is the size of the full model in `unit`s. Where not every size was run, "smallest"
    is the smallest size that was.
    """

    FORMAT: ClassVar[str] = "gossamer circuit curve"

    unit: str
    total: int
    sizes_S: Ints
    metric_SN: Floats
    baseline: Baseline
    rule: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.sizes_S[0] == 0, "a curve shows the empty circuit"
        assert self.sizes_S[-1] == self.total, "a curve ends at the full model"
        assert bool((np.diff(self.sizes_S) > 0).all()), "sizes grow"
        assert self.metric_SN.shape == (len(self.sizes_S), len(self.baseline.clean_N))

    @property
    def is_complete(self) -> bool:
        """Whether every size was run."""
        return len(self.sizes_S) == self.total + 1

    @cached_property
    def explained_S(self) -> Floats:
        """Explained effect at each size."""
        return self.baseline.explained(self.metric_SN)

    @cached_property
    def samples_SR(self) -> Floats:
        """Explained effect at each size in every resample of the prompts."""
        return self.baseline.explained_samples(self.metric_SN)

    def interval_S(self) -> tuple[Floats, Floats]:
        """Lower and upper end of the 95 % interval at each size."""
        tail = (1 - CONFIDENCE) / 2
        low_S, high_S = np.nanquantile(self.samples_SR, [tail, 1 - tail], axis=1)
        return low_S, high_S

    def smallest(self, level: float) -> int | None:
        """The smallest size from which the curve stays at or above `level`; 0 where the empty circuit does."""
        return smallest_from(self.explained_S, self.sizes_S, level)

    def reached_with_none(self, level: float) -> bool:
        """Whether a level is reached without a size; never where 0 is one, as components left out are replaced."""
        return False

    def smallest_samples(self, level: float) -> Floats:
        """`smallest` in every resample [R]; NaN where the curve never gets there."""
        found = [smallest_from(samples_S, self.sizes_S, level) for samples_S in self.samples_SR.T]
        return np.array([np.nan if size is None else size for size in found], dtype=np.float64)

    def smallest_estimate(self, level: float) -> Estimate | None:
        """`smallest` with its interval over prompts."""
        size = self.smallest(level)
        return None if size is None else estimate(size, self.smallest_samples(level))

    @property
    def shares_S(self) -> Floats:
        """Sizes as shares of everything."""
        return self.sizes_S / max(self.total, 1)

    @property
    def faithfulness_S(self) -> Floats:
        """MIB's faithfulness: as explained, but the floor is the empty circuit (with free MLPs no corrupt run)."""
        empty = Baseline(self.baseline.clean_N, self.metric_SN[0])
        return empty.explained(self.metric_SN)

    @property
    def cpr(self) -> float:
        """Area under the faithfulness over the share kept (MIB's circuit performance ratio)."""
        return float(np.trapezoid(self.faithfulness_S, self.shares_S))

    @property
    def cmd(self) -> float:
        """Area between the faithfulness and 1 over the share kept (MIB's circuit-model distance)."""
        return float(np.trapezoid(np.abs(1 - self.faithfulness_S), self.shares_S))

    def describe_areas(self) -> str:
        """Both areas in words."""
        return f"CPR {self.cpr:.2f}, CMD {self.cmd:.2f}"

    def areas(self) -> dict[str, float | None]:
        """Both areas as plain data."""
        return {"CPR": finite(self.cpr), "CMD": finite(self.cmd)}


@dataclass(frozen=True, eq=False)
class ShutCurve(Curve):
    """A curve whose components are shut when left out, with nothing in their place.

    So none kept is no corrupt run, and may explain anything. A level that it reaches says nothing about components and
    has no size.
    """

    FORMAT: ClassVar[str] = "gossamer circuit curve of shut components"

    def smallest(self, level: float) -> int | None:
        """The smallest size from which the curve stays at a level that it does not reach with nothing kept."""
        return None if self.reached_with_none(level) else super().smallest(level)

    def reached_with_none(self, level: float) -> bool:
        """Whether nothing has to be kept."""
        return bool(self.explained_S[0] >= level)


def size_ratio(larger: Curve, smaller: Curve, level: float) -> Estimate | None:
    """How many times more components the first curve needs for a level, with a paired interval over prompts."""
    one, other = larger.smallest(level), smaller.smallest(level)
    if one is None or other is None or other == 0:
        return None
    if len(larger.baseline.clean_N) != len(smaller.baseline.clean_N):
        return Estimate(one / other, float("nan"), float("nan"))
    below_R = smaller.smallest_samples(level)
    samples_R = larger.smallest_samples(level) / np.where(below_R > 0, below_R, np.nan)
    return estimate(one / other, samples_R)


@dataclass(frozen=True, eq=False)
class RandomCircuits(Stored):
    """The metric [D, N] of random circuits of one size: what a ranking is worth beside chance."""

    FORMAT: ClassVar[str] = "gossamer random circuits"

    size: int
    metric_DN: Floats
    baseline: Baseline

    @property
    def explained_D(self) -> Floats:
        """Explained effect of each random circuit."""
        return self.baseline.explained(self.metric_DN)

    def to_dict(self) -> dict[str, Any]:
        """Size and explained effects as plain data."""
        return {"size": self.size, "explained": [finite(share) for share in self.explained_D]}

    def describe(self, unit: str) -> str:
        """What they explain, in words."""
        explained_D = self.explained_D
        return (
            f"{len(explained_D)} random circuits of {self.size:,} {unit} explain {explained_D.mean():z.2f}"
            f" ({explained_D.min():z.2f} to {explained_D.max():z.2f})"
        )

    def share_at_least(self, explained: float) -> float:
        """The share of random circuits that explain at least as much."""
        return float((self.explained_D >= explained).mean())


def finite(number: float) -> float | None:
    """The number for a JSON file, which has no word for what is not one."""
    return float(number) if np.isfinite(number) else None
