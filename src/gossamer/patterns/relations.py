"""Head against head over the same (query, key) pairs: do two heads do the same thing?

For heads a and b let U be the pairs where at least one of them has an edge (the union of supports). Everywhere else
both are zero, and on most pairs of a sparse model both are: such agreement says nothing and is left out.

    pearson   correlation of the weights on U. Two heads that never share an edge come out negative: on U, one is zero
              exactly where the other is not
    spearman  the same of ranks on U; ties share their mean rank, and the zeros of each head are one large tie
    overlap   shared edges / |U| (Jaccard)

A head without edges has no relation: NaN, not zero; neither has a pair on whose U a head's weights are all equal.

`position_removed`: every pair of tokens belongs to a stratum, its distance (or the first-token column, a stratum of its
own). Within each stratum the mean over U is taken off before correlating, so what both heads do because of where
tokens are no longer counts, only which of the tokens at a distance they pick.

All pairs of heads come from matrix products over the pairs of tokens. Ranks depend on U and so on the pair of heads,
but only by a shift: with r the rank inside a head's own support and z the zeros it has on U, the rank on U is r + z on
the support and (z + 1) / 2 elsewhere. Taking the latter off (correlation does not mind) leaves r + (z - 1) / 2 on the
support and 0 elsewhere, whose sums are those of r, of 1 and of their products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError, nearest
from gossamer.maps import AttentionMaps, head_name
from gossamer.patterns.plain import load_plain, save_plain

Array = NDArray[Any]
CHUNK = 1 << 14  # pairs of tokens whose weights are laid out at once
MEASURES = ("pearson", "spearman", "overlap")


@dataclass(frozen=True, eq=False)
class Relations:
    """All pairs of A heads, of one model or two; NaN where a relation is undefined."""

    models: tuple[str, ...]
    names: tuple[str, ...]  # `L5H1`, once for every model
    model_of: Array  # [A], index into `models`
    pearson: Array
    spearman: Array
    overlap: Array
    n_edges: Array  # [A]
    position_removed: bool
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def index(self, name: str, model: str | int = 0) -> int:
        """The row of a head."""
        number = self.models.index(model) if isinstance(model, str) and model in self.models else model
        for index, known in enumerate(self.names):
            if known == name and self.model_of[index] == number:
                return index
        raise GossamerError(f"There is no head {name!r} in these relations.{nearest(name, self.names)}")

    def matrix(self, measure: str = "pearson") -> Array:
        """One measure for all pairs [A, A]."""
        if measure not in MEASURES:
            raise GossamerError(
                f"{measure!r} is no relation; choose {', '.join(MEASURES)}.{nearest(measure, MEASURES)}"
            )
        found: Array = getattr(self, measure)
        return found

    def nearest_heads(self, head: int, measure: str = "pearson", *, n: int = 5) -> list[tuple[int, float]]:
        """The heads most like one, and how like; none for a head without edges."""
        row = self.matrix(measure)[head].copy()
        row[head] = np.nan
        order = [int(other) for other in np.argsort(-row, kind="stable") if not np.isnan(row[other])]
        return [(other, float(row[other])) for other in order[:n]]

    def n_compared(self, head: int, other: int) -> int:
        """On how many pairs of tokens the relation of two heads rests: those where at least one has an edge."""
        edges = self.n_edges[head] + self.n_edges[other]
        return round(float(edges / (1 + np.nan_to_num(self.overlap[head, other]))))

    def order(self, measure: str = "pearson") -> list[int]:
        """Heads so that like stands beside like (average linkage); heads without relations come last."""
        return clustering_order(self.matrix(measure))

    def dense_to_sparse(self, measure: str = "pearson") -> Array:
        """Each head of the first model against the same head of the second [A / 2]."""
        if len(self.models) != 2:
            raise GossamerError("These relations are of one model; relate dense and sparse maps together.")
        half = int((self.model_of == 0).sum())
        return np.diagonal(self.matrix(measure), half)

    def of_model(self, number: int) -> Relations:
        """The relations within one of the models, 0 or 1."""
        mine = np.flatnonzero(self.model_of == number)
        if not len(mine):
            raise GossamerError(f"These relations hold no model {number}; they are of {' and '.join(self.models)}.")
        within = np.ix_(mine, mine)
        return replace(
            self,
            models=(self.models[number],),
            names=tuple(self.names[index] for index in mine),
            model_of=np.zeros(len(mine), dtype=np.int64),
            **{name: getattr(self, name)[within] for name in MEASURES},
            n_edges=self.n_edges[mine],
        )

    def save(self, path: str | Path) -> Path:
        """Write as safetensors or JSON, as the path's ending says."""
        return save_plain(self, path, kind="head relations")

    @classmethod
    def load(cls, path: str | Path) -> Relations:
        """Read what `save` wrote."""
        return load_plain(cls, path, kind="head relations")


