"""Head loadings: an edge of the frozen model split over the heads by which it goes from one position to another.

A source writes vectors into the residual stream at its position k; a target reads the stream at its position q along
one direction. In the frozen model the edge between them is a sum over paths: at every layer a path goes straight on, or
is carried by one head's attention edge to the same position or a later one. Every path is in exactly one bucket:

    k before q   head (l, h)  is only ever at k and q; (l, h) is the head of its one hop. Before the hop it stays at k
                              and behind it at q: straight on, or by heads that attend to their own position
                 others       is at a position between k and q on its way
    k = q        no head      straight on through every layer
                 head (l, h)  the last head that carried it, from its position to the same one
    k after q    none: attention is causal

so no path between positions is in `no head`, and none at home in `others`. Paths are never enumerated. With D_l what
heads carry from positions to themselves, P_h their patterns, V_h and O_h their maps, there are three recursions:

    stay    a_l+1 = (1 + D_l) a_l + writes             what a source has become at k, forwards
    ask     b_l   = (1 + D_l)^T b_l+1                  what its target asks for at q, backwards
            load(l, h) = P_h[q, k] <O_h^T b_l+1, V_h a_l>         at home with the target's own direction for b_l+1
    pass    g_l   = (1 + A_l)^T g_l+1                  what the target asks for at every position, by all paths
            o_l   = (1 + D_l)^T o_l+1 + A'_l^T g_l+1   the same by the paths of `others`: A' hops to a third position

Norms and patterns are held, so all of this is exact. The edge itself is read off g, and the buckets sum to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.attribution.frozen import FrozenModel
from gossamer.attribution.frozen_layer import FrozenLayer

MOST_EDGES = 8192  # at a time


@dataclass(frozen=True, eq=False)
class Sources:
    """What writes: at one position each, a vector in front of block l in slot l; slot l + 1 is where MLP l writes."""

    position_S: Tensor
    writes_SWD: Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """What reads the stream at one position each: where MLP `layer` does, or behind the last block (`n_layers`).

    `cotangent_TD` is of the stream itself, in front of the norm.
    """

    position_T: Tensor
    layer_T: Tensor
    cotangent_TD: Tensor


@dataclass(frozen=True, eq=False)
class Buckets:
    """Edges and their buckets: [E] and [E, L, H]."""

    edge_E: Tensor
    heads_ELH: Tensor
    no_head_E: Tensor
    others_E: Tensor


@torch.no_grad()
def load_edges(
    frozen: FrozenModel, sources: Sources, targets: Targets, edges: tuple[Tensor, Tensor] | None = None
) -> Buckets:
    """The buckets of edges (source, target), by default of all pairs, targets within sources."""
    edges = edges or every_pair(len(sources.position_S), len(targets.position_T))
    source_E, target_E = (index.to(sources.writes_SWD.device) for index in edges)
    edge_ST, others_ST = _by_every_path(frozen, sources, targets)
    at_home_E = sources.position_S[source_E] == targets.position_T[target_E]
    straight_ST = _straight_on(sources, targets)
    return Buckets(
        edge_ST[source_E, target_E],
        _by_heads(frozen, sources, targets, source_E, target_E),
        torch.where(at_home_E, straight_ST[source_E, target_E], 0),
        others_ST[source_E, target_E],
    )


def every_pair(n_sources: int, n_targets: int) -> tuple[Tensor, Tensor]:
    """All (source, target), targets within sources."""
    pairs_E2 = torch.cartesian_prod(torch.arange(n_sources), torch.arange(n_targets))
    return pairs_E2[:, 0], pairs_E2[:, 1]


def _by_heads(frozen: FrozenModel, sources: Sources, targets: Targets, source_E: Tensor, target_E: Tensor) -> Tensor:
    """What each head [E, L, H] carries in one hop, or, at home, last."""
    staying_L, direct_L = _asked(frozen, targets)
    key_E, query_E = sources.position_S[source_E], targets.position_T[target_E]
    at_home_E = (key_E == query_E)[:, None, None]
    n_heads = len(frozen.layers[0].pattern_HQK)
    loads = sources.writes_SWD.new_zeros(len(source_E), frozen.n_layers, n_heads)
    stream_SD = sources.writes_SWD[:, 0]
    for index, layer in enumerate(frozen.layers):
        values_SHE = _values(layer, stream_SD, sources.position_S)
        for part in _slices(len(source_E)):
            asked_EHE = torch.where(at_home_E[part], direct_L[index][target_E[part]], staying_L[index][target_E[part]])
            weight_EH = layer.pattern_HQK[:, query_E[part], key_E[part]].T
            loads[part, index] = weight_EH * (asked_EHE * values_SHE[source_E[part]]).sum(-1)
        stream_SD = stream_SD + _written(layer, _at_home(layer, values_SHE, sources.position_S), sources.position_S)
        stream_SD = stream_SD + sources.writes_SWD[:, index + 1]
    return loads


def _asked(frozen: FrozenModel, targets: Targets) -> tuple[list[Tensor], list[Tensor]]:
    """What targets ask of every layer's heads at their position [L][T, H, E]: to stay there behind it, or at once."""
    staying_L, direct_L = [], []
    cotangent_TD = torch.zeros_like(targets.cotangent_TD)
    layers_read_T1 = _layers_read(frozen, targets)[:, None]
    for index in reversed(range(frozen.n_layers)):
        layer = frozen.layers[index]
        cotangent_TD = torch.where(layers_read_T1 == index + 1, targets.cotangent_TD, cotangent_TD)
        direct_TD = torch.where(layers_read_T1 > index, targets.cotangent_TD, 0)
        staying_L.append(_outputs(layer, cotangent_TD, targets.position_T))
        direct_L.append(_outputs(layer, direct_TD, targets.position_T))
        carried_THE = _at_home(layer, staying_L[-1], targets.position_T)
        cotangent_TD = cotangent_TD + _pulled(layer, carried_THE, targets.position_T)
    return staying_L[::-1], direct_L[::-1]


