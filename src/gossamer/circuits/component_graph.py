"""The component graph: what the nodes and edges of a circuit are, for every family by one rule.

Sources write to the residual stream, receivers read from it; an edge is one source's share of one receiver's input.

    sources    the embedding, then layer by layer every head and the MLP
    receivers  layer by layer every head's query input, every KEY head's key and value input, the MLP; last the logits

- A receiver's input is the residual stream in FRONT of its norm (where the family has one).
- Grouped key heads: the heads of a group share one key and one value, so these inputs belong to the key head.
- Sequential blocks: the MLP also reads what the heads of its own layer wrote. Parallel blocks (NeoX): it does not.
- Post-norms (OLMo-2, OLMo-3, Gemma 2 and 3): a head's share is its part of the attention output times the post-norm's
  scale in that run, so that the shares of a layer's heads sum to what the layer wrote.
- Biases of output projections are split evenly over the heads of their layer.
- Norms of queries and keys run on the assembled queries and keys of all heads, as in the model itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gossamer.circuits.effect import Bools, Ints

EMBEDDING, LOGITS = "input", "logits"
KINDS = ("q", "k", "v")


@dataclass(frozen=True)
class Node:
    """A source or a receiver; `layer` is -1 for the embedding and the number of layers for the logits."""

    name: str
    layer: int
    kind: str
    head: int = 0


@dataclass(frozen=True)
class ComponentGraph:
    """Sources, receivers and edges of a model of this shape; [S, R] arrays run over sources and receivers."""

    n_layers: int
    n_heads: int
    n_key_heads: int
    parallel: bool

    @cached_property
    def sources(self) -> tuple[Node, ...]:
        """The embedding, then heads and MLP of each layer."""
        found = [Node(EMBEDDING, -1, "embedding")]
        for layer in range(self.n_layers):
            found += [Node(f"a{layer}.h{head}", layer, "head", head) for head in range(self.n_heads)]
            found.append(Node(f"m{layer}", layer, "mlp"))
        return tuple(found)

    @cached_property
    def receivers(self) -> tuple[Node, ...]:
        """Query inputs, key inputs, value inputs and MLP of each layer, then the logits."""
        found = []
        key_head = "h" if self.n_key_heads == self.n_heads else "g"
        for layer in range(self.n_layers):
            found += [Node(f"a{layer}.h{head}<q>", layer, "q", head) for head in range(self.n_heads)]
            for kind in ("k", "v"):
                names = [f"a{layer}.{key_head}{head}<{kind}>" for head in range(self.n_key_heads)]
                found += [Node(name, layer, kind, head) for head, name in enumerate(names)]
            found.append(Node(f"m{layer}", layer, "mlp"))
        return (*found, Node(LOGITS, self.n_layers, "logits"))

    @property
    def receivers_per_layer(self) -> int:
        """Query, key and value inputs and the MLP."""
        return self.n_heads + 2 * self.n_key_heads + 1

    def attention_receivers(self, layer: int) -> slice:
        """The query, key and value inputs of a layer."""
        start = layer * self.receivers_per_layer
        return slice(start, start + self.receivers_per_layer - 1)

    def mlp_receiver(self, layer: int) -> int:
        """The MLP's input."""
        return (layer + 1) * self.receivers_per_layer - 1

    @property
    def logits_receiver(self) -> int:
        """The final norm's input."""
        return self.n_layers * self.receivers_per_layer

    def head_sources(self, layer: int) -> slice:
        """What the heads of a layer write."""
        start = 1 + layer * (self.n_heads + 1)
        return slice(start, start + self.n_heads)

    def mlp_source(self, layer: int) -> int:
        """What the MLP writes."""
        return (layer + 1) * (self.n_heads + 1)

    def n_sources_of(self, receiver: int) -> int:
        """How many sources, counted from the first, a receiver can read."""
        node = self.receivers[receiver]
        if node.kind == "logits":
            return len(self.sources)
        before = 1 + node.layer * (self.n_heads + 1)
        return before + self.n_heads if node.kind == "mlp" and not self.parallel else before

    @cached_property
    def is_edge_SR(self) -> Bools:
        """Which pairs are edges."""
        limits_R = np.array([self.n_sources_of(receiver) for receiver in range(len(self.receivers))])
        return np.arange(len(self.sources))[:, None] < limits_R

    @cached_property
    def edges_E2(self) -> Ints:
        """All edges as (source, receiver), in the order in which ties are broken: receiver, then source."""
        receivers_E, sources_E = np.nonzero(self.is_edge_SR.T)
        return np.stack([sources_E, receivers_E], axis=1).astype(np.int64)

    @property
    def n_edges(self) -> int:
        """How many edges there are."""
        return len(self.edges_E2)

    @cached_property
    def touches_attention_E(self) -> Bools:
        """Which edges begin or end at a head; the others join embedding, MLPs and logits and no gate acts on them."""
        source_is_head_S = np.array([node.kind == "head" for node in self.sources])
        receiver_is_head_R = np.array([node.kind in KINDS for node in self.receivers])
        return source_is_head_S[self.edges_E2[:, 0]] | receiver_is_head_R[self.edges_E2[:, 1]]

    def edge_name(self, edge: int) -> str:
        """For example `a0.h1->m2` or `m0->a3.h2<q>`."""
        source, receiver = self.edges_E2[edge]
        return f"{self.sources[source].name}->{self.receivers[receiver].name}"

    def mask(self, edges: Iterable[int]) -> Bools:
        """The circuit [S, R] that keeps these edges."""
        kept_SR = np.zeros(self.is_edge_SR.shape, dtype=np.bool_)
        chosen_N2 = self.edges_E2[np.asarray(list(edges), dtype=np.int64)]
        kept_SR[chosen_N2[:, 0], chosen_N2[:, 1]] = True
        return kept_SR

    def on_paths(self, kept_SR: Bools) -> Bools:
        """The kept edges that lie on a path from the embedding to the logits; the others change nothing at all."""
        receivers_of_source = self._receivers_of_source
        reached_S = np.zeros(len(self.sources), dtype=np.bool_)
        reached_S[0] = True
        for source in range(1, len(self.sources)):  # sources are in the order of computation
            reached_S[source] = bool((kept_SR[:, receivers_of_source[source]] & reached_S[:, None]).any())
        useful_R = np.zeros(len(self.receivers), dtype=np.bool_)
        useful_R[self.logits_receiver] = True
        for source in range(len(self.sources) - 1, 0, -1):
            if bool((kept_SR[source] & useful_R).any()):
                useful_R[receivers_of_source[source]] = True
        return kept_SR & reached_S[:, None] & useful_R[None]

    @cached_property
    def _receivers_of_source(self) -> list[list[int]]:
        """The inputs from which each source computes what it writes."""
        inputs: list[list[int]] = [[]]
        group = self.n_heads // self.n_key_heads
        for layer in range(self.n_layers):
            first = self.attention_receivers(layer).start
            for head in range(self.n_heads):
                key = first + self.n_heads + head // group
                inputs.append([first + head, key, key + self.n_key_heads])
            inputs.append([self.mlp_receiver(layer)])
        return inputs
