"""The nodes of an attribution graph: one order everywhere, features, errors, tokens, the bias, logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gossamer.circuits.effect import Bools, Floats, Ints

KINDS = ("feature", "error", "token", "bias", "logit")
FEATURE, ERROR, TOKEN, BIAS, LOGIT = range(len(KINDS))


@dataclass(frozen=True)
class Nodes:
    """Kind, layer, position and number of each node; -1 where a node has none.

    Tokens are at layer -1 and logits at layer `n_layers`; their number is the token's id. A feature's value is its
    activation, a logit's value the logit.
    """

    kind_N: Ints
    layer_N: Ints
    position_N: Ints
    number_N: Ints
    value_N: Floats

    def __len__(self) -> int:
        return len(self.kind_N)

    @cached_property
    def n_of_kind(self) -> tuple[int, ...]:
        """How many of each kind, in the order of KINDS."""
        return tuple(int(count) for count in np.bincount(self.kind_N, minlength=len(KINDS)))

    @property
    def n_features(self) -> int:
        """How many features; they come first."""
        return self.n_of_kind[FEATURE]

    @property
    def n_sources(self) -> int:
        """Everything but the logits."""
        return len(self) - self.n_of_kind[LOGIT]

    @cached_property
    def target_nodes_T(self) -> Ints:
        """The nodes that have inputs: features, then logits."""
        features, logits = np.arange(self.n_features), np.arange(self.n_sources, len(self))
        return np.concatenate([features, logits]).astype(np.int64)

    def is_kind(self, kind: int) -> Bools:
        """Which nodes are of a kind."""
        return np.asarray(self.kind_N == kind)

    def kept(self, keep_N: Bools) -> Nodes:
        """Some of the nodes."""
        return Nodes(
            self.kind_N[keep_N],
            self.layer_N[keep_N],
            self.position_N[keep_N],
            self.number_N[keep_N],
            self.value_N[keep_N],
        )

    def identities(self) -> list[tuple[int, int, int, int]]:
        """What makes a node the same node in another graph of the same prompt: kind, layer, position, number."""
        parts = (self.kind_N, self.layer_N, self.position_N, self.number_N)
        return list(zip(*(part.tolist() for part in parts), strict=True))

    def name(self, node: int, tokens: Sequence[str] = ()) -> str:
        """For example `feature 3/120 at 5`, `error 3 at 5`, `token at 5`, `bias`, `logit 17`; with any tokens given."""
        parts = (self.kind_N, self.layer_N, self.position_N, self.number_N)
        kind, layer, position, number = (int(part[node]) for part in parts)
        place = f"{position} {tokens[position]!r}" if tokens else str(position)
        return {
            FEATURE: f"feature {layer}/{number} at {place}",
            ERROR: f"error {layer} at {place}",
            TOKEN: f"token at {place}",
            BIAS: "bias",
            LOGIT: f"logit {number}",
        }[kind]
