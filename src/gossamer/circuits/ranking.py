"""Orders of components, the circuits that keep the first of them, and how much two circuits share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gossamer.circuits.effect import Bools, Floats, Ints

NO_EFFECT = 1e-6  # of the difference between the two runs: rounding, in float32


def ranked(score_C: Floats, *, by_magnitude: bool = False, negligible: float = -np.inf) -> Ints:
    """Components from the most to the least important; ties keep the order of components, that is (layer, head).

    Scores of at most this size come last, all tied: a component that does nothing is not more important than one that
    works against the answer.
    """
    size_C = np.nan_to_num(np.abs(score_C), nan=-np.inf)
    score_C = size_C if by_magnitude else np.asarray(score_C)
    return np.argsort(-np.where(size_C > negligible, score_C, -np.inf), kind="stable").astype(np.int64)


def top_masks(order_C: Ints, sizes: Sequence[int]) -> Bools:
    """Which components [S, C] the circuits of these sizes keep."""
    rank_C = np.empty(len(order_C), dtype=np.int64)
    rank_C[order_C] = np.arange(len(order_C))
    return rank_C[None, :] < np.asarray(sizes, dtype=np.int64)[:, None]


def random_masks(n_components: int, size: int, draws: int, generator: np.random.Generator) -> Bools:
    """Random circuits [D, C] of one size."""
    return np.stack([top_masks(generator.permutation(n_components), [size])[0] for _ in range(draws)])


def jaccard(first: Sequence[object], second: Sequence[object]) -> float | None:
    """Overlap of two sets of components: shared over all; None for two empty ones, of which nothing can be said."""
    one, other = set(first), set(second)
    return len(one & other) / len(one | other) if one | other else None
