"""How sure a mean over prompts is: bootstrap intervals, paired permutation tests, correction for many heads.

The unit is the prompt: positions of one prompt depend on each other, so prompts are drawn and flipped whole.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError

Array = NDArray[Any]
Correction = Literal["holm", "bh"]
CONFIDENCE = 0.95
EXACT = 16  # prompts up to which every choice of signs is tried
AT_A_TIME = 4096  # choices of signs


def draws(n_prompts: int, resamples: int, seed: int) -> Array:
    """How often each prompt is drawn in each bootstrap resample [R, N]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n_prompts, np.full(n_prompts, 1 / n_prompts), resamples).astype(np.float64)


def bootstrap_means(values: Array, counts: Array) -> Array:
    """Means over prompts [R, ...] of values [N, ...] in every resample; undefined values (NaN) are left out."""
    known = ~np.isnan(values)
    flat, weight = np.where(known, values, 0.0).reshape(len(values), -1), known.reshape(len(values), -1).astype(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        return ((counts @ flat) / (counts @ weight)).reshape(len(counts), *values.shape[1:])


def interval(samples: Array) -> tuple[Array, Array]:
    """The middle 95 % of resamples [R, ...]; NaN where no resample is defined."""
    tail = (1 - CONFIDENCE) / 2
    defined = ~np.isnan(samples).all(0)
    low, high = np.full(samples.shape[1:], np.nan), np.full(samples.shape[1:], np.nan)
    if defined.any():
        low[defined], high[defined] = np.nanquantile(samples[:, defined], [tail, 1 - tail], axis=0)
    return low, high


def interval_over_prompts(samples: Array, counts: Array) -> tuple[Array, Array]:
    """The interval of what was drawn with `counts` [R, N]; of a single prompt there is none (NaN)."""
    if counts.shape[1] > 1:
        return interval(samples)
    return np.full(samples.shape[1:], np.nan), np.full(samples.shape[1:], np.nan)


def known_mean(values: Array, axis: int = 0) -> Array:
    """The mean over what is defined; NaN where nothing is."""
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        found: Array = np.where(known, values, 0.0).sum(axis) / known.sum(axis)
    return found


def paired_permutation(differences: Array, *, resamples: int, seed: int) -> Array:
    """Two-sided p of the mean of differences [N, A]: signs of whole prompts flipped, all ways if there are few."""
    n, exact = len(differences), len(differences) <= EXACT
    known = np.nan_to_num(differences, nan=0.0)
    observed = np.abs(known.sum(0)) * (1 - 1e-12) - 1e-300
    rng, ways = np.random.default_rng(seed), 2**n if exact else resamples
    reached = np.zeros(known.shape[1])
    for first in range(0, ways, AT_A_TIME):
        some = np.arange(first, min(first + AT_A_TIME, ways))
        minus = (some[:, None] >> np.arange(n)) & 1 if exact else rng.integers(0, 2, (len(some), n))
        reached += (np.abs((1.0 - 2.0 * minus) @ known) >= observed).sum(0)
    extra = 0 if exact else 1  # the observed signs are one of the ways
    return np.where(np.isnan(differences).all(0), np.nan, (reached + extra) / (ways + extra))


def smallest_p(n_prompts: int, resamples: int) -> float:
    """The smallest p that `paired_permutation` can give, whatever the differences."""
    return min(1.0, 2 / 2**n_prompts) if n_prompts <= EXACT else 1 / (resamples + 1)


def corrected(p: Array, how: Correction = "holm") -> Array:
    """P values for many tests: Holm (no false finding at all) or Benjamini-Hochberg (few among the findings)."""
    if how not in ("holm", "bh"):
        raise GossamerError(f"{how!r} is no correction for many tests; choose holm or bh.")
    result = np.full(p.shape, np.nan)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(p.ravel()[known], kind="stable")]
    n, rank = len(order), np.arange(len(order))
    ordered = p.ravel()[order]
    if how == "holm":
        adjusted = np.maximum.accumulate(ordered * (n - rank))
    else:
        adjusted = np.minimum.accumulate((ordered * n / (rank + 1))[::-1])[::-1]
    result.ravel()[order] = np.minimum(adjusted, 1.0)
    return result
