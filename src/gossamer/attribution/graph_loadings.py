"""Head loadings of an attribution graph: of its edges, and of everything that goes from one position to another.

    loadings of edges   each effect of a source node on a target node, split over heads; the bias node is at no position
                        and has none
    hops of a graph     all edges from sources at one position to targets at another at once, each times what its target
                        is worth to the number that is explained: how much the number changes with the target's value,
                        along all paths of the graph behind it

Sums over sources and targets go inside the recursions, so hops need one source a position, however many features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.head_loadings import HeadLoadings, named_loadings
from gossamer.attribution.loadings import Sources, Targets
from gossamer.attribution.nodes import BIAS, ERROR, FEATURE, KINDS, LOGIT, TOKEN, Nodes
from gossamer.attribution.replacement import Replacement
from gossamer.attribution.targets import Target
from gossamer.circuits.effect import Floats, Ints
from gossamer.errors import GossamerError, nearest

AGREE = 1e-4  # of the largest effect, in float32


@torch.no_grad()
def graph_loadings(
    replacement: Replacement, graph: AttributionGraph, *, edges: Sequence[tuple[str, str]] | None = None
) -> HeadLoadings:
    """The loadings of every edge of a (pruned) graph; sources and targets are numbered as in its `effect_TS`.

    `edges` asks for some only, pruned away or not, as (source, target) by the nodes' names: `token at 5`,
    `feature 3/120 at 8`, `error 0 at 2`, `logit 17`.
    """
    nodes = graph.nodes
    effect_TS = graph.effect_TS.copy()
    effect_TS[:, ~_is_somewhere(nodes)] = 0
    names = [nodes.name(node) for node in range(len(nodes))]
    source_names, target_names = names[: nodes.n_sources], [names[node] for node in nodes.target_nodes_T]
    target_E, source_E = np.nonzero(effect_TS) if edges is None else _named(edges, source_names, target_names)
    source_S, source_of_E = np.unique(source_E, return_inverse=True)
    target_T, target_of_E = np.unique(target_E, return_inverse=True)
    found = named_loadings(
        replacement.frozen,
        graph.tokens_Q,
        (_some_sources(node_sources(replacement, nodes), source_S), [source_names[place] for place in source_S]),
        (_some_targets(node_targets(replacement, graph), target_T), [target_names[place] for place in target_T]),
        (torch.from_numpy(source_of_E), torch.from_numpy(target_of_E)),
    )
    effect_E = effect_TS[target_E, source_E]
    worst = np.abs(found.edge_E - effect_E)[effect_E != 0].max(initial=0.0)
    if worst > AGREE * np.abs(effect_TS).max(initial=0.0):
        raise _foreign(f"they differ by {worst:.2g}")
    return replace(
        found, sources=tuple(source_names), targets=tuple(target_names), source_E=source_E, target_E=target_E
    )


def _named(edges: Sequence[tuple[str, str]], sources: list[str], targets: list[str]) -> tuple[Ints, Ints]:
    """The targets' and the sources' numbers of edges given by names."""
    for source, target in edges:
        for name, known, what in ((source, sources, "source"), (target, targets, "target")):
            if name not in known:
                raise GossamerError(f"The graph has no {what} {name!r}.{nearest(name, known)}")
        if source == KINDS[BIAS]:
            raise GossamerError("The bias is at no position, so no head carries it; name another source.")
    found = np.array([(targets.index(target), sources.index(source)) for source, target in edges], dtype=np.int64)
    return found.reshape(-1, 2)[:, 0], found.reshape(-1, 2)[:, 1]


def _some_sources(sources: Sources, chosen_S: Ints) -> Sources:
    return Sources(sources.position_S[chosen_S], sources.writes_SWD[chosen_S])


def _some_targets(targets: Targets, chosen_T: Ints) -> Targets:
    return Targets(targets.position_T[chosen_T], targets.layer_T[chosen_T], targets.cotangent_TD[chosen_T])


@torch.no_grad()
def graph_hops(replacement: Replacement, graph: AttributionGraph, target: Target) -> HeadLoadings:
    """What heads carry between positions: one source a position, one target a position and layer, worth included."""
    nodes, n_positions, n_layers = graph.nodes, replacement.frozen.n_positions, graph.n_layers
    if graph.pruning is None and nodes.n_features != len(replacement.features):
        raise _foreign(f"{nodes.n_features} features and {len(replacement.features)}")
    single, readers = node_sources(replacement, nodes), node_targets(replacement, graph)
    every_Q = torch.arange(n_positions, device=single.position_S.device)
    writes_QWD = single.writes_SWD.new_zeros(n_positions, *single.writes_SWD.shape[1:])
    writes_QWD.index_add_(0, single.position_S, single.writes_SWD)
    worth_T = torch.from_numpy(worth(graph, target)).to(readers.cotangent_TD)
    cotangent_XD = readers.cotangent_TD.new_zeros((n_layers + 1) * n_positions, readers.cotangent_TD.shape[1])
    place_T = readers.layer_T * n_positions + readers.position_T
    cotangent_XD.index_add_(0, place_T, worth_T[:, None] * readers.cotangent_TD)
    layer_X = torch.arange(n_layers + 1, device=every_Q.device).repeat_interleave(n_positions)
    where = [f"{place} {token!r}" for place, token in enumerate(graph.tokens_Q)]
    reads = [*(f"features of layer {layer}" for layer in range(n_layers)), "logits"]
    return named_loadings(
        replacement.frozen,
        graph.tokens_Q,
        (Sources(every_Q, writes_QWD), [f"all at {at}" for at in where]),
        (
            Targets(every_Q.repeat(n_layers + 1), layer_X, cotangent_XD),
            [f"{part} at {at}" for part in reads for at in where],
        ),
    )


def _foreign(how: str) -> GossamerError:
    return GossamerError(
        f"The graph's effects are not those of this replacement model ({how}); give the one that the graph was made of"
        " (with fewer features than are active, what `most_influential` gives)."
    )


def worth(graph: AttributionGraph, target: Target) -> Floats:
    """What one unit of each target's value [T] is worth to the number that is explained, along all paths."""
    if target.kind not in ("centred logit", "logit difference"):
        raise GossamerError(f"A graph explains centred logits and logit differences, not a {target.kind}.")
    worth_T = np.zeros(graph.n_targets)
    worth_T[graph.logit_row(target.token)] = 1
    for foil in target.foils:
        worth_T[graph.logit_row(foil)] -= 1 / len(target.foils)
    layer_F = graph.nodes.layer_N[: graph.nodes.n_features]
    for layer in reversed(range(graph.n_layers)):  # effects run from earlier to later layers only
        mine = np.flatnonzero(layer_F == layer)
        worth_T[mine] = worth_T @ graph.effect_TS[:, mine] / graph.nodes.value_N[mine]
    return worth_T


