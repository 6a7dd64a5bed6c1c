"""Correlation of two lists of numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def pearson(one: Floats, other: Floats) -> float:
    """Pearson's correlation; NaN where one of them does not vary."""
    if len(one) < 2 or not one.std() or not other.std():
        return float("nan")
    return float(np.corrcoef(one, other)[0, 1])


def spearman(one: Floats, other: Floats) -> float:
    """Spearman's correlation: Pearson's of the ranks."""
    return pearson(ranks(one), ranks(other))


def ranks(values: Floats) -> Floats:
    """Ranks, ties sharing their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray(ends - (counts + 1) / 2)[inverse]
