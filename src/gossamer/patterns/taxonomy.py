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
    empty      1 - mean_i R_i: the share of rows' mass that is not carried. A head that carries nothing scores 1 and has
               no other score (NaN). Where no row counts, because all prompts are of one token, this one is NaN too

Support. A few rows fit many patterns: a single edge is a perfect diagonal. A pattern is a label's part only if the rows
it is judged on are worth `support_rows` rows of equal mass or more, (sum_i R_i)^2 / sum_i R_i^2.

Label. `near-empty` if empty >= `near_empty`; `dead`, in words, if there is no open edge at all. Else the primary
pattern is the one with the highest score, with two rules of precedence: diffuse is what is left when no other pattern
is `strong`; and induction and duplicate are judged on the rows where they are possible, so sink and self, where such
heads rest on the other rows, never outrank them once they are strong, and ties within `tie` go to them too. Second
patterns are measured on the primary's rows only, without the mass the primary explains; if one reaches `second`
(`second_diffuse` for diffuse, since a wash accompanies nearly every dense head) and the primary does too, the head is
`hybrid` and both parts are reported, even if neither is strong alone. A head with one pattern that is not strong is
`other`, and so is one whose rows are too few for any. Nothing asks whether the model is dense or sparse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps, head_name
from gossamer.patterns.plain import load_plain, save_plain
from gossamer.patterns.scores import PATTERNS, TEXT, Thresholds, View, worth

__all__ = ["LABELS", "PATTERNS", "PatternReport", "Thresholds", "classify"]
Array = NDArray[Any]

NEAR_EMPTY, HYBRID, OTHER = "near-empty", "hybrid", "other"
LABELS = (*PATTERNS, HYBRID, NEAR_EMPTY, OTHER)
RESTING = ("sink", "self")


@dataclass(frozen=True, eq=False)
class PatternReport:
    """Scores and labels of all heads of one model on some prompts; arrays are [L, H]."""

    model: str
    labels: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[tuple[str, ...], ...], ...]  # the patterns a label is made of: two for a hybrid
    scores: Mapping[str, Array]
    offset: Array  # the k of the offset score, 0 if there is none
    rows: Array  # how many rows of equal mass the head's carried mass is worth
    open_edges: Array
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
        """The heads with a label, those first that stand out most: by clarity above the best pattern beside it.

        Dead heads come last: there is nothing to see in them.
        """
        found = [(layer, head) for layer, row in enumerate(self.labels) for head, one in enumerate(row) if one == label]
        return sorted(found, key=lambda head: (self.open_edges[head] == 0, -self.margin(*head)))

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
        if not self.open_edges[layer, head]:
            return f"{head_name(layer, head)} dead (no open edge)"
        if label == OTHER and self.rows[layer, head] < self.thresholds.support_rows:
            return f"{head_name(layer, head)} other (too few rows carry anything)"
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
    view = View(maps, thresholds)
    scores = {name: view.score(name) for name in PATTERNS} | {"empty": view.empty()}
    supported = np.stack([view.support(name) >= thresholds.support_rows for name in PATTERNS])
    primary = _primary(scores, supported, thresholds)
    second = np.where(supported, view.second_parts(primary), -1.0)
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
        rows=worth(view.sums).reshape(shape),
        open_edges=maps.open_edges().sum(-1),
        thresholds=thresholds,
        provenance={**maps.provenance, "prompts": maps.n_prompts, "tokens": sum(maps.lengths), "floor": maps.floor},
    )


def _primary(scores: Mapping[str, Array], supported: Array, thresholds: Thresholds) -> Array:
    """Index into PATTERNS of each head's first pattern, -1 where none reaches what a part of a hybrid needs."""
    table = np.stack([np.nan_to_num(scores[name], nan=-1.0) for name in PATTERNS])
    table = np.where(supported, table, -1.0)
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
