"""How much of what reaches the logits passes through each node, and the scores and the pruning that follow from it.

    1. shares      each target's |direct effects| divided by their sum: where its input comes from
    2. influence   logits weighted by their probability, carried back along the shares, summed over paths of any length
    3. pruning     the fewest nodes, then edges, that hold a given part of the influence; nodes that lead nowhere go too

The bias takes no share: it does not depend on the prompt. Errors and tokens are where paths begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gossamer.attribution.nodes import BIAS, ERROR, FEATURE, LOGIT, TOKEN, Nodes
from gossamer.circuits.effect import Bools, Floats, Ints
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class Scores:
    """How far a graph explains its logits by features.

    `replacement`: of all influence that begins at tokens or errors, the part that begins at tokens.
    `completeness`: of the inputs of all nodes, weighted by influence, the part that is not an error; tokens and errors
    have no inputs and count as complete, as elsewhere.
    `error_share`: of the logits' own inputs, weighted by probability, the part that is an error.
    """

    replacement: float
    completeness: float
    error_share: float


def shares(effect_TS: Floats, bias_column: int) -> Floats:
    """Each row's |effects| as parts of their sum, the bias left out."""
    size_TS = np.abs(effect_TS)
    size_TS[:, bias_column] = 0
    total_T1 = size_TS.sum(1, keepdims=True)
    return np.divide(size_TS, total_T1, out=size_TS, where=total_T1 > 0)


def influence(share_TS: Floats, column_T: Ints, weight_T: Floats) -> Floats:
    """Influence [S] of every source; `column_T` is each target's own column as a source, -1 if it is none."""
    has_column_T = column_T >= 0
    arriving_T, total_S = weight_T.astype(share_TS.dtype), np.zeros(share_TS.shape[1], share_TS.dtype)
    while arriving_T.any():  # ends: effects run from earlier to later layers only
        passed_S = arriving_T @ share_TS
        total_S += passed_S
        arriving_T = np.where(has_column_T, passed_S[column_T], 0.0)
    return total_S


def node_influence(nodes: Nodes, effect_TS: Floats, probability_K: Floats) -> Floats:
    """Influence [N] of every node of a graph; a logit has its probability."""
    weight_T = np.concatenate([np.zeros(nodes.n_features), probability_K])
    sources_S = influence(shares(effect_TS, _bias(nodes)), own_columns(nodes), weight_T)
    return np.concatenate([sources_S, probability_K])


def cumulative(nodes: Nodes, influence_N: Floats) -> Floats:
    """For each source the share of all their influence down to it, largest first; 1 for logits."""
    sources_S = influence_N[: nodes.n_sources].astype(np.float64)
    order = np.argsort(-sources_S, kind="stable")
    cumulative_N = np.ones(len(nodes))
    cumulative_N[order] = np.cumsum(sources_S[order]) / max(sources_S.sum(), np.finfo(np.float64).tiny)
    return cumulative_N


def own_columns(nodes: Nodes) -> Ints:
    """Each target's column among the sources: features come first in both, logits are no sources."""
    n_logits = len(nodes) - nodes.n_sources
    return np.concatenate([np.arange(nodes.n_features), np.full(n_logits, -1)]).astype(np.int64)


def scores(nodes: Nodes, effect_TS: Floats, influence_N: Floats) -> Scores:
    """The scores of a graph."""
    share_TS = shares(effect_TS, _bias(nodes))
    is_error_S = nodes.is_kind(ERROR)[: nodes.n_sources]
    of_tokens = influence_N[nodes.is_kind(TOKEN)].sum()
    of_errors = influence_N[nodes.is_kind(ERROR)].sum()
    from_errors_T = share_TS[:, is_error_S].sum(1)
    weight_T = influence_N[nodes.target_nodes_T]
    weight_K = weight_T[nodes.n_features :]
    return Scores(
        replacement=_ratio(of_tokens, of_tokens + of_errors),
        completeness=1 - _ratio((from_errors_T * weight_T).sum(), influence_N.sum()),
        error_share=_ratio((from_errors_T[nodes.n_features :] * weight_K).sum(), weight_K.sum()),
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else 0.0


def pruned(
    nodes: Nodes, effect_TS: Floats, probability_K: Floats, *, node_part: float, edge_part: float
) -> tuple[Bools, Floats]:
    """Which nodes stay, and the effects with those of dropped edges set to zero (in the shape they had)."""
    for name, part in (("node", node_part), ("edge", edge_part)):
        if not 0 < part <= 1:
            raise GossamerError(f"The {name} part to keep is {part}; give a number above 0 and up to 1.")
    influence_N = node_influence(nodes, effect_TS, probability_K)
    always_N = np.isin(nodes.kind_N, (TOKEN, BIAS, LOGIT))
    keep_N = (influence_N >= threshold(influence_N[: nodes.n_sources], node_part)) & (influence_N > 0) | always_N
    effect_TS = np.where(_both_kept(nodes, keep_N), effect_TS, 0.0)
    keep_TS = _important_edges(nodes, effect_TS, probability_K, edge_part)
    effect_TS = np.where(keep_TS, effect_TS, 0.0)
    return _without_dead_ends(nodes, effect_TS, keep_N, always_N)


def threshold(values: Floats, part: float) -> float:
    """The smallest of the largest values that together make up this part of the sum."""
    if not len(values):
        return 0.0
    ordered = np.sort(values)[::-1]
    reached = np.cumsum(ordered, dtype=np.float64)
    reached /= max(reached[-1], np.finfo(np.float64).tiny)
    return float(ordered[min(int(np.searchsorted(reached, part)), len(ordered) - 1)])


def _important_edges(nodes: Nodes, effect_TS: Floats, probability_K: Floats, part: float) -> Bools:
    """The edges that hold this part of the influence; what the bias gives is always kept."""
    passed_TS = shares(effect_TS, _bias(nodes))
    passed_TS *= node_influence(nodes, effect_TS, probability_K)[nodes.target_nodes_T, None]
    keep_TS: Bools = (passed_TS >= threshold(passed_TS[passed_TS > 0], part)) & (passed_TS > 0)
    keep_TS[:, _bias(nodes)] = True
    return keep_TS


def _both_kept(nodes: Nodes, keep_N: Bools) -> Bools:
    return np.asarray(keep_N[nodes.target_nodes_T, None] & keep_N[None, : nodes.n_sources])


def _without_dead_ends(nodes: Nodes, effect_TS: Floats, keep_N: Bools, always_N: Bools) -> tuple[Bools, Floats]:
    """Features without inputs or outputs and errors without outputs go, until none is left."""
    is_feature_N, bias = nodes.is_kind(FEATURE), _bias(nodes)
    while True:
        used_TS = effect_TS != 0
        used_TS[:, bias] = False
        has_output_N, has_input_N = np.zeros(len(nodes), bool), np.zeros(len(nodes), bool)
        has_output_N[: nodes.n_sources] = used_TS.any(0)
        has_input_N[nodes.target_nodes_T] = used_TS.any(1)
        fewer_N = keep_N & (always_N | has_output_N & (has_input_N | ~is_feature_N))
        if (fewer_N == keep_N).all():
            return keep_N, effect_TS
        keep_N = fewer_N
        effect_TS = np.where(_both_kept(nodes, keep_N), effect_TS, 0.0)


def _bias(nodes: Nodes) -> int:
    return int(np.flatnonzero(nodes.is_kind(BIAS))[0])