def _by_every_path(frozen: FrozenModel, sources: Sources, targets: Targets) -> tuple[Tensor, Tensor]:
    """The edge of every source and target [S, T], and the part of it that visits a third position."""
    every_Q = torch.arange(frozen.n_positions, device=targets.position_T.device)
    at_target_TQ = every_Q == targets.position_T[:, None]
    layers_read_T = _layers_read(frozen, targets)
    full_TQD = targets.cotangent_TD.new_zeros(*at_target_TQ.shape, targets.cotangent_TD.shape[1])
    others_TQD = torch.zeros_like(full_TQD)
    edge_ST = sources.writes_SWD.new_zeros(len(sources.position_S), len(targets.position_T))
    others_ST = torch.zeros_like(edge_ST)
    for slot in reversed(range(frozen.n_layers + 1)):
        begins_TQ1 = ((layers_read_T == slot)[:, None] & at_target_TQ)[..., None]
        full_TQD = torch.where(begins_TQ1, targets.cotangent_TD[:, None], full_TQD)
        sees_T = targets.layer_T >= slot
        edge_ST += _met(sources, slot, full_TQD) * sees_T
        others_ST += _met(sources, slot, others_TQD) * sees_T
        if slot:
            full_TQD, others_TQD = _one_layer_back(frozen.layers[slot - 1], full_TQD, others_TQD, at_target_TQ)
    return edge_ST, others_ST


def _one_layer_back(
    layer: FrozenLayer, full_TQD: Tensor, others_TQD: Tensor, at_target_TQ: Tensor
) -> tuple[Tensor, Tensor]:
    """The recursions of g and o."""
    every_Q = torch.arange(full_TQD.shape[1], device=full_TQD.device)
    home_HQ = layer.pattern_HQK.diagonal(dim1=1, dim2=2)
    away_HQK = layer.pattern_HQK - torch.diag_embed(home_HQ)
    full_TQHE, others_TQHE = (_outputs(layer, part, every_Q) for part in (full_TQD, others_TQD))
    third_TQHE = full_TQHE * ~at_target_TQ[..., None, None]
    by_others = torch.einsum("hqk,tqhe->tkhe", away_HQK, third_TQHE) + home_HQ.T[..., None] * others_TQHE
    by_all = torch.einsum("hqk,tqhe->tkhe", layer.pattern_HQK, full_TQHE)
    return full_TQD + _pulled(layer, by_all, every_Q), others_TQD + _pulled(layer, by_others, every_Q)


def _met(sources: Sources, slot: int, asked_TQD: Tensor) -> Tensor:
    """What sources write in a slot, as targets ask for it where the sources are: [S, T]."""
    met_ST = sources.writes_SWD.new_zeros(len(sources.position_S), len(asked_TQD))
    for position in sources.position_S.unique():
        here = sources.position_S == position
        met_ST[here] = sources.writes_SWD[here, slot] @ asked_TQD[:, position].T
    return met_ST


def _straight_on(sources: Sources, targets: Targets) -> Tensor:
    """The paths [S, T] through no head, wherever the two are."""
    met_WST = torch.einsum("swd,td->wst", sources.writes_SWD, targets.cotangent_TD)
    slots_W11 = torch.arange(len(met_WST), device=met_WST.device)[:, None, None]
    return (met_WST * (slots_W11 <= targets.layer_T)).sum(0)


def _layers_read(frozen: FrozenModel, targets: Targets) -> Tensor:
    """How many attention layers have written [T] where a target reads; an MLP in sequence reads its own layer's."""
    parallel = frozen.layers[0].parallel
    return targets.layer_T if parallel else (targets.layer_T + 1).clamp(max=frozen.n_layers)


# --- one layer's maps, at a position for each row ---


def _values(layer: FrozenLayer, stream_ND: Tensor, position_N: Tensor) -> Tensor:
    """What each head's value is [N, H, E] of a stream at a position, without biases."""
    normed_ND = layer.attention_norm.at(position_N).linear(stream_ND)
    return torch.einsum("nd,hed->nhe", normed_ND, layer.value_HED)


def _written(layer: FrozenLayer, carried_NHE: Tensor, position_N: Tensor) -> Tensor:
    """What heads write [N, D] that carry this."""
    return layer.attention_post.at(position_N).linear(torch.einsum("nhe,hed->nd", carried_NHE, layer.output_HED))


def _outputs(layer: FrozenLayer, cotangent_NQD: Tensor, position_Q: Tensor) -> Tensor:
    """A cotangent of what the layer writes, as one of what its heads carry [..., Q, H, E]."""
    written_NQD = layer.attention_post.at(position_Q).transposed(cotangent_NQD)
    return torch.einsum("...d,hed->...he", written_NQD, layer.output_HED)


def _pulled(layer: FrozenLayer, values_NQHE: Tensor, position_Q: Tensor) -> Tensor:
    """A cotangent of the heads' values, as one of the stream [..., Q, D]."""
    normed_NQD = torch.einsum("...he,hed->...d", values_NQHE, layer.value_HED)
    return layer.attention_norm.at(position_Q).transposed(normed_NQD)


def _at_home(layer: FrozenLayer, carried_NHE: Tensor, position_N: Tensor) -> Tensor:
    """What heads carry from these positions to themselves."""
    return carried_NHE * layer.pattern_HQK[:, position_N, position_N].T[..., None]


def _slices(n: int) -> Iterator[slice]:
    return (slice(first, first + MOST_EDGES) for first in range(0, n, MOST_EDGES))
