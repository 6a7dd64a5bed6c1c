"""From dense to sparse: what changes in each head, how sure that is, and four statements answered with numbers.

A change is sparse minus dense on the same prompts. Intervals are a bootstrap's over prompts; p values come from a
paired permutation test (the signs of whole prompts are flipped), corrected over heads by Holm's method, or by
Benjamini and Hochberg's if asked. A head or prompt where one side is undefined is left out of that change. The
statements and their limits are defined in `gossamer.patterns.statements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps
from gossamer.patterns.plain import load_plain, save_plain
from gossamer.patterns.resampling import (
    Correction,
    bootstrap_means,
    corrected,
    draws,
    interval_over_prompts,
    known_mean,
    paired_permutation,
    smallest_p,
)
from gossamer.patterns.statements import Limits, Statement, answer
from gossamer.patterns.statistics import MEASURES, HeadStatistics, measure

__all__ = ["Change", "Limits", "PairStatistics", "Statement", "dense_to_sparse"]
Array = NDArray[Any]
SIGNIFICANT = 0.05
A_HEAD = 40  # resamples at least: enough for a corrected p below it


@dataclass(frozen=True, eq=False)
class Change:
    """One measure: dense and sparse means, their difference with interval and p; for each head [L, H] and over all."""

    measure: str
    dense: Array
    sparse: Array
    low: Array
    high: Array
    p: Array
    p_corrected: Array
    all_dense: float
    all_sparse: float
    all_low: float
    all_high: float
    all_p: float
    smallest_p: float  # that any head could have reached on so few prompts, corrected

    @property
    def can_tell(self) -> bool:
        """Whether a head's change could be significant at all."""
        return self.smallest_p < SIGNIFICANT

    @property
    def significant(self) -> Array:
        """Which heads [L, H] changed, by the corrected p."""
        return np.asarray(np.nan_to_num(self.p_corrected, nan=1.0) < SIGNIFICANT)

    @property
    def difference(self) -> Array:
        """Sparse minus dense [L, H]."""
        return self.sparse - self.dense


@dataclass(frozen=True, eq=False)
class PairStatistics:
    """The change from a dense to a sparse model on the same prompts."""

    dense: HeadStatistics
    sparse: HeadStatistics
    changes: tuple[Change, ...]
    statements: tuple[Statement, ...]
    correction: str
    resamples: int
    seed: int
    limits: Limits
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def change(self, name: str) -> Change:
        """The change of one measure."""
        return next(change for change in self.changes if change.measure == name)

    def save(self, path: str | Path) -> Path:
        """Write as JSON."""
        return save_plain(self, path, kind="pair statistics")

    @classmethod
    def load(cls, path: str | Path) -> PairStatistics:
        """Read what `save` wrote."""
        return load_plain(cls, path, kind="pair statistics")


def dense_to_sparse(
    dense: AttentionMaps,
    sparse: AttentionMaps,
    *,
    seed: int = 0,
    resamples: int = 10_000,
    correction: Correction = "holm",
    limits: Limits | None = None,
) -> PairStatistics:
    """Every measure's change from the dense to the sparse model, and the statements."""
    if dense.ids != sparse.ids or dense.heads != sparse.heads:
        raise GossamerError(
            "Dense and sparse maps differ in prompts or heads; capture both models on the same prompts."
        )
    limits = limits or Limits()
    before, after = measure(dense), measure(sparse)
    sampling = _Sampling(dense.n_prompts, resamples, seed, correction)
    return PairStatistics(
        dense=before,
        sparse=after,
        changes=tuple(sampling.change(name, before.values[name], after.values[name]) for name in MEASURES),
        statements=answer((dense, sparse), (before, after), sampling.counts, limits),
        correction=correction,
        resamples=resamples,
        seed=seed,
        limits=limits,
        provenance={"dense": dict(before.provenance), "sparse": dict(after.provenance)},
    )


class _Sampling:
    """The resamples of prompts that all numbers of one comparison share."""

    def __init__(self, n_prompts: int, resamples: int, seed: int, correction: Correction) -> None:
        self.n_prompts, self.resamples, self.seed, self.correction = n_prompts, resamples, seed, correction
        self.counts = draws(n_prompts, min(resamples, 2_000), seed)

    def change(self, name: str, dense: Array, sparse: Array) -> Change:
        """One measure [N, L, H] of both models."""
        difference = sparse - dense
        low, high = interval_over_prompts(bootstrap_means(difference, self.counts), self.counts)
        flat = difference.reshape(len(difference), -1)
        resamples = max(self.resamples, A_HEAD * flat.shape[1])
        p = paired_permutation(flat, resamples=resamples, seed=self.seed)
        least = np.where(np.isnan(p), np.nan, smallest_p(self.n_prompts, resamples))
        overall = known_mean(flat, axis=1)[:, None]
        all_low, all_high = interval_over_prompts(bootstrap_means(overall, self.counts), self.counts)
        both = ~np.isnan(difference)
        return Change(
            measure=name,
            dense=known_mean(np.where(both, dense, np.nan)),
            sparse=known_mean(np.where(both, sparse, np.nan)),
            low=low,
            high=high,
            p=p.reshape(low.shape),
            p_corrected=corrected(p, self.correction).reshape(low.shape),
            all_dense=float(known_mean(np.where(both, dense, np.nan).ravel())),
            all_sparse=float(known_mean(np.where(both, sparse, np.nan).ravel())),
            all_low=float(all_low[0]),
            all_high=float(all_high[0]),
            all_p=float(paired_permutation(overall, resamples=self.resamples, seed=self.seed)[0]),
            smallest_p=float(np.nanmin(corrected(least, self.correction))) if (~np.isnan(p)).any() else 1.0,
        )
