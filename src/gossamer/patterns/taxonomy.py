"""What each head does, by scores from 0 to 1 with written definitions, and a label.

Notation. Row i of a head (a query in some prompt) may look at n_i keys; it carries the weights w_ij, which sum to
R_i. In a dense model R_i = 1; in a gated one R_i is one minus the closed mass, and may be 0. A row that carries
nothing says nothing: every score is a share of CARRIED mass, so rows count by R_i and empty rows not at all. Rows with
n_i = 1 (the first token) are left out everywhere.

A positional pattern is a set P_i of keys for each row. Rows whose P_i is empty or everything are left out of its score:

    share   = sum_i sum_(j in P_i) w_ij / sum_i R_i
    uniform = sum_i R_i |P_i| / n_i     / sum_i R_i       what even attention with the same row sums would give
    score   = max(0, (share - uniform) / (1 - uniform))   so even attention scores 0, nothing but P scores 1

    sink       P_i = the first token of the document
    self       P_i = i                          previous   P_i = i - 1
    offset     P_i = i - k, for the k >= 2 of the highest score; the k is reported. Rows with i >= k must hold
               `offset_support` of the carried mass, or a few late rows would decide
    induction  P_i = tokens that follow an earlier occurrence of token i; on text without repetition (rows with such
               keys hold less than `text_support` of the mass) the score is undefined (NaN), not zero
    duplicate  P_i = earlier occurrences of token i; undefined likewise
    banded     P_i = the head's stripes: keys other than the first token that get more than `stripe_factor` times the
               even share R_i / n_i from at least `stripe_coverage` of the rows that carry anything and lie `window` or
               more after them (at least `stripe_rows` such rows)
    local      P_i = the last `window` keys; the score is multiplied by how evenly the distances d = 0 .. window-1 share
               that mass: (sum_d min(p_d, 1/window) - 1/window) / (1 - 1/window), so one diagonal is not a window

Two more are not sets:

    diffuse    overlap with even attention: D = sum_i sum_j min(w_ij, R_i / n_i) / sum_i R_i, rescaled so that one key a
               row scores 0 and even attention 1. Mass below the maps' floor lies on many keys and counts as spread
    empty      1 - mean_i R_i: the share of rows' mass that is not carried. A head without any open edge scores 1
               and has no other score (NaN)

Label. `near-empty` if empty >= `near_empty`. Else the primary pattern is the one with the highest score, with two rules
of precedence: diffuse is what is left when no other pattern is `strong`; and induction and duplicate are judged on the
rows where they are possible, so sink and self, where such heads rest on the other rows, never outrank them once they
are strong, and ties within `tie` go to them too. Second patterns are measured on the primary's rows only, without the
mass the primary explains; if one reaches `second` (`second_diffuse` for diffuse, since a wash accompanies nearly every
dense head) and the primary does too, the head is `hybrid` and both parts are reported, even if neither is strong alone.
A head with one pattern that is not strong is `other`. Nothing asks whether the model is dense or sparse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps, head_name
from gossamer.patterns.plain import load_plain, save_plain

Array = NDArray[Any]

TEXT = ("induction", "duplicate")
PATTERNS = (*TEXT, "self", "previous", "offset", "sink", "banded", "local", "diffuse")
NEAR_EMPTY, HYBRID, OTHER = "near-empty", "hybrid", "other"
LABELS = (*PATTERNS, HYBRID, NEAR_EMPTY, OTHER)
RESTING = ("sink", "self")


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


@dataclass(frozen=True, eq=False)
class PatternReport:
    """Scores and labels of all heads of one model on some prompts; arrays are [L, H]."""

    model: str
    labels: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[tuple[str, ...], ...], ...]  # the patterns a label is made of: two for a hybrid
    scores: Mapping[str, Array]
    offset: Array  # the k of the offset score, 0 if there is none
    thresholds: Thresholds
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def label(self, layer: int, head: int) -> str:
        """One head's label."""
        return self.labels[layer][head]

    def counts(self) -> dict[str, int]:
        """How many heads have each label, in the order of `LABELS`."""
        flat = [label for row in self.labels for label in row]
        return {label: flat.count(label) for label in LABELS if label in flat}

    def heads_of(self, label: str) -> list[tuple[int, int]]:
        """The heads with a label, those first that stand out most: by clarity above the best pattern beside it."""
        found = [(layer, head) for layer, row in enumerate(self.labels) for head, one in enumerate(row) if one == label]
        return sorted(found, key=lambda head: -self.margin(*head))

    def margin(self, layer: int, head: int) -> float:
        """How far a head's clarity lies above the best of the patterns that are not in its label."""
        parts = self.parts[layer][head]
        if self.labels[layer][head] == NEAR_EMPTY or not parts:
            return self.clarity(layer, head)
        return self.clarity(layer, head) - self._best(layer, head, [name for name in PATTERNS if name not in parts])

    def _best(self, layer: int, head: int, patterns: Sequence[str]) -> float:
        scores = np.array([self.scores[name][layer, head] for name in patterns])
        return float(np.nan_to_num(scores, nan=0.0).max(initial=0.0))

    def clarity(self, layer: int, head: int) -> float:
        """The score behind a head's label: of its weaker part for a hybrid, of the best pattern for `other`."""
        label, parts = self.labels[layer][head], self.parts[layer][head]
        if label == NEAR_EMPTY:
            return float(self.scores["empty"][layer, head])
        if not parts:
            return self._best(layer, head, PATTERNS)
        return float(min(self.scores[part][layer, head] for part in parts))

    def describe(self, layer: int, head: int) -> str:
        """`L5H1 offset 3 (0.91)`."""
        label = self.labels[layer][head]
        shown = [f"{part} {self.offset[layer, head]}" if part == "offset" else part for part in self.parts[layer][head]]
        what = f"hybrid of {' and '.join(shown)}" if label == HYBRID else (shown[0] if label in PATTERNS else label)
        return f"{head_name(layer, head)} {what} ({self.clarity(layer, head):.2f})"

    def save(self, path: str | Path) -> Path:
        """Write as JSON."""
        return save_plain(self, path, kind="pattern report")

    @classmethod
    def load(cls, path: str | Path) -> PatternReport:
        """Read what `save` wrote."""
        return load_plain(cls, path, kind="pattern report")