def relate(*maps: AttentionMaps, position_removed: bool = False) -> Relations:
    """Relations of all heads of one model, or of two models (dense and sparse) on the same prompts."""
    _require_same_prompts(maps)
    heads = _Heads(maps)
    sums = _Sums.empty(heads.n_heads)
    for weights, ranks in heads.chunks():
        sums += _Sums.of(weights, ranks)
    pearson, spearman = _correlations(heads, sums, position_removed=position_removed)
    union = sums.union()
    with np.errstate(invalid="ignore", divide="ignore"):
        overlap = np.where(union > 0, sums.shared / union, np.nan)
    dead = sums.count == 0
    for measure in (pearson, spearman, overlap):
        measure[dead] = measure[:, dead] = np.nan
    return Relations(
        models=tuple(one.model for one in maps),
        names=tuple(head_name(*head) for one in maps for head in one.heads),
        model_of=np.repeat(np.arange(len(maps)), [len(one.heads) for one in maps]),
        pearson=pearson,
        spearman=spearman,
        overlap=overlap,
        n_edges=sums.count.astype(np.int64),
        position_removed=position_removed,
        provenance={"maps": [dict(one.provenance) for one in maps], "floors": [one.floor for one in maps]},
    )


def _require_same_prompts(maps: Sequence[AttentionMaps]) -> None:
    if not 1 <= len(maps) <= 2:
        raise GossamerError(f"Relations are within one model or between two, not {len(maps)}.")
    if any(one.ids != maps[0].ids or one.documents != maps[0].documents for one in maps):
        raise GossamerError("The maps are of different prompts; capture both models on the same ones.")


