"""The difference of two attribution graphs of one prompt: nodes and edges added, lost and kept.

    by node     features are the same if layer, position and number are; only for graphs made with the same transcoders
    by place    all features of one layer and position are one node, their influence and effects summed: for graphs of a
                dense and a sparse model, whose features have nothing to do with each other

The bias is left out: it is in every graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.nodes import BIAS, ERROR, KINDS, LOGIT, TOKEN
from gossamer.circuits.effect import Floats
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError

Level = Literal["node", "place"]
Status = Literal["added", "lost", "kept"]
Key = tuple[int, int, int, int]  # kind, layer, position, number


@dataclass(frozen=True)
class NodeChange:
    """A node of either graph; None where it is not in one of them."""

    kind: str
    layer: int
    position: int
    number: int
    first: float | None
    second: float | None

    @property
    def status(self) -> Status:
        """Added, lost or kept on the way from the first graph to the second."""
        return "added" if self.first is None else "lost" if self.second is None else "kept"


@dataclass(frozen=True)
class EdgeChange:
    """An edge of either graph between two nodes of the difference, given by their places in its list."""

    source: int
    target: int
    first: float | None
    second: float | None

    @property
    def status(self) -> Status:
        """Added, lost or kept on the way from the first graph to the second."""
        return "added" if self.first is None else "lost" if self.second is None else "kept"

    @property
    def size(self) -> float:
        """The larger of its two sizes."""
        return max(abs(self.first or 0.0), abs(self.second or 0.0))


@dataclass(frozen=True)
class GraphDiff(Stored):
    """What changes from the first graph to the second."""

    FORMAT: ClassVar[str] = "graph difference"

    names: tuple[str, str]
    tokens_Q: tuple[str, ...]
    n_layers: int
    level: Level
    nodes: tuple[NodeChange, ...]
    edges: tuple[EdgeChange, ...]
    provenance: dict[str, Any]

    def nodes_that_are(self, status: Status) -> list[NodeChange]:
        """Nodes of one status."""
        return [node for node in self.nodes if node.status == status]

    def edges_that_are(self, status: Status) -> list[EdgeChange]:
        """Edges of one status, largest first."""
        return sorted((edge for edge in self.edges if edge.status == status), key=lambda edge: -edge.size)

    def describe(self) -> str:
        """Counts in one sentence."""
        parts = [
            f"{sum(change.status == status for change in changes)} {what} {status}"
            for what, changes in (("nodes", self.nodes), ("edges", self.edges))
            for status in ("kept", "lost", "added")
        ]
        return f"From {self.names[0]} to {self.names[1]}, by {self.level}: {', '.join(parts)}."


def diff_graphs(
    first: AttributionGraph, second: AttributionGraph, *, level: Level = "node", names: tuple[str, str] | None = None
) -> GraphDiff:
    """Compare two graphs of one prompt, usually pruned ones.

    They may come from disk, so results of different runs, say of two checkpoints, can be compared afterwards:

        one, other = (AttributedPair.load(path).sparse.features.graph for path in paths)
        diff_graphs(one, other, level="place", names=("step 1,000", "step 2,000")).save("change.safetensors")

    Edges of the difference name their nodes by their places in its list. `GraphDiff.load` reads it again.
    """
    _require_comparable(first, second, level)
    one, other = _values(first, level), _values(second, level)
    keys = sorted({*one[0], *other[0]})
    place = {key: index for index, key in enumerate(keys)}
    pairs = sorted({*one[1], *other[1]})
    model_names = tuple(str(graph.provenance["model"]["name"]) for graph in (first, second))
    return GraphDiff(
        names or (model_names[0], model_names[1]),
        first.tokens_Q,
        first.n_layers,
        level,
        tuple(NodeChange(KINDS[key[0]], *key[1:], one[0].get(key), other[0].get(key)) for key in keys),
        tuple(EdgeChange(place[s], place[t], one[1].get((s, t)), other[1].get((s, t))) for s, t in pairs),
        {"first": first.provenance, "second": second.provenance},
    )


def _values(graph: AttributionGraph, level: Level) -> tuple[dict[Key, float], dict[tuple[Key, Key], float]]:
    """Influence of every node and effect of every edge, the bias left out."""
    nodes, bias = graph.nodes, int(np.flatnonzero(graph.nodes.is_kind(BIAS))[0])
    keys = [_key(key, level) for key in nodes.identities()]
    influence: dict[Key, float] = {}
    for node, key in enumerate(keys):
        if node != bias:
            influence[key] = influence.get(key, 0.0) + float(graph.influence_N[node])
    effects: dict[tuple[Key, Key], float] = {}
    effect_TS: Floats = graph.effect_TS
    for row, column in zip(*(part.tolist() for part in np.nonzero(effect_TS)), strict=True):
        if column != bias:
            pair = keys[column], keys[int(nodes.target_nodes_T[row])]
            effects[pair] = effects.get(pair, 0.0) + float(effect_TS[row, column])
    return influence, effects


def _key(key: Key, level: Level) -> Key:
    kind, layer, position, _ = key
    return key if level == "node" or kind in (ERROR, TOKEN, LOGIT) else (kind, layer, position, -1)


def _require_comparable(first: AttributionGraph, second: AttributionGraph, level: Level) -> None:
    if level not in ("node", "place"):
        raise GossamerError(f"Graphs are compared by node or by place, not by {level!r}.")
    if first.ids_Q.tolist() != second.ids_Q.tolist() or first.n_layers != second.n_layers:
        raise GossamerError(
            f"Only graphs of one prompt and of models with as many layers can be compared, not {first.prompt!r} in"
            f" {first.n_layers} layers with {second.prompt!r} in {second.n_layers}."
        )
    if level == "node" and first.provenance.get("transcoders") != second.provenance.get("transcoders"):
        raise GossamerError(
            "The graphs were made with different transcoders, whose features have nothing to do with each other;"
            " compare them by place."
        )
