"""From dense to sparse: what changes in each head, how sure that is, and four statements answered with numbers.

A change is sparse minus dense on the same prompts. Intervals are a bootstrap's over prompts; p values come from a
paired permutation test (the signs of whole prompts are flipped), corrected over heads by Holm's method, or by
Benjamini and Hochberg's if asked. A head or prompt where one side is undefined is left out of that change.

Each statement looks at an amount that must be there in the dense model (else: cannot tell) and at the share of it that
is left in the sparse one, with its interval. The answer is yes if the whole interval lies on one side of the limit,
no if it lies on the other, and cannot tell if the limit is inside.

    sink gone         carried first-token excess, over heads where it is at least `present` in the dense model: less
                      than `gone` of it is left
    diagonals dotted  over heads that put at least `present` of their mass at one distance and, in the sparse model,
                      still have visible edges there: of the rows with such an edge less than `solid` are left. Heads
                      that lost their diagonal altogether are counted apart
    wash removed      the overlap with even attention, over heads where it is at least `present`: less than `gone` of it
    heads dead        heads without an open edge on any prompt: at least one, on at least `prompts` prompts

Sink and wash are amounts: they fall when less is carried at all. What share they are of what is carried stands beside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps, head_name
from gossamer.patterns.plain import load_plain, save_plain
from gossamer.patterns.resampling import (
    Correction,
    bootstrap_means,
    corrected,
    draws,
    interval,
    paired_permutation,
    smallest_p,
)
from gossamer.patterns.statistics import MEASURES, HeadStatistics, diagonal_coverage, mass_by_distance, measure

Array = NDArray[Any]
YES, NO, CANNOT_TELL = "yes", "no", "cannot tell"
SIGNIFICANT = 0.05
A_HEAD = 40  # resamples at least: enough for a corrected p below it


@dataclass(frozen=True)
class Limits:
    """Where the statements draw their lines."""

    present: float = 0.3
    gone: float = 0.25
    solid: float = 0.9
    prompts: int = 5


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


@dataclass(frozen=True)
class Statement:
    """A statement about the pair, its answer, and the numbers behind it."""

    statement: str
    answer: str
    n_heads: int
    dense: float
    sparse: float
    left: float
    low: float
    high: float
    why: str

    def __str__(self) -> str:
        return f"{self.statement}: {self.answer}. {self.why}"


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
    answers = _Answers(dense, sparse, before, after, sampling, limits)
    return PairStatistics(
        dense=before,
        sparse=after,
        changes=tuple(sampling.change(name, before.values[name], after.values[name]) for name in MEASURES),
        statements=(answers.sink(), answers.diagonals(), answers.wash(), answers.dead()),
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
        low, high = interval(bootstrap_means(difference, self.counts))
        flat = difference.reshape(len(difference), -1)
        resamples = max(self.resamples, A_HEAD * flat.shape[1])
        p = paired_permutation(flat, resamples=resamples, seed=self.seed)
        least = np.where(np.isnan(p), np.nan, smallest_p(self.n_prompts, resamples))
        overall = _mean(flat, axis=1)[:, None]
        all_low, all_high = interval(bootstrap_means(overall, self.counts))
        both = ~np.isnan(difference)
        return Change(
            measure=name,
            dense=_mean(np.where(both, dense, np.nan)),
            sparse=_mean(np.where(both, sparse, np.nan)),
            low=low,
            high=high,
            p=p.reshape(low.shape),
            p_corrected=corrected(p, self.correction).reshape(low.shape),
            all_dense=float(_mean(np.where(both, dense, np.nan).ravel())),
            all_sparse=float(_mean(np.where(both, sparse, np.nan).ravel())),
            all_low=float(all_low[0]),
            all_high=float(all_high[0]),
            all_p=float(paired_permutation(overall, resamples=self.resamples, seed=self.seed)[0]),
            smallest_p=float(np.nanmin(corrected(least, self.correction))) if (~np.isnan(p)).any() else 1.0,
        )

    def left(self, dense: Array, sparse: Array) -> tuple[float, float, float]:
        """The ratio of the means of two amounts [N], sparse to dense, and its interval."""
        above, below = (bootstrap_means(values[:, None], self.counts)[:, 0] for values in (sparse, dense))
        low, high = interval((above / below)[:, None])
        return float(sparse.mean() / dense.mean()), float(low[0]), float(high[0])


def _mean(values: Array, axis: int = 0) -> Array:
    known = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(known, values, 0.0).sum(axis) / known.sum(axis)


@dataclass
class _Answers:
    dense_maps: AttentionMaps
    sparse_maps: AttentionMaps
    dense: HeadStatistics
    sparse: HeadStatistics
    sampling: _Sampling
    limits: Limits

    def sink(self) -> Statement:
        """Whether the first token's column has vanished."""
        heads = self.dense.mean("first_excess") >= self.limits.present
        amounts = [
            _mean(statistics.values["first_excess"][:, heads], axis=1) for statistics in (self.dense, self.sparse)
        ]
        before = self.sparse.mean("first_excess_before")[heads].mean() if heads.any() else np.nan
        return self._judge(
            "the sink is gone",
            "has a first-token column",
            heads,
            amounts,
            self.limits.gone,
            lambda d, s: (
                f"carried first-token mass above even attention {d:.3f} → {s:.3f}, {self._of_carried(heads, d, s)}"
                f" (softmax of the sparse model, before its gate: {before:.3f})"
            ),
        )

    def wash(self) -> Statement:
        """Whether the light spread over many keys has gone."""
        heads = self.dense.mean("wash") >= self.limits.present
        amounts = [_mean(statistics.values["wash"][:, heads], axis=1) for statistics in (self.dense, self.sparse)]
        return self._judge(
            "the wash is removed",
            "spreads its attention",
            heads,
            amounts,
            self.limits.gone,
            lambda d, s: f"overlap with even attention {d:.3f} → {s:.3f}, {self._of_carried(heads, d, s)}",
        )

    def _of_carried(self, heads: Array, dense: float, sparse: float) -> str:
        """Two amounts as shares of what these heads carry."""
        carried = [statistics.mean("carried")[heads].mean() for statistics in (self.dense, self.sparse)]
        shares = [part / whole if whole else 0.0 for part, whole in zip((dense, sparse), carried, strict=True)]
        return f"which is {shares[0]:.0%} → {shares[1]:.0%} of what they carry"

    def diagonals(self) -> Statement:
        """Whether solid diagonals have become dots, where any of them is left."""
        mass = mass_by_distance(self.dense_maps)
        total = np.maximum(mass.sum(1), np.finfo(float).tiny)
        distances = mass.argmax(1)
        heads = mass.max(1) / total >= self.limits.present
        dense, sparse = (diagonal_coverage(maps, distances) for maps in (self.dense_maps, self.sparse_maps))
        kept = heads & (sparse.mean(0) > 0)
        statement, what = "the diagonals are dotted", "has a diagonal"
        if heads.any() and not kept.any():
            why = f"Of {heads.sum()} heads with a diagonal none has a visible edge left on it, not even dots"
            return Statement(statement, NO, int(heads.sum()), float(dense[:, heads].mean()), 0.0, 0.0, 0.0, 0.0, why)
        found = self._judge(
            statement,
            what,
            kept.reshape(self.dense.dead.shape),
            [_mean(coverage[:, kept], axis=1) for coverage in (dense, sparse)],
            self.limits.solid,
            lambda d, s: f"rows with a visible edge on the diagonal {d:.1%} → {s:.1%}",
            among="heads with any of their diagonal left",
        )
        if not kept.any():
            return found
        solid = int((sparse.mean(0) >= self.limits.solid * dense.mean(0))[kept].sum())
        counts = (
            f". Of {heads.sum()} heads with a diagonal {heads.sum() - kept.sum()} have no visible edge left on it,"
            f" {kept.sum() - solid} are dotted, {solid} as solid as before"
        )
        return replace(found, why=found.why + counts)

    def dead(self) -> Statement:
        """Whether some heads carry nothing at all."""
        n_dense, n_sparse = int(self.dense.dead.sum()), int(self.sparse.dead.sum())
        n_prompts = self.dense_maps.n_prompts
        answer = CANNOT_TELL if n_prompts < self.limits.prompts else (YES if n_sparse > n_dense else NO)
        names = [head_name(*head) for head in np.argwhere(self.sparse.dead)[:6].tolist()]
        which = f" ({', '.join(names)}{', …' if n_sparse > len(names) else ''})" if names else ""
        why = (
            f"{n_dense} → {n_sparse} of {self.dense.dead.size} heads have no open edge on any of {n_prompts} prompts"
            f"{which}"
        )
        share = n_sparse / self.dense.dead.size
        return Statement(
            "heads have died", answer, n_sparse, float(n_dense), float(n_sparse), share, np.nan, np.nan, why
        )

    def _judge(
        self,
        statement: str,
        what: str,
        heads: Array,
        amounts: list[Array],
        limit: float,
        say: Callable[[float, float], str],
        *,
        among: str = "heads",
    ) -> Statement:
        n = int(heads.sum())
        if n == 0:
            why = f"No head of {self.dense.model} {what} (at least {self.limits.present:g} of it)"
            return Statement(statement, CANNOT_TELL, 0, np.nan, np.nan, np.nan, np.nan, np.nan, why)
        dense, sparse = (float(amount.mean()) for amount in amounts)
        left, low, high = self.sampling.left(*amounts)
        answer = YES if high < limit else (NO if low > limit else CANNOT_TELL)
        if self.dense_maps.n_prompts < 2:
            answer = CANNOT_TELL
        why = f"Over {n} {among}, {say(dense, sparse)}: {left:.1%} is left, interval {low:.1%} to {high:.1%}"
        return Statement(statement, answer, n, dense, sparse, left, low, high, why)