class _Heads:
    """The edges of all heads, sorted by head and pair; pairs of tokens without any edge have no number."""

    def __init__(self, maps: Sequence[AttentionMaps]) -> None:
        first = maps[0]
        before = np.concatenate([np.arange(length) for length in first.lengths])
        row_start = np.concatenate([[0], np.cumsum(before + 1)])  # where each row's pairs begin among all pairs
        columns: list[tuple[Array, Array, Array]] = []
        self.n_heads = 0
        for one in maps:
            keep = one.weight > 0  # an open edge may underflow to zero: no support
            head = (one.head_of_edge[keep] + self.n_heads).astype(np.uint16)
            pair = (row_start[one.query_position[keep]] + one.key[keep]).astype(np.int32)
            columns.append((head, pair, one.weight[keep]))
            self.n_heads += len(one.heads)
        self.head, self.pair, self.weight = (np.concatenate(column) for column in zip(*columns, strict=True))
        if first.n_prompts > 1:  # heads come prompt by prompt
            order = np.argsort(self.head, kind="stable")
            self.head, self.pair, self.weight = self.head[order], self.pair[order], self.weight[order]
        self.bounds = np.searchsorted(self.head, np.arange(self.n_heads + 1))
        used = np.zeros(row_start[-1], dtype=bool)
        used[self.pair] = True
        self.stratum = _strata_of_pairs(first)[used]
        self.column = (np.cumsum(used, dtype=np.int32) - 1)[self.pair]
        self.n_columns = int(used.sum())
        self.rank = np.empty(len(self.weight), dtype=np.float32)  # half-integers: exact up to four million edges
        for start, stop in pairwise(self.bounds):
            self.rank[start:stop] = mean_ranks(self.weight[start:stop])

    def chunks(self) -> Iterator[tuple[Array, Array]]:
        """Weights and ranks laid out [A, pairs], some pairs at a time."""
        for low in range(0, self.n_columns, CHUNK):
            high = min(low + CHUNK, self.n_columns)
            weights, ranks = (np.zeros((self.n_heads, high - low)) for _ in range(2))
            for head, (start, stop) in enumerate(pairwise(self.bounds)):
                first, last = start + np.searchsorted(self.column[start:stop], [low, high])
                here = self.column[first:last] - low
                weights[head, here] = self.weight[first:last]
                ranks[head, here] = self.rank[first:last]
            yield weights, ranks

    def strata(self) -> Iterator[tuple[Array, Array]]:
        """The same, one stratum (a distance, or the first-token column) at a time."""
        order = np.argsort(self.stratum, kind="stable")
        place = np.empty(self.n_columns, dtype=np.int32)  # columns renumbered so that a stratum's stand together
        place[order] = np.arange(self.n_columns, dtype=np.int32)
        begins = np.flatnonzero(np.diff(self.stratum[order], prepend=-2))
        of_edge = self.stratum[self.column]
        by_stratum = np.argsort(of_edge, kind="stable")
        edge_bounds = np.searchsorted(of_edge[by_stratum], self.stratum[order][begins])
        stops = [*begins[1:], self.n_columns], [*edge_bounds[1:], len(by_stratum)]
        for begin, end, start, stop in zip(begins, stops[0], edge_bounds, stops[1], strict=True):
            edges = by_stratum[start:stop]
            here = (self.head[edges], place[self.column[edges]] - begin)
            weights, ranks = (np.zeros((self.n_heads, end - begin)) for _ in range(2))
            weights[here], ranks[here] = self.weight[edges], self.rank[edges]
            yield weights, ranks


def _strata_of_pairs(maps: AttentionMaps) -> Array:
    """For every pair of tokens, row by row: its distance plus one, or 0 in the first-token column."""
    found = []
    for row, start in enumerate(maps.document_start):
        within = row - maps.first_position[np.searchsorted(maps.first_position, row, side="right") - 1]
        stratum = np.arange(within + 1, 0, -1)
        stratum[start] = 0
        found.append(stratum)
    return np.concatenate(found).astype(np.uint16 if max(maps.lengths) < 65_000 else np.int32)


