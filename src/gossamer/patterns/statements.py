"""Four statements about a dense and a sparse model, answered with numbers: yes, no, or cannot tell.

Each statement is about heads that have a pattern in either model, so that one that moves to another head is not taken
for gone. It compares an amount over these heads, sparse to dense: the share of it that is left, with its interval. The
answer is yes if the whole interval lies on one side of the limit, no if it lies on the other, and cannot tell if the
limit is inside, if no head has the pattern, or if there are fewer than `prompts` prompts. How many heads keep, lose and
gain the pattern stands beside. A head has a pattern if that makes up at least `present` of what it carries, and it
carries at least `alive` of its rows' mass.

    sink gone         carried first-token excess: less than `gone` of it is left
    wash removed      the overlap with even attention: less than `gone` of it is left
    diagonals dotted  the mass at one distance, above what even attention puts there. Of the rows with a visible edge at
                      that distance less than `solid` are left, over heads of the dense model that keep at least `dots`
                      of theirs; heads that keep less have lost their diagonal, and count apart
    heads dead        heads without an open edge on any prompt: more than in the dense model

Sink and wash are amounts, which fall when less is carried of everything. So a yes asks for more: what share they are of
what is carried must have fallen, below `share` of what it was; if it has not, the answer is cannot tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.maps import AttentionMaps, head_name
from gossamer.patterns.resampling import bootstrap_means, interval_over_prompts, known_mean
from gossamer.patterns.statistics import HeadStatistics, diagonal_coverage, excess_by_distance

Array = NDArray[Any]
YES, NO, CANNOT_TELL = "yes", "no", "cannot tell"


@dataclass(frozen=True)
class Limits:
    """Where the statements draw their lines."""

    present: float = 0.3
    alive: float = 0.05
    gone: float = 0.25
    share: float = 0.5
    solid: float = 0.9
    dots: float = 0.1
    prompts: int = 5


@dataclass(frozen=True)
class Statement:
    """A statement about the pair, its answer, and the numbers behind it; `n_heads` are those that it is judged on."""

    statement: str
    answer: str
    n_heads: int
    kept: int  # heads with the pattern in both models, in the dense one alone, in the sparse one alone
    lost: int
    gained: int
    dense: float
    sparse: float
    left: float
    low: float
    high: float
    why: str

    def __str__(self) -> str:
        return f"{self.statement}: {self.answer}. {self.why}"


def answer(
    maps: Sequence[AttentionMaps], statistics: Sequence[HeadStatistics], counts_RN: Array, limits: Limits
) -> tuple[Statement, ...]:
    """The four statements about a dense and a sparse model, on the same resamples of prompts."""
    found = _Answers(maps[0], maps[1], statistics[0], statistics[1], counts_RN, limits)
    return found.sink(), found.diagonals(), found.wash(), found.dead()


@dataclass(frozen=True)
class _Left:
    """A ratio of sparse to dense and its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if np.isnan(self.low):
            return f"{self.value:.1%}"
        return f"{self.value:.1%} ({self.low:.1%} to {self.high:.1%})"


