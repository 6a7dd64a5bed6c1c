"""Numbers for every head on every prompt, before and after the gate.

Rows with a single allowed key are left out. With R_i the mass a row carries and n_i the keys it may look at:

    entropy_before, first_before     of the softmax: mean row entropy (nats), mean mass on the document's first token
    effective_keys_before            of the softmax: mean of the exponential of the row entropy
    first_excess_before              first_before minus what even attention gives it, the mean of 1 / n_i
    carried                          mean R_i (1 without a gate)
    entropy, effective_keys          of w_i / R_i, and its exponential; means over rows that carry something
    peak                             mean over those rows of the largest weight
    intensity                        mean weight of an open edge
    first, first_excess              mass carried from the first token, and minus the mean of R_i / n_i
    diagonal                         share of carried mass at distance 0 or 1
    wash                             mean over rows of sum_j min(w_ij, 1 / n_i), rescaled so that one key a row is 0 and
                                     even attention is 1; an amount, not a share, so it falls when mass is not carried
    distance                         mean distance of carried mass, in tokens
    open_per_query                   open edges a query

What no row defines (the entropy of a head that carries nothing) is NaN. Mass below the maps' floor counts as spread
evenly over the edges it was summed from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.maps import AttentionMaps
from gossamer.patterns.plain import load_plain, save_plain

Array = NDArray[Any]

MEASURES = (
    "entropy_before",
    "first_before",
    "first_excess_before",
    "effective_keys_before",
    "carried",
    "entropy",
    "effective_keys",
    "peak",
    "intensity",
    "first",
    "first_excess",
    "diagonal",
    "wash",
    "distance",
    "open_per_query",
)


@dataclass(frozen=True, eq=False)
class HeadStatistics:
    """Measures of all heads on N prompts: `values[name]` is [N, L, H], `profile` [L, H, bins] over `distance_bins`."""

    model: str
    values: Mapping[str, Array]
    profile: Array  # share of carried mass at distances from one bin's start to the next's
    distance_bins: tuple[int, ...]
    dead: Array  # [L, H]: no open edge on any prompt
    density: float
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def mean(self, name: str) -> Array:
        """A measure's mean over prompts [L, H]; NaN where no prompt defines it."""
        values = self.values[name]
        known = ~np.isnan(values)
        with np.errstate(invalid="ignore"):
            return np.where(known, values, 0.0).sum(0) / known.sum(0)

    def save(self, path: str | Path) -> Path:
        """Write as JSON."""
        return save_plain(self, path, kind="head statistics")

    @classmethod
    def load(cls, path: str | Path) -> HeadStatistics:
        """Read what `save` wrote."""
        return load_plain(cls, path, kind="head statistics")


def measure(maps: AttentionMaps) -> HeadStatistics:
    """All measures of all heads, prompt by prompt."""
    table = _Table(maps)
    flat = table.measures()
    shape = (maps.n_prompts, maps.n_layers, maps.n_heads)
    bins, profile = table.profile()
    dead = maps.open_edges().sum(-1) == 0
    return HeadStatistics(
        model=maps.model,
        values={name: flat[name].reshape(shape) for name in MEASURES},
        profile=profile.reshape(*shape[1:], -1),
        distance_bins=bins,
        dead=dead,
        density=maps.density(),
        provenance={**maps.provenance, "prompts": maps.n_prompts, "tokens": sum(maps.lengths), "floor": maps.floor},
    )


def diagonal_coverage(maps: AttentionMaps, distances: Array, *, visible: float = 0.1) -> Array:
    """Share of rows [N, A] whose edge at the head's distance weighs at least `visible`: 1 is a solid diagonal."""
    table = _Table(maps)
    on = (table.distance == np.asarray(distances).ravel()[table.head]) & (maps.weight >= visible)
    cells = np.bincount(table.group[on], minlength=table.n_groups).reshape(maps.n_prompts, -1)
    before = maps.n_allowed - 1
    rows = np.stack(
        [
            (before[at][:, None] >= np.asarray(distances).ravel()).sum(0)
            for at in (slice(*maps.first_position[n : n + 2]) for n in range(maps.n_prompts))
        ]
    )
    return cells / np.maximum(rows, 1)


def mass_by_distance(maps: AttentionMaps) -> Array:
    """Carried mass of every head at every distance [A, longest prompt], rows of a single key left out."""
    table = _Table(maps)
    longest = max(maps.lengths)
    index = table.head.astype(np.int64) * longest + table.distance
    found: Array = np.bincount(index, table.weight, minlength=table.n_heads * longest).reshape(-1, longest)
    return found


def excess_by_distance(maps: AttentionMaps) -> Array:
    """The share of a head's carried mass at each distance [A, longest prompt], above what even attention puts there."""
    table = _Table(maps)
    mass = mass_by_distance(maps)
    even = np.where(table.counted, table.sums / table.n_keys, 0.0)
    before = (table.n_keys - 1).astype(np.int64)  # row i reaches distances up to this
    ends = np.stack([np.bincount(before, one, minlength=mass.shape[1]) for one in even])
    reached = np.flip(np.flip(ends, 1).cumsum(1), 1)
    total = table.sums.sum(1, keepdims=True)
    found: Array = np.where(total > 0, mass - reached, 0.0) / np.where(total > 0, total, 1.0)
    return found


