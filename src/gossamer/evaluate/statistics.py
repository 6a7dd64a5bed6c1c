"""How sure a figure is: bootstrap over sequences, Wilson's interval for a share."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gossamer.evaluate.report import Estimate

RESAMPLES = 2_000
CONFIDENCE = 0.95
_Z = 1.959963984540054  # the normal quantile of CONFIDENCE

Floats = NDArray[np.float64]


class Bootstrap:
    """Means per token, resampled over whole sequences; every figure of one text sees the same resamples (paired)."""

    def __init__(self, tokens_N: Floats, *, seed: int) -> None:
        n = len(tokens_N)
        picks_RN = np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))
        self._counts_RN = np.stack([np.bincount(picks, minlength=n) for picks in picks_RN]).astype(np.float64)
        self._tokens_N = tokens_N
        self._tokens_R = self._counts_RN @ self._tokens_N

    def mean(self, sums_N: Floats) -> Estimate:
        """The mean per token of sums over sequences."""
        return self._estimate(sums_N.sum() / self._tokens_N.sum(), self._counts_RN @ sums_N / self._tokens_R)

    def ratio(self, above_N: Floats, below_N: Floats) -> Estimate | None:
        """A ratio of two sums; None where the lower one is not positive."""
        if below_N.sum() <= 0:
            return None
        above_R, below_R = self._counts_RN @ above_N, self._counts_RN @ below_N
        meaningful = below_R > 0
        return self._estimate(above_N.sum() / below_N.sum(), above_R[meaningful] / below_R[meaningful])

    @staticmethod
    def _estimate(value: float, samples_R: Floats) -> Estimate:
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(samples_R, [tail, 1 - tail])
        return Estimate(float(value), float(low), float(high))


def wilson(right: int, n: int) -> Estimate:
    """A share of `n` trials with Wilson's interval."""
    share = right / n
    centre = (share + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(share * (1 - share) / n + _Z**2 / (4 * n**2))
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))
