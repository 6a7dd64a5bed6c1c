"""Making the graph of one prompt: effects on the logits first, then on every feature, in batches.

When a prompt has more active features than a graph may hold, the most influential are found first: the logits' inputs
are ranked, the best become targets themselves, their inputs are ranked with them, and so on. The others then count as
error, so that the effects on every target still sum to its value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from gossamer.attribution import influence
from gossamer.attribution.effects import DirectEffects
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.logits import LogitTargets, logit_targets
from gossamer.attribution.nodes import BIAS, ERROR, FEATURE, LOGIT, TOKEN, Nodes
from gossamer.attribution.replacement import Replacement
from gossamer.circuits.effect import Floats
from gossamer.errors import GossamerError

MOST_FEATURES = 7500
ROUNDS = 8  # in which the most influential features are chosen


def attribution_graph(
    replacement: Replacement, *, targets: Sequence[int] | None = None, max_features: int = MOST_FEATURES
) -> AttributionGraph:
    """The attribution graph of a replacement model; `targets` are token ids, by default the likeliest next tokens.

    Of more than `max_features` the most influential are kept; what else needs the same features (loadings, hops) takes
    the replacement model that `most_influential` gives.
    """
    replacement = most_influential(replacement, targets=targets, max_features=max_features)
    chosen = logit_targets(replacement.frozen, targets)
    effect_TS = _effects(replacement, chosen)
    nodes = _nodes(replacement, chosen)
    probability_K = _numpy(chosen.probability_K)
    influence_N = influence.node_influence(nodes, effect_TS, probability_K)
    frozen, model = replacement.frozen, replacement.frozen.model
    return AttributionGraph(
        prompt=_text(replacement, frozen.ids_Q.tolist()),
        tokens_Q=tuple(_text(replacement, [token]) for token in frozen.ids_Q.tolist()),
        ids_Q=_numpy(frozen.ids_Q),
        nodes=nodes,
        effect_TS=effect_TS,
        value_T=_numpy(torch.cat([replacement.preactivation_N, chosen.value_K])),
        logit_tokens_K=tuple(_text(replacement, [token]) for token in chosen.ids_K.tolist()),
        probability_K=probability_K,
        influence_N=influence_N,
        cumulative_N=influence.cumulative(nodes, influence_N),
        scores=influence.scores(nodes, effect_TS, influence_N),
        n_layers=frozen.n_layers,
        n_features_per_layer=replacement.transcoders.n_features,
        n_active_features=len(replacement.features) + replacement.n_left_out,
        transcoder_kind=replacement.transcoders.kind,
        pruning=None,
        provenance={"model": model.provenance(), "transcoders": dict(replacement.transcoders.provenance)},
    )


def most_influential(
    replacement: Replacement, *, targets: Sequence[int] | None = None, max_features: int = MOST_FEATURES
) -> Replacement:
    """The replacement model with the `max_features` features that matter most; what the others write is error."""
    if max_features < 1:
        raise GossamerError(f"A graph needs room for at least one feature, but max_features is {max_features}.")
    if len(replacement.features) <= max_features:
        return replacement
    chosen = logit_targets(replacement.frozen, targets)
    return replacement.keeping(_most_influential(replacement, chosen, max_features))


def _effects(replacement: Replacement, targets: LogitTargets) -> Floats:
    effects = DirectEffects(replacement)
    n_features = len(replacement.features)
    effect_TS = np.empty((n_features + len(targets.ids_K), effects.n_sources), dtype=_numpy(targets.value_K).dtype)
    effect_TS[n_features:] = _numpy(effects.on_logits(targets.directions(replacement.frozen.logits_V)))
    for batch_N, rows_TS in effects.on_features(torch.arange(n_features, device=targets.ids_K.device)):
        effect_TS[_numpy(batch_N)] = _numpy(rows_TS)
    return effect_TS


def _most_influential(replacement: Replacement, targets: LogitTargets, limit: int) -> Tensor:
    """Which features [N] to keep."""
    effects = DirectEffects(replacement)
    rows = [_numpy(effects.on_logits(targets.directions(replacement.frozen.logits_V)))]
    columns = np.full(len(targets.ids_K), -1)
    keep_N = np.zeros(len(replacement.features), dtype=bool)
    while keep_N.sum() < limit:
        effect_TS = np.concatenate(rows)
        weight_T = np.zeros(len(effect_TS))
        weight_T[: len(targets.ids_K)] = _numpy(targets.probability_K)
        influence_S = influence.influence(influence.shares(effect_TS, effects.n_sources - 1), columns, weight_T)
        ranked_N = np.argsort(-np.where(keep_N, -1.0, influence_S[: len(keep_N)]), kind="stable")
        chosen_N = np.sort(ranked_N[: min(limit - keep_N.sum(), -(-limit // ROUNDS))])
        for batch_N, rows_TS in effects.on_features(torch.from_numpy(chosen_N).to(targets.ids_K.device)):
            rows.append(_numpy(rows_TS))
            columns = np.concatenate([columns, _numpy(batch_N)])
        keep_N[chosen_N] = True
    return torch.from_numpy(keep_N).to(targets.ids_K.device)


def source_nodes(replacement: Replacement) -> Nodes:
    """The sources alone: features, errors, tokens, and the bias."""
    frozen, features = replacement.frozen, replacement.features
    n_layers, n_positions = frozen.n_layers, frozen.n_positions
    positions, sizes = np.arange(n_positions), (n_layers * n_positions, n_positions, 1)

    def column(feature: Tensor, *others: ArrayLike) -> np.ndarray:
        parts = (np.broadcast_to(np.asarray(part), size) for part, size in zip(others, sizes, strict=True))
        return np.concatenate([_numpy(feature), *parts])

    return Nodes(
        kind_N=column(torch.full_like(features.layer_N, FEATURE), ERROR, TOKEN, BIAS),
        layer_N=column(features.layer_N, np.repeat(np.arange(n_layers), n_positions), -1, -1),
        position_N=column(features.position_N, np.tile(positions, n_layers), positions, -1),
        number_N=column(features.feature_N, -1, _numpy(frozen.ids_Q), -1),
        value_N=column(features.activation_N, 0, 0, 0),
    )


def _nodes(replacement: Replacement, targets: LogitTargets) -> Nodes:
    sources, frozen = source_nodes(replacement), replacement.frozen

    def column(source: np.ndarray, logit: ArrayLike) -> np.ndarray:
        return np.concatenate([source, np.broadcast_to(np.asarray(logit), len(targets.ids_K))])

    return Nodes(
        kind_N=column(sources.kind_N, LOGIT),
        layer_N=column(sources.layer_N, frozen.n_layers),
        position_N=column(sources.position_N, frozen.n_positions - 1),
        number_N=column(sources.number_N, _numpy(targets.ids_K)),
        value_N=column(sources.value_N, _numpy(targets.value_K)),
    )


def _text(replacement: Replacement, ids: list[int]) -> str:
    """Text of token ids, special ones included; a model without a tokenizer shows the numbers."""
    tokenizer = replacement.frozen.model.optional_tokenizer
    if tokenizer is None:
        return " ".join(map(str, ids))
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy()