def classify(maps: AttentionMaps, thresholds: Thresholds | None = None) -> PatternReport:
    """Scores and a label for every head, on all prompts of the maps together."""
    thresholds = thresholds or Thresholds()
    if thresholds.window < 2 or not 0 < thresholds.second <= 1 or not 0 < thresholds.strong <= 1:
        raise GossamerError("Thresholds: strong and second are shares above 0, and the window has at least two keys.")
    view = _View(maps, thresholds)
    scores = {name: view.score(name) for name in PATTERNS} | {"empty": view.empty()}
    primary = _primary(scores, thresholds)
    second = view.second_parts(primary)
    labels, parts = _labels(scores, primary, second, thresholds)
    shape = (maps.n_layers, maps.n_heads)

    def rows(flat: list[Any]) -> tuple[tuple[Any, ...], ...]:
        return tuple(tuple(flat[layer * shape[1] : (layer + 1) * shape[1]]) for layer in range(shape[0]))

    return PatternReport(
        model=maps.model,
        labels=rows(labels),
        parts=rows(parts),
        scores={name: value.reshape(shape) for name, value in scores.items()},
        offset=view.offset.reshape(shape),
        thresholds=thresholds,
        provenance={**maps.provenance, "prompts": maps.n_prompts, "tokens": sum(maps.lengths), "floor": maps.floor},
    )


def _primary(scores: Mapping[str, Array], thresholds: Thresholds) -> Array:
    """Index into PATTERNS of each head's first pattern, -1 where none reaches what a part of a hybrid needs."""
    table = np.stack([np.nan_to_num(scores[name], nan=-1.0) for name in PATTERNS])
    sharp = np.where(np.array(PATTERNS)[:, None] == "diffuse", -1.0, table)
    best = np.where(sharp.max(0) >= thresholds.strong, sharp.argmax(0), table.argmax(0))
    contenders = [index for index, name in enumerate(PATTERNS) if name not in (*TEXT, *RESTING)]
    text = table[: len(TEXT)]
    wins = (text.max(0) >= thresholds.strong) & (text.max(0) >= table[contenders].max(0) - thresholds.tie)
    best = np.where(wins, text.argmax(0), best)
    return np.where(np.take_along_axis(table, best[None], 0)[0] >= thresholds.second, best, -1)


def _labels(
    scores: Mapping[str, Array], primary: Array, second: Array, thresholds: Thresholds
) -> tuple[list[str], list[tuple[str, ...]]]:
    labels: list[str] = []
    parts: list[tuple[str, ...]] = []
    empty: tuple[str, ...] = ()
    needed = np.array([thresholds.second_diffuse if name == "diffuse" else thresholds.second for name in PATTERNS])
    for head, first in enumerate(primary):
        if scores["empty"][head] >= thresholds.near_empty:
            label, found = NEAR_EMPTY, empty
        elif first < 0:
            label, found = OTHER, empty
        else:
            other = int(np.argmax(second[:, head] - needed))
            alone = (PATTERNS[first],) if scores[PATTERNS[first]][head] >= thresholds.strong else empty
            mixed = second[other, head] >= needed[other]
            found = (PATTERNS[first], PATTERNS[other]) if mixed else alone
            label = HYBRID if mixed else (alone or (OTHER,))[0]
        labels.append(label)
        parts.append(found)
    return labels, parts


class _View:
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
        """The share of the rows' mass that is not carried."""
        rows = max(1, int((self.n_keys >= 2).sum()))
        return np.clip(1 - self.sums.sum(1) / rows, 0, 1)

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
