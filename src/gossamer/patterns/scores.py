"""The scores of the taxonomy, computed for all heads at once; `gossamer.patterns.taxonomy` defines them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.maps import AttentionMaps

Array = NDArray[Any]

TEXT = ("induction", "duplicate")
PATTERNS = (*TEXT, "self", "previous", "offset", "sink", "banded", "local", "diffuse")


@dataclass(frozen=True)
class Thresholds:
    """Every number the taxonomy depends on."""

    strong: float = 0.35
    second: float = 0.25
    second_diffuse: float = 0.36
    near_empty: float = 0.95
    window: int = 8
    offset_support: float = 0.25
    text_support: float = 0.05
    stripe_factor: float = 1.5
    stripe_coverage: float = 0.4
    stripe_rows: int = 6
    tie: float = 0.05
    support_rows: float = 4.0


def worth(masses: Array) -> Array:
    """How many equal masses the last axis is worth: their number if they are equal, 1 if one has it all."""
    square = (masses**2).sum(-1)
    found: Array = masses.sum(-1) ** 2 / np.where(square > 0, square, 1.0)
    return found


class View:
    """Maps as flat arrays: A heads, E edges, P rows; and for each pattern its edges, keys a row and rows that count."""

    def __init__(self, maps: AttentionMaps, thresholds: Thresholds) -> None:
        self.maps, self.thresholds = maps, thresholds
        self.n_heads = maps.n_layers * maps.n_heads
        self.n_rows = sum(maps.lengths)
        self.head = maps.head_of_edge
        self.row = maps.query_position
        self.column = maps.first_position[maps.prompt_of_edge] + maps.key
        self.weight = maps.weight.astype(np.float64)
        self.distance = self.row - self.column
        self.n_keys = maps.n_allowed.astype(np.float64)
        self.start = np.arange(self.n_rows) - maps.n_allowed + 1  # first position of each row's document
        sums = maps.row_sums().reshape(self.n_heads, self.n_rows)
        self.sums = np.where(self.n_keys >= 2, sums, 0.0)
        self.even_of_edge = (self.sums / self.n_keys)[self.head, self.row]
        self.weight = np.where(self.n_keys[self.row] >= 2, self.weight, 0.0)

    def empty(self) -> Array:
        """The share of the rows' mass that is not carried; NaN if no row counts."""
        rows = int((self.n_keys >= 2).sum())
        return np.clip(1 - self.sums.sum(1) / rows, 0, 1) if rows else np.full(self.n_heads, np.nan)

    def support(self, name: str) -> Array:
        """How many rows of equal mass a pattern is judged on [A]."""
        return worth(self.sums * self.rows_of(name))

    def score(self, name: str) -> Array:
        """A pattern's score for every head; NaN for heads that carry nothing where it could show."""
        score = self.excess(name)
        if name == "local":
            score = score * self.evenness
        if name in ("banded", "offset"):
            score = np.where(np.isnan(score) & (self.sums.sum(1) > 0), 0.0, score)
        if name in TEXT:
            held = (self.sums * self.rows_of(name)).sum(1)
            score = np.where(held >= self.thresholds.text_support * self.sums.sum(1), score, np.nan)
        return score

    def excess(self, name: str, rows: Array | None = None, edges: Array | None = None) -> Array:
        """The excess over even attention of a pattern's share, on some rows [A, P] and edges only."""
        rows = self.rows_of(name) if rows is None else rows & self.rows_of(name)
        counted = self.edges_of(name) & rows[self.head, self.row]
        counted = counted if edges is None else counted & edges
        carried = self.sums * rows
        total = carried.sum(1)
        amount = np.minimum(self.weight, self.even_of_edge) if name == "diffuse" else self.weight
        share = np.bincount(self.head[counted], amount[counted], minlength=self.n_heads)
        if name == "diffuse":
            below = self.maps.rows.below.reshape(self.n_heads, -1)
            spread = self.maps.rows.n_below.reshape(self.n_heads, -1) * self.sums / self.n_keys
            share = share + (np.minimum(below, spread) * rows).sum(1)
        uniform = (carried * self.keys_of(name) / self.n_keys).sum(1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(total > 0, np.clip((share - uniform) / (total - uniform), 0, 1), np.nan)

    def second_parts(self, primary: Array) -> Array:
        """For every pattern and head, the excess of mass that the head's primary pattern does not explain."""
        explained = np.zeros(len(self.weight), dtype=bool)
        rows = np.zeros((self.n_heads, self.n_rows), dtype=bool)
        for index, name in enumerate(PATTERNS):
            mine = primary == index
            rows |= mine[:, None] & self.rows_of(name)
            if name != "diffuse":
                explained |= mine[self.head] & self.edges_of(name)
        found = []
        for index, name in enumerate(PATTERNS):
            excess = self.excess(name, rows, ~explained)
            if name == "local":
                excess = excess * self.evenness
            found.append(np.where((primary == index) | np.isnan(excess), -1.0, excess))
        return np.stack(found)

    def edges_of(self, name: str) -> Array:
        """Which edges belong to a pattern [E]."""
        return self._edges[name]

    def keys_of(self, name: str) -> Array:
        """How many keys a pattern has in each row, [P] or [A, P]."""
        return self._keys[name]

    def rows_of(self, name: str) -> Array:
        """Rows in which a pattern is possible and not everything [A, P] (or broadcast to it)."""
        if name == "diffuse":
            possible = self.n_keys >= 2
        else:
            possible = (self._keys[name] > 0) & (self._keys[name] < self.n_keys)
        return np.broadcast_to(possible, (self.n_heads, self.n_rows))

    @cached_property
    def _edges(self) -> dict[str, Array]:
        window = self.thresholds.window
        return {
            "sink": self.column == self.start[self.row],
            "self": self.distance == 0,
            "previous": self.distance == 1,
            "offset": self.distance == self.offset[self.head],
            "local": self.distance < window,
            "banded": self.stripes[self.head, self.column] & (self.distance > 0),
            "induction": self._follows_an_occurrence(),
            "duplicate": (self.ids[self.column] == self.ids[self.row]) & (self.distance > 0),
            "diffuse": np.ones(len(self.weight), dtype=bool),
        }

    @cached_property
    def _keys(self) -> dict[str, Array]:
        one = np.ones(self.n_rows)
        before = self.n_keys - 1
        # heads without an offset (0) have no row for it
        possible_offset = (before >= self.offset[:, None]) & (self.offset[:, None] > 0)
        return {
            "sink": one,
            "self": one,
            "previous": one * (before >= 1),
            "offset": possible_offset.astype(float),
            "local": np.minimum(self.n_keys, self.thresholds.window),
            "banded": self._stripes_before,
            "induction": self.earlier,
            "duplicate": self.earlier,
            "diffuse": one,
        }

    @cached_property
    def ids(self) -> Array:
        """Token ids of all positions."""
        return np.concatenate([np.array(row, dtype=np.int64) for row in self.maps.ids])

    @cached_property
    def earlier(self) -> Array:
        """For each position, how many earlier tokens of its document are the same [P]."""
        order = np.lexsort((np.arange(self.n_rows), self.ids, self.start))
        same = np.zeros(self.n_rows, dtype=bool)
        same[1:] = (self.ids[order][1:] == self.ids[order][:-1]) & (self.start[order][1:] == self.start[order][:-1])
        place = np.arange(self.n_rows)
        rank = place - np.maximum.accumulate(np.where(same, 0, place))
        earlier = np.empty(self.n_rows)
        earlier[order] = rank
        return earlier

    def _follows_an_occurrence(self) -> Array:
        inside = self.column > self.start[self.row]
        return inside & (self.ids[self.column - 1] == self.ids[self.row])

    @cached_property
    def evenness(self) -> Array:
        """How evenly the distances of the local window share its mass [A]."""
        window = self.thresholds.window
        near = (self.distance < window) & (self.n_keys[self.row] > window)
        index = self.head[near].astype(np.int64) * window + self.distance[near]
        mass = np.bincount(index, self.weight[near], minlength=self.n_heads * window).reshape(-1, window)
        share = mass / np.maximum(mass.sum(1, keepdims=True), np.finfo(float).tiny)
        return np.clip((np.minimum(share, 1 / window).sum(1) - 1 / window) / (1 - 1 / window), 0, 1)

    @cached_property
    def offset(self) -> Array:
        """The distance, two or more, of the highest offset score [A]; 0 where none has enough rows behind it."""
        longest = int(self.n_keys.max(initial=1))
        index = self.head.astype(np.int64) * longest + self.distance
        mass = np.bincount(index, self.weight, minlength=self.n_heads * longest).reshape(-1, longest)
        before = (self.n_keys - 1).astype(np.int64)
        rows = np.stack([np.bincount(before, sums, minlength=longest) for sums in self.sums])
        even = np.stack([np.bincount(before, sums, minlength=longest) for sums in self.sums / self.n_keys])
        total, uniform = (np.flip(np.flip(part, 1).cumsum(1), 1) for part in (rows, even))
        with np.errstate(invalid="ignore", divide="ignore"):
            score = (mass - uniform) / (total - uniform)
        enough = (total > 0) & (total >= self.thresholds.offset_support * total[:, :1])
        score = np.where(enough, np.nan_to_num(score), 0.0)
        score[:, :2] = 0
        return np.where(score.max(1, initial=0) > 0, score.argmax(1), 0)

    @cached_property
    def stripes(self) -> Array:
        """Which columns are stripes of a head [A, P]."""
        limits = self.thresholds
        far = (self.distance >= limits.window) & (self.weight > limits.stripe_factor * self.even_of_edge)
        index = self.head[far].astype(np.int64) * self.n_rows + self.column[far]
        hits = np.bincount(index, minlength=self.n_heads * self.n_rows).reshape(self.n_heads, -1)
        alive = np.cumsum(np.pad(self.sums > 0, ((0, 0), (1, 0))), axis=1)
        place = np.arange(self.n_rows)
        end = np.searchsorted(self.start, self.start, side="right")  # where each position's document ends
        later: Array = alive[:, end] - alive[:, np.minimum(place + limits.window, end)]
        often = (later >= limits.stripe_rows) & (hits >= limits.stripe_coverage * later)
        return often & (place != self.start)

    @cached_property
    def _stripes_before(self) -> Array:
        """How many stripes lie before each row, in its document [A, P]."""
        counted = np.cumsum(np.pad(self.stripes, ((0, 0), (1, 0))), axis=1)
        place = np.arange(self.n_rows)
        return (counted[:, place] - counted[:, self.start]).astype(float)
