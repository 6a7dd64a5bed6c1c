"""Hops: what the heads carry from one position to another, how few of them carry most of it, and which hop matters.

    hop                  all heads' edges from one key position to one query position; where they are the same, the
                         heads read the position they write to and carry nothing between positions ("at home")
    total                the sum over heads of an edge's contribution
    gross                the sum of their sizes: what there is to cover
    heads for a share    the smallest k whose k largest |contributions| sum to at least that share of the gross
    signed share         the part of the total that those k heads sum to; above 1 where the others work against it
    the answer's hop     of the hops INTO the answer's position from another one, the one without which the answer loses
                         most: all heads' edges over it are shut at once and the model is run. (Gradients would be
                         cheaper, and point to the wrong hop where an MLP behind it is saturated.) It is the last step
                         of whatever the answer was made from, not the whole way. A begin token is passed over as long
                         as anything else is read: it sees nothing of the prompt, so it cannot tell the answer, however
                         much it adds to every answer alike

No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError

Floats = NDArray[np.float64]
Head = tuple[int, int]
SHARE = 0.8


@dataclass(frozen=True)
class HeadShare:
    """One head and what it contributes to a hop."""

    layer: int
    head: int
    contribution: float

    @property
    def name(self) -> str:
        """`L5H1`."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class Carriers:
    """The fewest heads that carry a share of a hop, largest first."""

    heads: tuple[HeadShare, ...]
    share: float
    signed_share: float
    total: float
    gross: float
    available: int  # heads with any contribution

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def places(self) -> list[Head]:
        """The heads as (layer, head)."""
        return [(one.layer, one.head) for one in self.heads]


@dataclass(frozen=True)
class Hop:
    """A step from a key position to a query position."""

    key: int
    query: int

    @property
    def at_home(self) -> bool:
        """Whether it leads from a position to itself."""
        return self.key == self.query

    def __str__(self) -> str:
        return f"{self.key} → {self.query}"


def ranked_heads(contribution_LH: Floats) -> list[HeadShare]:
    """Every head that contributes, by size; ties by (layer, head)."""
    layer_C, head_C = np.nonzero(contribution_LH)
    order_C = np.argsort(-np.abs(contribution_LH[layer_C, head_C]), kind="stable")
    places = ((int(layer_C[place]), int(head_C[place])) for place in order_C)
    return [HeadShare(layer, head, float(contribution_LH[layer, head])) for layer, head in places]


def carriers(contribution_LH: Floats, share: float = SHARE) -> Carriers:
    """The smallest set of heads whose sizes sum to `share` of all sizes; none where nothing is carried."""
    if not 0 < share <= 1:
        raise GossamerError(f"The share to cover is between 0 and 1, for example {SHARE}, not {share:g}.")
    ranked = ranked_heads(contribution_LH)
    sizes = np.array([abs(one.contribution) for one in ranked])
    gross, total = float(sizes.sum()), float(contribution_LH.sum())
    # a sum of sizes is known to rounding only: "at least" must not ask for one head more because of it
    needed = int(np.searchsorted(np.cumsum(sizes), share * gross * (1 - 1e-12))) + 1 if ranked else 0
    chosen = tuple(ranked[:needed])
    signed = sum(one.contribution for one in chosen)
    return Carriers(chosen, share, signed / total if total else float("nan"), total, gross, len(ranked))


def hop_into(worth_K: Floats, query: int, *, n_begin: int = 0) -> Hop:
    """The hop into `query` from another position that is worth most; begin tokens count where there is nothing else.

    A hop that is worth exactly nothing carries nothing, and is never the one.
    """
    for first in (n_begin, 0):
        others = worth_K[first:query]
        if np.any(others):
            return Hop(first + int(np.argmax(np.where(others == 0, -np.inf, others))), query)
    raise GossamerError(f"No head carries anything into position {query} from another one; there is no hop to look at.")