def mean_ranks(values: Array) -> Array:
    """Ranks from 1; equal values share their mean rank."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    new = np.ones(len(values), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    begins = np.flatnonzero(new)
    mean = (begins + np.append(begins[1:], len(values)) + 1) / 2
    ranks = np.empty(len(values))
    ranks[order] = mean[np.cumsum(new) - 1]
    return ranks


@dataclass
class _Sums:
    """Sums over pairs of tokens, for all pairs of heads; everything a correlation on U needs."""

    count: Array  # [A] edges
    shared: Array  # [A, A] edges of both
    weight: Array  # [A] sums of weights, and of squares
    weight_square: Array
    weight_product: Array  # [A, A]
    rank: Array
    rank_square: Array
    rank_product: Array
    rank_shared: Array  # [A, A] sums of a's ranks over the edges b shares

    @classmethod
    def empty(cls, a: int) -> _Sums:
        """Sums over nothing, for `a` heads."""
        return cls(*(np.zeros(shape) for shape in (a, (a, a), a, a, (a, a), a, a, (a, a), (a, a))))

    @classmethod
    def of(cls, weights: Array, ranks: Array) -> _Sums:
        """Sums over pairs of tokens laid out [A, pairs]."""
        support = (weights > 0).astype(np.float64)
        return cls(
            count=support.sum(1),
            shared=support @ support.T,
            weight=weights.sum(1),
            weight_square=np.einsum("ij,ij->i", weights, weights),
            weight_product=weights @ weights.T,
            rank=ranks.sum(1),
            rank_square=np.einsum("ij,ij->i", ranks, ranks),
            rank_product=ranks @ ranks.T,
            rank_shared=ranks @ support.T,
        )

    def __iadd__(self, other: _Sums) -> _Sums:
        for part in fields(self):
            total = getattr(self, part.name)
            total += getattr(other, part.name)
        return self

    def union(self) -> Array:
        """|U| for all pairs of heads."""
        return self.count[:, None] + self.count[None, :] - self.shared

    def moments(self, shift: Array | None) -> tuple[Array, Array, Array]:
        """Sums of a, of a squared and of ab over U [A, A]: of weights, or of ranks raised by `shift[a, b]`."""
        if shift is None:
            ones = np.ones_like(self.shared)
            return self.weight[:, None] * ones, self.weight_square[:, None] * ones, self.weight_product
        count, rank = self.count[:, None], self.rank[:, None]
        square = self.rank_square[:, None] + 2 * shift * rank + shift**2 * count
        product = self.rank_product + shift.T * self.rank_shared + shift * self.rank_shared.T
        return rank + shift * count, square, product + shift * shift.T * self.shared


def _correlations(heads: _Heads, whole: _Sums, *, position_removed: bool) -> tuple[Array, Array]:
    """Pearson and Spearman on U, of what is left after the mean of each part (all pairs, or a stratum) is taken off."""
    shift = (whole.union() - whole.count[:, None] - 1) / 2
    parts = (_Sums.of(*laid_out) for laid_out in heads.strata()) if position_removed else iter([whole])
    kinds = ((None, _Spread(heads.n_heads)), (shift, _Spread(heads.n_heads)))
    for part in parts:
        size = np.maximum(part.union(), 1)
        for raised, spread in kinds:
            total, square, product = part.moments(raised)
            spread.covariance += product - total * total.T / size
            spread.variance += square - total**2 / size
            spread.square += square
    return kinds[0][1].correlation(), kinds[1][1].correlation()


class _Spread:
    """Covariance and variance on U for all pairs of heads [A, A], as they add up."""

    def __init__(self, n_heads: int) -> None:
        self.covariance, self.variance, self.square = (np.zeros((n_heads, n_heads)) for _ in range(3))

    def correlation(self) -> Array:
        """NaN where a head does not vary on U; rounding leaves something even where all its weights are equal."""
        varies = self.variance > 1e-9 * self.square
        with np.errstate(invalid="ignore", divide="ignore"):
            found = self.covariance / np.sqrt(self.variance * self.variance.T)
        return np.where(varies & varies.T, np.clip(found, -1, 1), np.nan)


def clustering_order(similarity: Array) -> list[int]:
    """Leaves of an average-linkage tree on similarities, so that like stands beside like; undefined ones last."""
    alive = [index for index in range(len(similarity)) if not np.isnan(np.delete(similarity[index], index)).all()]
    groups: dict[int, list[int]] = {slot: [index] for slot, index in enumerate(alive)}
    near = np.nan_to_num(similarity[np.ix_(alive, alive)], nan=-1.0)
    near = (near + near.T) / 2
    np.fill_diagonal(near, -np.inf)
    while len(groups) > 1:
        first, second = divmod(int(near.argmax()), len(alive))
        sizes = len(groups[first]), len(groups[second])
        merged = (sizes[0] * near[first] + sizes[1] * near[second]) / sum(sizes)
        merged[[first, second]] = -np.inf
        near[first], near[:, first] = merged, merged
        near[second], near[:, second] = -np.inf, -np.inf
        groups[first] += groups.pop(second)
    leaves = next(iter(groups.values()), [])
    return leaves + [index for index in range(len(similarity)) if index not in set(leaves)]
