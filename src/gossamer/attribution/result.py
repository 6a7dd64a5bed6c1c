"""What every attention edge contributed to a target: the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from gossamer.attribution.correlation import pearson, spearman
from gossamer.attribution.held import Held
from gossamer.attribution.hops import SHARE, Carriers, Floats, Hop, carriers, hop_into
from gossamer.attribution.targets import Prompt, Target
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps, from_matrices

Method = Literal["gradient", "integrated"]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class EdgeAgreement:
    """How well contributions agree with exact ablation of the same edges."""

    pearson: float
    spearman: float
    same_sign: float  # share of the gross ablation effect on edges whose contribution has its sign
    edges: int


@dataclass(frozen=True, eq=False)
class Ablation:
    """What the target loses when each edge alone carries nothing, everything that is not `held` computed anew."""

    held: Held
    lost_E: Floats


@dataclass(frozen=True, eq=False)
class TokenAttribution(Stored):
    """Every open edge (layer, head, query, key) of a prompt: its weight, and what it contributed to the target.

    `lost_K` is what the target loses when all heads' edges from a key to the last position are shut at once, exactly.
    """

    FORMAT: ClassVar[str] = "gossamer token attribution"

    model: str
    gated: bool
    n_layers: int
    n_heads: int
    prompt: Prompt
    target: Target
    value: float
    probability: float
    method: Method
    held: Held
    layer_E: Ints
    head_E: Ints
    query_E: Ints
    key_E: Ints
    weight_E: Floats
    contribution_E: Floats
    lost_K: Floats
    ablation: Ablation | None = None
    provenance: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.layer_E)

    def heads_LH(self, hop: Hop | None = None) -> Floats:
        """What each head contributed: on one hop, or over all of them."""
        chosen = slice(None) if hop is None else (self.query_E == self._inside(hop).query) & (self.key_E == hop.key)
        contribution_LH = np.zeros((self.n_layers, self.n_heads))
        np.add.at(contribution_LH, (self.layer_E[chosen], self.head_E[chosen]), self.contribution_E[chosen])
        return contribution_LH

    @cached_property
    def total_QK(self) -> Floats:
        """The total of each hop, queries down."""
        total_QK = np.zeros((len(self.prompt), len(self.prompt)))
        np.add.at(total_QK, (self.query_E, self.key_E), self.contribution_E)
        return total_QK

    @property
    def answer_hop(self) -> Hop:
        """The hop into the answer's position, from another one, without which the answer loses most."""
        return hop_into(self.lost_K, len(self.prompt) - 1, n_begin=self.prompt.n_begin)

    def carriers(self, hop: Hop | None = None, share: float = SHARE) -> Carriers:
        """The fewest heads that carry a share of a hop, by default the answer's."""
        return carriers(self.heads_LH(hop or self.answer_hop), share)

    def hops(self, query: int | None = None) -> list[tuple[Hop, Carriers]]:
        """The hops that carry anything (into one position), at home included, largest total first."""
        pairs = zip(*np.nonzero(self.total_QK), strict=True)
        found = [Hop(int(key), int(row)) for row, key in pairs if query is None or row == query]
        found.sort(key=lambda hop: -self.total_QK[hop.query, hop.key])
        return [(hop, self.carriers(hop)) for hop in found]

    def maps(self) -> AttentionMaps:
        """The weights as attention maps, for pictures."""
        n_tokens = len(self.prompt)
        weight_LHQK = np.zeros((self.n_layers, self.n_heads, n_tokens, n_tokens), dtype=np.float32)
        weight_LHQK[self.layer_E, self.head_E, self.query_E, self.key_E] = self.weight_E
        return from_matrices(
            [weight_LHQK],
            ids=[self.prompt.ids],
            tokens=[self.prompt.tokens],
            model=self.model,
            gated=self.gated,
            provenance=self.provenance,
        )

    def agreement(self) -> EdgeAgreement:
        """How well the contributions agree with exact ablation."""
        if self.ablation is None:
            raise GossamerError("These contributions were not checked; attribute with an exact ablation.")
        lost_E = self.ablation.lost_E
        same = np.sign(lost_E) == np.sign(self.contribution_E)
        gross = np.abs(lost_E).sum()
        return EdgeAgreement(
            pearson(self.contribution_E, lost_E),
            spearman(self.contribution_E, lost_E),
            float(np.abs(lost_E[same]).sum() / gross) if gross else float("nan"),
            len(lost_E),
        )

    def _inside(self, hop: Hop) -> Hop:
        if not 0 <= hop.key <= hop.query < len(self.prompt):
            raise GossamerError(
                f"There is no hop {hop} in a prompt of {len(self.prompt)} tokens: positions count from 0, and the key"
                " is not after the query."
            )
        return hop
