"""Constructed attention maps whose pattern is known: what the taxonomy is judged by.

Every head is built from its definition (a sink looks at the first token, an induction head at the token after an
earlier occurrence, ...), then disturbed the way real heads are: weights jitter, a share of each row is a random wash,
gated heads lose light edges and whole rows. This module knows nothing of scores or thresholds, and was written, and
its seeds fixed, before there were any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.maps import AttentionMaps, from_matrices

Array = NDArray[Any]
Generator = np.random.Generator

PURE = ("sink", "self", "previous", "offset", "induction", "duplicate", "diffuse", "banded", "local")
KINDS = (*PURE, "near-empty", "hybrid")
# Pairs that occur in real models and are visibly two patterns.
MIXTURES = (
    ("sink", "self"),
    ("sink", "previous"),
    ("sink", "offset"),
    ("sink", "diffuse"),
    ("self", "diffuse"),
    ("previous", "diffuse"),
    ("offset", "diffuse"),
    ("self", "offset"),
    ("previous", "offset"),
    ("sink", "local"),
)


@dataclass(frozen=True)
class Disturbance:
    """How far a head is from its definition: the share of a row that is wash, jitter of weights, and gating."""

    wash: float = 0.0
    jitter: float = 0.0
    gated: bool = False


@dataclass(frozen=True)
class Truth:
    """What one constructed head is: its kind, the parts of a hybrid, and the distance of an offset."""

    kind: str
    parts: tuple[str, ...]
    offset: int | None
    disturbance: Disturbance


@dataclass(frozen=True)
class ConstructedMaps:
    """Maps of one layer whose head h is `truth[h]`."""

    maps: AttentionMaps
    truth: tuple[Truth, ...]


def repeating_text(length: int, rng: Generator, *, vocabulary: int = 800) -> list[int]:
    """Random tokens with a block that comes back, at distances that differ."""
    ids = rng.integers(1, vocabulary, length)
    ids[0] = 0
    block = rng.integers(1, vocabulary, max(4, length // 6))
    room = length - 1 - 3 * len(block)
    gaps = rng.multinomial(room, [0.2, 0.3, 0.3, 0.2])
    at = 1
    for gap in gaps[:3]:
        at += int(gap)
        ids[at : at + len(block)] = block
        at += len(block)
    return [int(token) for token in ids]


def construct(
    kinds: Sequence[str],
    *,
    lengths: Sequence[int],
    seed: int,
    washes: Sequence[float] = (0.0, 0.1, 0.2),
    gated: bool = False,
) -> ConstructedMaps:
    """One head of every kind named, each on a prompt of every length; disturbances are drawn from `washes`."""
    rng = np.random.default_rng(seed)
    truth = [_draw_truth(kind, min(lengths), washes, gated, rng) for kind in kinds]
    texts = [repeating_text(length, rng) for length in lengths]
    plans = [_draw_plan(head, rng) for head in truth]
    before, after = [], []
    for ids in texts:
        pairs = [_head(head, plan, np.array(ids), rng) for head, plan in zip(truth, plans, strict=True)]
        before.append(np.stack([pair[0] for pair in pairs])[None])
        after.append(np.stack([pair[1] for pair in pairs])[None].astype(np.float32))
    maps = from_matrices(after, softmax=before, ids=texts, model="constructed", gated=gated, provenance={"seed": seed})
    return ConstructedMaps(maps, tuple(truth))


def _draw_truth(kind: str, length: int, washes: Sequence[float], gated: bool, rng: Generator) -> Truth:
    disturbance = Disturbance(float(rng.choice(washes)), float(rng.uniform(0, 0.3)), gated)
    parts: tuple[str, ...] = (kind,)
    if kind == "hybrid":
        parts = MIXTURES[rng.integers(len(MIXTURES))]
    offset = int(rng.integers(3, max(4, length // 3))) if "offset" in parts else None
    return Truth(kind, parts, offset, disturbance)


@dataclass(frozen=True)
class _Plan:
    """What stays the same for a head from prompt to prompt."""

    offset: int
    window: int
    decay: float
    strength: float
    bands: int
    balance: float
    kept_rows: float


def _draw_plan(truth: Truth, rng: Generator) -> _Plan:
    return _Plan(
        offset=truth.offset or 0,
        window=int(rng.integers(5, 10)),
        decay=float(rng.uniform(0.8, 1.0)),
        strength=float(rng.uniform(0.75, 0.98)),
        bands=int(rng.integers(2, 6)),
        balance=float(rng.uniform(0.4, 0.6)),
        kept_rows=float(rng.uniform(0.4, 1.0)),
    )


def _head(truth: Truth, plan: _Plan, ids_T: Array, rng: Generator) -> tuple[Array, Array]:
    """One head on one prompt: the softmax, and the weights after its gate."""
    length = len(ids_T)
    if truth.kind == "near-empty":
        return _near_empty(length, rng)
    parts = [_PATTERNS[part](plan, ids_T, rng) for part in truth.parts]
    shares = [1.0] if len(parts) == 1 else [plan.balance, 1 - plan.balance]
    pattern_QK = np.sum([share * part for share, part in zip(shares, parts, strict=True)], axis=0)
    pattern_QK = _normalised(pattern_QK * rng.lognormal(0, truth.disturbance.jitter, pattern_QK.shape))
    wash = truth.disturbance.wash
    softmax_QK = (1 - wash) * pattern_QK + wash * _wash(length, rng)
    weights_QK = softmax_QK
    if truth.disturbance.gated:
        n_keys_Q1 = np.arange(1, length + 1)[:, None]
        keep_QK = softmax_QK > 0.3 / n_keys_Q1
        weights_QK = softmax_QK * keep_QK * (rng.random((length, 1)) < plan.kept_rows)
    return softmax_QK, weights_QK


def _near_empty(length: int, rng: Generator) -> tuple[Array, Array]:
    softmax_QK = _wash(length, rng)
    weights_QK = np.zeros((length, length))
    for _ in range(rng.integers(0, 3)):
        query = int(rng.integers(1, length))
        weights_QK[query, rng.integers(0, query)] = rng.uniform(0.05, 0.5)
    return softmax_QK, weights_QK


def _normalised(matrix_QK: Array) -> Array:
    """Rows that sum to one; what has no pattern in its row looks at the first token, as real heads do."""
    lower_QK = np.tril(matrix_QK)
    empty_Q = lower_QK.sum(-1) <= 0
    lower_QK[empty_Q, 0] = 1
    return lower_QK / lower_QK.sum(-1, keepdims=True)


def _wash(length: int, rng: Generator) -> Array:
    return _normalised(rng.gamma(3.0, size=(length, length)))


def _at_distance(length: int, distance: int) -> Array:
    return np.eye(length, k=-distance)


def _sink(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    length = len(ids_T)
    column_QK = np.zeros((length, length))
    column_QK[:, 0] = 1
    strength_Q1 = np.clip(rng.normal(plan.strength, 0.05, (length, 1)), 0, 1)
    return strength_Q1 * column_QK + (1 - strength_Q1) * _wash(length, rng)


def _self(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    return _at_distance(len(ids_T), 0)


def _previous(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    return _normalised(_at_distance(len(ids_T), 1))


def _offset(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    return _normalised(_at_distance(len(ids_T), plan.offset))


def _induction(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    earlier_QK = np.tril(ids_T[:, None] == ids_T[None, :], -1).astype(float)
    return _normalised(np.roll(earlier_QK, 1, axis=1))  # the last key of an earlier occurrence is never the last token


def _duplicate(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    return _normalised(np.tril(ids_T[:, None] == ids_T[None, :], -1).astype(float))


def _diffuse(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    return _wash(len(ids_T), rng)


def _banded(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    length = len(ids_T)
    first = rng.integers(2, max(3, length // 6))
    others = rng.choice(np.arange(length // 6 + 1, int(length * 0.7)), plan.bands - 1, replace=False)
    columns_QK = np.zeros((length, length))
    columns_QK[:, [first, *others]] = rng.uniform(0.4, 1.0, plan.bands)
    return plan.strength * _normalised(columns_QK) + (1 - plan.strength) * _wash(length, rng)


def _local(plan: _Plan, ids_T: Array, rng: Generator) -> Array:
    length = len(ids_T)
    steps = [plan.decay**distance * _at_distance(length, distance) for distance in range(plan.window)]
    return _normalised(np.sum(steps, axis=0))


_PATTERNS: dict[str, Callable[[_Plan, Array, Generator], Array]] = {
    "sink": _sink,
    "self": _self,
    "previous": _previous,
    "offset": _offset,
    "induction": _induction,
    "duplicate": _duplicate,
    "diffuse": _diffuse,
    "banded": _banded,
    "local": _local,
}