def node_sources(replacement: Replacement, nodes: Nodes) -> Sources:
    """What each source node writes; the bias, which is at no position, writes nothing here."""
    frozen, n_sources = replacement.frozen, nodes.n_sources
    width = frozen.embedding_QD.shape[1]
    writes_SWD = frozen.embedding_QD.new_zeros(n_sources, frozen.n_layers + 1, width)
    position_S = torch.from_numpy(nodes.position_N[:n_sources]).to(writes_SWD.device).clamp(min=0)
    for node in np.flatnonzero(nodes.is_kind(TOKEN)):
        writes_SWD[node, 0] = frozen.embedding_QD[nodes.position_N[node]]
    for node in np.flatnonzero(nodes.is_kind(ERROR)):
        layer, position = int(nodes.layer_N[node]), int(nodes.position_N[node])
        writes_SWD[node, layer + 1] = replacement.error_LQD[layer, position]
    of_feature, features = _features_of(replacement, nodes), replacement.features
    for layer in range(frozen.n_layers):
        mine = np.flatnonzero(nodes.layer_N[: nodes.n_features] == layer)
        chosen = of_feature[mine]
        for written in replacement.transcoders.targets(layer):
            decoder_ND = replacement.transcoders.decoder(layer, written)[features.feature_N[chosen]]
            writes_SWD[mine, written + 1] = decoder_ND * features.activation_N[chosen, None]
    return Sources(position_S, writes_SWD)


def node_targets(replacement: Replacement, graph: AttributionGraph) -> Targets:
    """What each target node reads."""
    frozen, nodes = replacement.frozen, graph.nodes
    of_feature = _features_of(replacement, nodes)
    cotangent_TD = frozen.embedding_QD.new_zeros(graph.n_targets, frozen.embedding_QD.shape[1])
    layer_T = torch.from_numpy(nodes.layer_N[nodes.target_nodes_T]).to(cotangent_TD.device)
    position_T = torch.full_like(layer_T, frozen.n_positions - 1)
    position_T[: nodes.n_features] = replacement.features.position_N[of_feature]
    for layer in range(frozen.n_layers):
        mine = torch.arange(nodes.n_features)[layer_T[: nodes.n_features].cpu() == layer]
        norm = frozen.layers[layer].mlp_norm.at(position_T[mine])
        cotangent_TD[mine] = norm.transposed(replacement.encoders(of_feature[mine]))
    tokens_K = torch.from_numpy(nodes.number_N[nodes.is_kind(LOGIT)]).to(cotangent_TD.device)
    direction_KV = frozen.logits_V.new_full((len(tokens_K), len(frozen.logits_V)), -1 / len(frozen.logits_V))
    direction_KV[torch.arange(len(tokens_K)), tokens_K] += 1
    cotangent_TD[nodes.n_features :] = frozen.logit_cotangents(direction_KV)[:, -1]
    return Targets(position_T, layer_T, cotangent_TD)


def _features_of(replacement: Replacement, nodes: Nodes) -> Tensor:
    """The number of each feature node in the replacement model."""
    features = replacement.features
    known = {
        place: number
        for number, place in enumerate(
            zip(*(part.tolist() for part in (features.layer_N, features.position_N, features.feature_N)), strict=True)
        )
    }
    parts = (nodes.layer_N, nodes.position_N, nodes.number_N)
    wanted = list(zip(*(part[nodes.is_kind(FEATURE)].tolist() for part in parts), strict=True))
    missing = [place for place in wanted if place not in known]
    if missing:
        raise GossamerError(
            f"Feature {missing[0][2]} of layer {missing[0][0]} is not active at position {missing[0][1]} in this"
            " replacement model; give the one that the graph was made of."
        )
    return torch.tensor([known[place] for place in wanted], dtype=torch.long, device=features.layer_N.device)


def _is_somewhere(nodes: Nodes) -> np.ndarray:
    """Which sources are at a position."""
    return np.asarray(nodes.position_N[: nodes.n_sources] >= 0)
