"""The attribution graph: which token, over which features, gave the model its logits, as exact linear effects.

    effect_TS   what each source gives each target along paths through no other feature (targets: features, logits)
    sum over s of effect_ts = value_t, for every target: a feature's pre-activation, a logit less the mean of all logits

Sources are features, an error for each layer and position, each token's vector (without its position), and one bias
for all else: encoder, decoder, norm, output, position and value biases, the latter times the row mass a head carries.
Logits are taken in front of a soft-cap and less their mean over the vocabulary, which no probability depends on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from gossamer.attribution import influence
from gossamer.attribution.influence import Scores
from gossamer.attribution.nodes import BIAS, ERROR, FEATURE, LOGIT, TOKEN, Nodes
from gossamer.circuits.effect import Floats, Ints
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class Pruning:
    """What was asked to be kept: the part of the influence that the nodes, then the edges, had to hold."""

    node_part: float
    edge_part: float


@dataclass(frozen=True)
class AttributionGraph(Stored):
    """The graph of one prompt; influence and scores are those of the graph before any pruning.

    `cumulative_N` is the share of all sources' influence held by the sources down to this one, largest first.
    """

    FORMAT: ClassVar[str] = "attribution graph"

    prompt: str
    tokens_Q: tuple[str, ...]
    ids_Q: Ints
    nodes: Nodes
    effect_TS: Floats
    value_T: Floats
    logit_tokens_K: tuple[str, ...]
    probability_K: Floats
    influence_N: Floats
    cumulative_N: Floats
    scores: Scores
    n_layers: int
    n_features_per_layer: int
    n_active_features: int
    transcoder_kind: str
    pruning: Pruning | None
    provenance: dict[str, Any]

    @property
    def n_targets(self) -> int:
        """Features and logits."""
        return len(self.value_T)

    @cached_property
    def remainder_T(self) -> Floats:
        """What the kept sources leave of each target's value: nothing but rounding before pruning."""
        return np.asarray(self.value_T - self.effect_TS.sum(1))

    @property
    def n_edges(self) -> int:
        """Effects that are not zero, those of the bias left out."""
        bias = int(np.flatnonzero(self.nodes.is_kind(BIAS))[0])
        return int(np.count_nonzero(np.delete(self.effect_TS, bias, axis=1)))

    def pruned(self, *, node_part: float = 0.8, edge_part: float = 0.98) -> AttributionGraph:
        """The fewest nodes, then edges, that hold these parts of the influence; tokens, logits and bias stay."""
        keep_N, effect_TS = influence.pruned(
            self.nodes, self.effect_TS, self.probability_K, node_part=node_part, edge_part=edge_part
        )
        keep_T, keep_S = keep_N[self.nodes.target_nodes_T], keep_N[: self.nodes.n_sources]
        return replace(
            self,
            nodes=self.nodes.kept(keep_N),
            effect_TS=effect_TS[keep_T][:, keep_S],
            value_T=self.value_T[keep_T],
            influence_N=self.influence_N[keep_N],
            cumulative_N=self.cumulative_N[keep_N],
            pruning=Pruning(node_part, edge_part),
        )

    def logit_row(self, token: int) -> int:
        """The row of a token's logit."""
        rows = np.flatnonzero(self.nodes.is_kind(LOGIT) & (self.nodes.number_N == token))
        if not len(rows):
            raise GossamerError(f"Token {token} is no target of this graph; name it in `targets` when it is made.")
        return int(rows[0]) - self.nodes.n_sources + self.nodes.n_features

    def total_effects(self, held_NX: Floats) -> Floats:
        """Changes [T,X] of the targets' values when source nodes change by these parts of themselves, for X cases.

        A source of part -1 is taken away. Sources that are not NaN in `held_NX` [S,X] are held at that part (of their
        value in the run), the others follow their inputs with activations on and off as they are in the run.
        """
        n_features = self.nodes.n_features
        part_SX = np.where(np.isnan(held_NX), 0.0, held_NX)
        free_FX = np.isnan(held_NX[:n_features])
        change_TX = np.zeros((self.n_targets, held_NX.shape[1]))
        for layer in range(self.n_layers + 1):  # effects run from earlier to later layers only
            rows = np.flatnonzero(self.nodes.layer_N[self.nodes.target_nodes_T] == layer)
            change_TX[rows] = self.effect_TS[rows] @ part_SX
            features = rows[rows < n_features]
            activation_F1 = self.nodes.value_N[features, None]
            part_SX[features] = np.where(free_FX[features], change_TX[features] / activation_F1, part_SX[features])
        return change_TX


__all__ = ["BIAS", "ERROR", "FEATURE", "LOGIT", "TOKEN", "AttributionGraph", "Nodes", "Pruning", "Scores"]