def _quotient(sparse: Array, of_dense: Array, dense: Array, of_sparse: Array) -> Array:
    """Sparse to dense, each as its share of something; a share of nothing is nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = np.where(of_sparse > 0, sparse * of_dense / (dense * of_sparse), 0.0)
    return found


@dataclass
class _Answers:
    dense_maps: AttentionMaps
    sparse_maps: AttentionMaps
    dense: HeadStatistics
    sparse: HeadStatistics
    counts_RN: Array
    limits: Limits

    @property
    def both(self) -> tuple[HeadStatistics, HeadStatistics]:
        """The statistics of both models."""
        return self.dense, self.sparse

    def sink(self) -> Statement:
        """Whether the first token's column has vanished."""
        found = self._amount("the sink is gone", "a first-token column", "first_excess", "first-token mass above even")
        heads = self._has("first_excess", self.dense) | self._has("first_excess", self.sparse)
        if not heads.any():
            return found
        before = self.sparse.mean("first_excess_before")[heads].mean()
        return replace(found, why=f"{found.why}. In the softmax of the sparse model, before its gate: {before:.3f}")

    def wash(self) -> Statement:
        """Whether the light spread over many keys has gone."""
        return self._amount("the wash is removed", "a wash", "wash", "overlap with even")

    def _left(
        self, dense: Array, sparse: Array, of_dense: Array | None = None, of_sparse: Array | None = None
    ) -> _Left:
        """What is left of an amount [N], sparse to dense: of the amount itself, or of its share in others [N]."""
        every = np.stack(
            [np.ones_like(dense) if part is None else part for part in (sparse, of_dense, dense, of_sparse)]
        )
        samples = np.stack([bootstrap_means(part[:, None], self.counts_RN)[:, 0] for part in every])
        low, high = interval_over_prompts(_quotient(*samples)[:, None], self.counts_RN)
        return _Left(float(_quotient(*known_mean(every, axis=1)[:, None])[0]), float(low[0]), float(high[0]))

    def _has(self, measure: str, statistics: HeadStatistics) -> Array:
        """Heads [L, H] of which an amount is a good part of what they carry."""
        carried, amount = statistics.mean("carried"), statistics.mean(measure)
        return np.asarray((carried >= self.limits.alive) & (amount >= self.limits.present * carried))

    def _amount(self, statement: str, pattern: str, measure: str, words: str) -> Statement:
        has = [self._has(measure, statistics) for statistics in self.both]
        heads = has[0] | has[1]
        if not heads.any():
            return self._without(statement, pattern)
        amounts, carried = (
            [known_mean(statistics.values[name][:, heads], axis=1) for statistics in self.both]
            for name in (measure, "carried")
        )
        if not has[0].any():
            why = [f"{_heads(heads.sum())} gained {pattern}, and none had one: {words} attention {_from_to(amounts)}"]
            return self._statement(statement, NO if self._enough() else CANNOT_TELL, heads, has, amounts, None, why)
        left, share_left = self._left(*amounts), self._left(*amounts, *carried)
        answer = self._answer(left, self.limits.gone)
        reasons = [f"Over {_heads(heads.sum())}, carried {words} attention {_from_to(amounts)}: {left} of it is left"]
        shares = " → ".join(f"{_share(*pair):.0%}" for pair in zip(amounts, carried, strict=True))
        reasons.append(f"It is {shares} of what they carry")
        if answer == YES and not share_left.high < self.limits.share:
            answer = CANNOT_TELL
            reasons[-1] += f", so it went along with the rest; of the share {share_left} is left"
        return self._statement(statement, answer, heads, has, amounts, left, [*reasons, _moves(pattern, *has)])

    def diagonals(self) -> Statement:
        """Whether solid diagonals have become dots, where any of them is left."""
        statement, pattern = "the diagonals are dotted", "a diagonal"
        excess = [excess_by_distance(maps) for maps in (self.dense_maps, self.sparse_maps)]
        alive = [statistics.mean("carried").ravel() >= self.limits.alive for statistics in self.both]
        has = [one.max(1) >= self.limits.present for one in excess]
        has = [one & carries for one, carries in zip(has, alive, strict=True)]
        if not (has[0] | has[1]).any():
            return self._without(statement, pattern)
        distances = excess[0].argmax(1)
        coverage = [diagonal_coverage(maps, distances) for maps in (self.dense_maps, self.sparse_maps)]
        dense, sparse = (known_mean(one) for one in coverage)
        kept = has[0] & (sparse > 0) & (sparse >= self.limits.dots * dense)
        moves = _moves(pattern, has[0], kept | (has[1] & ~has[0]))
        if not kept.any():
            answer = NO if has[0].any() and self._enough() else CANNOT_TELL
            why = [f"No head keeps {self.limits.dots:.0%} of the rows with a visible edge on its diagonal", moves]
            amounts = [known_mean(one[:, has[0]], axis=1) for one in coverage]
            return self._statement(statement, answer, has[0], [has[0], has[1] & ~has[0]], amounts, None, why)
        amounts = [known_mean(one[:, kept], axis=1) for one in coverage]
        left = self._left(*amounts)
        solid = int((sparse >= self.limits.solid * dense)[kept].sum())
        why = [
            f"Over {_heads(kept.sum())} with some of their diagonal left, rows with a visible edge on it"
            f" {known_mean(amounts[0]):.1%} → {known_mean(amounts[1]):.1%}: {left} of them are left",
            f"{moves}; of those kept {kept.sum() - solid} are dotted, {solid} as solid as before",
        ]
        has = [has[0], kept | (has[1] & ~has[0])]
        return self._statement(statement, self._answer(left, self.limits.solid), kept, has, amounts, left, why)

    def dead(self) -> Statement:
        """Whether some heads carry nothing at all."""
        dense, sparse = self.dense.dead, self.sparse.dead
        n_dense, n_sparse = int(dense.sum()), int(sparse.sum())
        answer = (YES if n_sparse > n_dense else NO) if self._enough() else CANNOT_TELL
        names = [head_name(*head) for head in np.argwhere(sparse)[:6].tolist()]
        where = f"any of {self._prompts()}" if self.dense_maps.n_prompts > 1 else "the one prompt"
        which = f" ({', '.join(names)}{', …' if n_sparse > len(names) else ''})" if names else ""
        why = [f"{n_dense} → {n_sparse} of {_heads(dense.size)} have no open edge on {where}{which}"]
        amounts = [np.array([float(n_dense)]), np.array([float(n_sparse)])]
        left = _Left(n_sparse / dense.size, np.nan, np.nan)
        return self._statement("heads have died", answer, sparse, [dense, sparse], amounts, left, why)

    def _enough(self) -> bool:
        return self.dense_maps.n_prompts >= max(2, self.limits.prompts)

    def _prompts(self) -> str:
        n = self.dense_maps.n_prompts
        return "one prompt" if n == 1 else f"{n} prompts"

    def _answer(self, left: _Left, limit: float) -> str:
        if not self._enough():
            return CANNOT_TELL
        return YES if left.high < limit else (NO if left.low > limit else CANNOT_TELL)

    def _without(self, statement: str, pattern: str) -> Statement:
        """No head of either model has the pattern."""
        nothing = np.zeros(self.dense.dead.shape, dtype=bool)
        amounts = [np.array([np.nan])] * 2
        why = [f"No head of {self.dense.model} or {self.sparse.model} has {pattern} (at least {self.limits.present:g})"]
        return self._statement(statement, CANNOT_TELL, nothing, [nothing] * 2, amounts, None, why)

    def _statement(
        self,
        statement: str,
        answer: str,
        heads: Array,
        has: Sequence[Array],
        amounts: Sequence[Array],
        left: _Left | None,
        why: Sequence[str],
    ) -> Statement:
        left = left or _Left(np.nan, np.nan, np.nan)
        few = [] if self._enough() else [f"That is on {self._prompts()}, too few to tell"]
        return Statement(
            statement=statement,
            answer=answer,
            n_heads=int(heads.sum()),
            kept=int((has[0] & has[1]).sum()),
            lost=int((has[0] & ~has[1]).sum()),
            gained=int((has[1] & ~has[0]).sum()),
            dense=float(known_mean(amounts[0])),
            sparse=float(known_mean(amounts[1])),
            left=left.value,
            low=left.low,
            high=left.high,
            why=". ".join([*why, *few]),
        )


def _heads(n: int) -> str:
    return "1 head" if n == 1 else f"{n} heads"


def _from_to(amounts: Sequence[Array]) -> str:
    return " → ".join(f"{known_mean(amount):.3f}" for amount in amounts)


def _share(amount: Array, whole: Array) -> float:
    total = float(known_mean(whole))
    return float(known_mean(amount)) / total if total else 0.0


def _moves(pattern: str, dense: Array, sparse: Array) -> str:
    """How many heads keep, lose and gain a pattern."""
    kept, lost, gained = (int(part.sum()) for part in (dense & sparse, dense & ~sparse, sparse & ~dense))
    return f"Of {_heads(kept + lost)} with {pattern} {kept} kept it, {lost} lost it; {gained} gained one"
