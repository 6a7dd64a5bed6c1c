"""Clusters: the features of a graph grouped by token and by what they do, each with its layers and a label.

Two features of one position are alike when they write alike and feed alike:

    alike = (cosine of what their decoders write, summed over layers + cosine of their effects on the kept targets) / 2

effects weighted by the targets' influence. Groups are joined while the mean likeness between two of them is above a
threshold (average linkage). A cluster promotes the tokens whose centred logits its features, as active as they are,
raise most when what they write goes straight to the unembedding; tokens that would tell a reader nothing are passed
over (see `nameable`), and where none is left the label is the token and the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.nameable import Nameable
from gossamer.attribution.replacement import Replacement
from gossamer.circuits.effect import Floats, Ints
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError

ALIKE = 0.3
PROMOTED = 5


@dataclass(frozen=True)
class Context:
    """A piece of text up to and with the token on which a cluster was most active."""

    text: str
    activation: float


@dataclass(frozen=True)
class Cluster:
    """Features of one position; `share` is their part of the influence of all features in the graph."""

    position: int
    token: str
    features: tuple[tuple[int, int, int], ...]  # layer, position, number
    first_layer: int
    last_layer: int
    share: float
    promoted: tuple[str, ...]
    contexts: tuple[Context, ...] = ()

    @property
    def layers(self) -> str:
        """`3` or `0–3`."""
        return str(self.first_layer) if self.first_layer == self.last_layer else f"{self.first_layer}–{self.last_layer}"

    @property
    def label(self) -> str:
        """For example `large (layers 0–3): small, tiny`; or `large (layer 2)`, if it promotes nothing readable."""
        word = "layer" if self.first_layer == self.last_layer else "layers"
        place = f"{self.token.strip() or repr(self.token)} ({word} {self.layers})"
        return f"{place}: {', '.join(map(str.strip, self.promoted[:2]))}" if self.promoted else place


@dataclass(frozen=True)
class Clusters(Stored):
    """The clusters of a graph, by position, the most influential of each first."""

    FORMAT: ClassVar[str] = "feature clusters"

    prompt: str
    tokens_Q: tuple[str, ...]
    clusters: tuple[Cluster, ...]
    alike: float
    provenance: dict[str, Any]

    def at(self, position: int) -> list[Cluster]:
        """The clusters of one position."""
        return [cluster for cluster in self.clusters if cluster.position == position]

    def by_share(self) -> list[Cluster]:
        """The most influential first."""
        return sorted(self.clusters, key=lambda cluster: -cluster.share)


@torch.no_grad()
def find_clusters(graph: AttributionGraph, replacement: Replacement, *, alike: float = ALIKE) -> Clusters:
    """Group the features of a (pruned) graph; `alike` is the mean likeness above which groups are joined."""
    if not -1 <= alike <= 1:
        raise GossamerError(f"Likeness is between -1 and 1, so groups cannot be joined above {alike}.")
    nodes, n_features = graph.nodes, graph.nodes.n_features
    writes_FD = _written(graph, replacement)
    likeness_FF = (_cosines(writes_FD.numpy()) + _cosines(_fed(graph))) / 2
    promoting_FV = _straight_to_logits(replacement, writes_FD * torch.from_numpy(nodes.value_N[:n_features, None]))
    nameable = Nameable(replacement.frozen.model, replacement.frozen.unembedding_VD)
    found = []
    for position in range(len(graph.tokens_Q)):
        mine = np.flatnonzero(nodes.position_N[:n_features] == position)
        for members in joined(likeness_FF[np.ix_(mine, mine)], alike):
            group = mine[members]
            promoted = nameable.best(promoting_FV[torch.from_numpy(group)].sum(0), PROMOTED)
            found.append(_cluster(graph, group, promoted))
    found.sort(key=lambda cluster: (cluster.position, -cluster.share))
    return Clusters(graph.prompt, graph.tokens_Q, tuple(found), alike, graph.provenance)


def _cluster(graph: AttributionGraph, group: Ints, promoted: tuple[str, ...]) -> Cluster:
    nodes = graph.nodes
    places = (nodes.layer_N[group], nodes.position_N[group], nodes.number_N[group])
    position = int(nodes.position_N[group[0]])
    return Cluster(
        position,
        graph.tokens_Q[position],
        tuple(zip(*(place.tolist() for place in places), strict=True)),
        int(nodes.layer_N[group].min()),
        int(nodes.layer_N[group].max()),
        float(graph.influence_N[group].sum() / graph.influence_N[: nodes.n_features].sum()),
        promoted,
    )


def joined(likeness_NN: Floats, alike: float) -> list[Ints]:
    """Average linkage: the two groups most alike are joined, as long as they are more alike than `alike`."""
    groups = [np.array([index]) for index in range(len(likeness_NN))]
    mean_GG = likeness_NN.astype(np.float64).copy()
    np.fill_diagonal(mean_GG, -np.inf)
    while len(groups) > 1:
        one, other = np.unravel_index(int(mean_GG.argmax()), mean_GG.shape)
        if mean_GG[one, other] <= alike:
            break
        sizes = len(groups[one]), len(groups[other])
        row_G = (sizes[0] * mean_GG[one] + sizes[1] * mean_GG[other]) / sum(sizes)
        mean_GG[one], mean_GG[:, one] = row_G, row_G
        mean_GG[one, one] = -np.inf
        mean_GG = np.delete(np.delete(mean_GG, other, axis=0), other, axis=1)
        groups[one] = np.sort(np.concatenate([groups[one], groups[other]]))
        del groups[other]
    return groups


def _written(graph: AttributionGraph, replacement: Replacement) -> Tensor:
    """What each kept feature's decoders write, summed over layers [F,D]."""
    nodes, transcoders = graph.nodes, replacement.transcoders
    written_FD = replacement.frozen.embedding_QD.new_zeros(nodes.n_features, transcoders.width)
    for layer in range(graph.n_layers):
        mine = torch.from_numpy(np.flatnonzero(nodes.layer_N[: nodes.n_features] == layer))
        numbers = torch.from_numpy(nodes.number_N)[mine]
        for target in transcoders.targets(layer):
            written_FD[mine] += transcoders.decoder(layer, target)[numbers]
    return written_FD.cpu()


def _fed(graph: AttributionGraph) -> Floats:
    """Each feature's effects [F,T], weighted by its targets' influence."""
    nodes = graph.nodes
    return np.asarray((graph.effect_TS[:, : nodes.n_features] * graph.influence_N[nodes.target_nodes_T, None]).T)


def _cosines(rows_FX: Floats) -> Floats:
    size_F1 = np.linalg.norm(rows_FX, axis=1, keepdims=True)
    unit_FX = np.divide(rows_FX, size_F1, out=np.zeros_like(rows_FX), where=size_F1 > 0)
    return np.asarray(unit_FX @ unit_FX.T)


def _straight_to_logits(replacement: Replacement, written_FD: Tensor) -> Tensor:
    """Centred logits [F,V] of what is written at the last position's norm scale."""
    norm, unembedding_VD = replacement.frozen.final_norm, replacement.frozen.unembedding_VD
    last = replace(norm, scale_Q1=norm.scale_Q1[-1:])
    logits_FV = last.linear(written_FD.to(unembedding_VD)) @ unembedding_VD.T
    return (logits_FV - logits_FV.mean(-1, keepdim=True)).cpu()