class _Table:
    """Maps as flat arrays; `group` numbers (prompt, head), rows are [A, P] over the positions of all prompts."""

    def __init__(self, maps: AttentionMaps) -> None:
        self.maps = maps
        self.n_heads = maps.n_layers * maps.n_heads
        self.n_rows = sum(maps.lengths)
        self.n_groups = maps.n_prompts * self.n_heads
        self.head, self.row = maps.head_of_edge, maps.query_position
        self.group = maps.prompt_of_edge.astype(np.int64) * self.n_heads + self.head
        self.distance = maps.query.astype(np.int64) - maps.key
        self.n_keys = maps.n_allowed.astype(np.float64)
        self.counted = self.n_keys >= 2
        self.weight = np.where(self.counted[self.row], maps.weight.astype(np.float64), 0.0)
        self.cell = self.head.astype(np.int64) * self.n_rows + self.row
        self.below = maps.rows.below.reshape(self.n_heads, -1) * self.counted
        self.n_below = maps.rows.n_below.reshape(self.n_heads, -1) * self.counted
        self.sums = maps.row_sums().reshape(self.n_heads, -1) * self.counted

    def by_row(self, amounts: Array) -> Array:
        """Sums of an amount of each edge over rows [A, P]."""
        found: Array = np.bincount(self.cell, amounts, minlength=self.n_heads * self.n_rows)
        return found.reshape(self.n_heads, -1)

    def over(self, rows: Array, where: Array | None = None) -> Array:
        """Means over each prompt's counted rows [N, A] of an amount [A, P]; NaN where no row is counted."""
        counted = np.broadcast_to(self.counted if where is None else self.counted & where, rows.shape)
        starts = self.maps.first_position[:-1]
        total = np.add.reduceat(np.where(counted, rows, 0.0), starts, axis=1)
        number = np.add.reduceat(counted.astype(np.float64), starts, axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return (total / number).T

    def measures(self) -> dict[str, Array]:
        """Every measure [N, A]."""
        first_before = self.maps.rows.first.reshape(self.n_heads, -1).astype(np.float64)
        even = np.broadcast_to(1 / self.n_keys, first_before.shape)
        at_first = self.maps.key == self.maps.document_start[self.row]
        first = self.by_row(np.where(at_first, self.weight, 0.0))
        alive = self.sums > 0
        entropy = self._entropy(alive)
        peak = np.zeros(self.n_heads * self.n_rows)
        np.maximum.at(peak, self.cell, self.weight)
        open_edges = self.by_row(np.ones(len(self.weight))) * self.counted + self.n_below
        near = self.by_row(np.where(self.distance <= 1, self.weight, 0.0))
        far = self.by_row(self.weight * self.distance)
        carried = self.over(self.sums)
        entropy_before = self.maps.rows.entropy.reshape(self.n_heads, -1).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            return {
                "entropy_before": self.over(entropy_before),
                "effective_keys_before": self.over(np.exp(entropy_before)),
                "first_before": self.over(first_before),
                "first_excess_before": self.over(first_before - even),
                "carried": carried,
                "entropy": self.over(entropy, alive),
                "effective_keys": self.over(np.exp(entropy), alive),
                "peak": self.over(peak.reshape(self.n_heads, -1), alive),
                "intensity": carried / self.over(open_edges),
                "first": self.over(first),
                "first_excess": self.over(first - self.sums * even),
                "diagonal": self.over(near) / carried,
                "wash": self.over(self._wash()),
                "distance": self.over(far) / self.over(self.sums - self.below),
                "open_per_query": self.over(open_edges),
            }

    def _entropy(self, alive: Array) -> Array:
        """Row entropy of carried weights, normalised; the mass below the floor lies evenly on its edges."""
        logs = np.log(np.where(self.weight > 0, self.weight, 1.0))
        total = self.by_row(-self.weight * logs)
        spread = np.where(self.n_below > 0, self.below / np.maximum(self.n_below, 1), 1.0)
        total = total - self.below * np.log(np.where(spread > 0, spread, 1.0))
        sums = np.where(alive, self.sums, 1.0)
        return np.maximum(total / sums + np.log(sums), 0.0) * alive

    def _wash(self) -> Array:
        even = 1 / self.n_keys
        overlap = self.by_row(np.minimum(self.weight, even[self.row])) + np.minimum(self.below, self.n_below * even)
        return np.maximum(overlap - even, 0.0) / np.maximum(1 - even, even)

    def profile(self) -> tuple[tuple[int, ...], Array]:
        """Shares of carried mass by distance: 0, 1, 2-3, 4-7, and so on."""
        longest = max(self.maps.lengths, default=1)
        bins = (0, *(2**power for power in range(max(1, (longest - 1).bit_length()))))
        which = np.searchsorted(bins, self.distance, side="right") - 1
        index = self.head.astype(np.int64) * len(bins) + which
        mass = np.bincount(index, self.weight, minlength=self.n_heads * len(bins)).reshape(self.n_heads, -1)
        with np.errstate(invalid="ignore", divide="ignore"):
            return bins, mass / mass.sum(1, keepdims=True)
