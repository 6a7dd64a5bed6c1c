"""Why a head attends: one edge's gate logit as a sum over what its query reads and what its key reads.

With the stream in front of the head's layer written as a sum over sources, the query at position i and the key at j are
sums too, and their product is a sum over pairs:

    gate logit_ij  =  scaling * sum over s, t of  q_s . k_t  +  b_h        s, t: features, errors, tokens, or the bias

It is exact: patterns and norm scales in front are frozen, and norms of queries and keys with them. Paths from a source
are those of the attribution graph, through heads but past other features. The bias's row and column hold what queries
and keys have of their own. A dense model has no gate: then the score is split, and there is no b_h.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from gossamer.attention import gates_of, tape
from gossamer.attribution.build import source_nodes
from gossamer.attribution.effects import DirectEffects, Reads
from gossamer.attribution.frozen_scores import FrozenSide, freeze_scores
from gossamer.attribution.nodes import Nodes
from gossamer.attribution.replacement import Replacement
from gossamer.attribution.targets import spelled
from gossamer.circuits.effect import Floats
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel


@dataclass(frozen=True)
class Pair:
    """What one source gives the score through the query together with one through the key."""

    query: str
    key: str
    part: float


@dataclass(frozen=True)
class ScoreSplit(Stored):
    """The score of one edge over pairs of sources: `query_ES` and `key_ES` are their parts of query and key."""

    FORMAT: ClassVar[str] = "score split"

    layer: int
    head: int
    query: int
    key: int
    sources: Nodes
    query_ES: Floats
    key_ES: Floats
    scaling: float
    offset: float | None
    tokens_Q: tuple[str, ...]
    provenance: dict[str, Any]

    @property
    def parts_SS(self) -> Floats:
        """Every pair's part, query sources down; the bias is the last of both."""
        return np.asarray(self.scaling * self.query_ES.T @ self.key_ES)

    @property
    def score(self) -> float:
        """The sum of all parts."""
        return float(self.scaling * self.query_ES.sum(1) @ self.key_ES.sum(1))

    @property
    def gate_logit(self) -> float | None:
        """Score and offset; the edge is open where it is above zero. None for a dense model."""
        return None if self.offset is None else self.score + self.offset

    def by_query(self) -> Floats:
        """What each source gives [S] through the query, whatever the key reads."""
        return np.asarray(self.scaling * self.query_ES.T @ self.key_ES.sum(1))

    def by_key(self) -> Floats:
        """What each source gives [S] through the key, whatever the query reads."""
        return np.asarray(self.scaling * self.key_ES.T @ self.query_ES.sum(1))

    def largest(self, n: int = 10) -> list[Pair]:
        """The largest pairs by size; pairs that give nothing are not among them, so there may be fewer than `n`."""
        parts_SS = self.parts_SS
        order = np.argsort(-np.abs(parts_SS), axis=None, kind="stable")[: min(n, np.count_nonzero(parts_SS))]
        query_N, key_N = np.unravel_index(order, parts_SS.shape)
        parts_N = parts_SS[query_N, key_N].tolist()
        return [Pair(self._name(s), self._name(t), part) for s, t, part in zip(query_N, key_N, parts_N, strict=True)]

    def _name(self, source: int) -> str:
        return self.sources.name(int(source), self.tokens_Q)


@torch.no_grad()
def split_score(replacement: Replacement, layer: int, head: int, query: int, key: int) -> ScoreSplit:
    """Split the gate logit of an edge (or, in a dense model, its score) over pairs of sources."""
    frozen, model = replacement.frozen, replacement.frozen.model
    _require_bilinear(model)
    recorded = _recorded_score(replacement, layer, head, query, key)
    sides = freeze_scores(frozen, layer, head)
    effects = DirectEffects(replacement)
    split = ScoreSplit(
        layer,
        head,
        query,
        key,
        source_nodes(replacement),
        _by_source(effects, sides.query, layer, query),
        _by_source(effects, sides.key, layer, key),
        sides.scaling,
        float(gates_of(model.hf)[layer].offset_H[head]) if model.is_sparse else None,
        tuple(spelled(model, token) for token in frozen.ids_Q.tolist()),
        {"model": model.provenance(), "transcoders": dict(replacement.transcoders.provenance)},
    )
    if abs(split.score - recorded) > 1e-3 * (1 + abs(recorded)):
        raise GossamerError(
            f"The score of head {head} in layer {layer} is {recorded:.4g} but its parts sum to {split.score:.4g}, so"
            f" {model.name} does more to its scores than multiply queries with keys; they cannot be split."
        )
    return split


def _by_source(effects: DirectEffects, side: FrozenSide, layer: int, position: int) -> Floats:
    """Each source's part [E,S] of a query or a key."""
    block, map_ED = effects.frozen.layers[layer], side.map_QED[position]
    read_EQD = map_ED.new_zeros(len(map_ED), *effects.frozen.embedding_QD.shape)
    read_EQD[:, position] = map_ED
    constant_E = map_ED @ block.attention_norm.bias_D + side.bias_QE[position]
    effect_ES = effects.on(Reads(layer, block.attention_norm.transposed(read_EQD), constant_E))
    return np.asarray(effect_ES.cpu().numpy())


def _recorded_score(replacement: Replacement, layer: int, head: int, query: int, key: int) -> float:
    frozen = replacement.frozen
    n_layers, n_heads, n_positions, _ = frozen.pattern_LHQK.shape
    if not (0 <= layer < n_layers and 0 <= head < n_heads and 0 <= query < n_positions and 0 <= key < n_positions):
        raise GossamerError(
            f"There is no edge from {key} to {query} in head {head} of layer {layer}: the model has {n_layers} layers"
            f" of {n_heads} heads and the prompt {n_positions} tokens, all counted from 0."
        )
    with tape(frozen.model.hf, record=["scores"], layers=[layer]) as run:
        frozen.model.hf(input_ids=frozen.ids_Q[None], use_cache=False, logits_to_keep=1)
    score = float(run["scores", layer][0, head, query, key])
    if not np.isfinite(score):
        raise GossamerError(f"Position {query} may not attend to {key}, so that edge has no score to split.")
    return score


def is_bilinear(model: LoadedModel) -> bool:
    """Whether gate logits (of a dense model, scores) are products of query and key, which can be split."""
    return not _decides_by_share(model) and not _caps_scores(model)


def _decides_by_share(model: LoadedModel) -> bool:
    return model.gate is not None and model.gate.kind != "logit"


def _caps_scores(model: LoadedModel) -> bool:
    return bool(getattr(model.hf.config, "attn_logit_softcapping", None))


def _require_bilinear(model: LoadedModel) -> None:
    if _decides_by_share(model):
        assert model.gate is not None
        raise GossamerError(
            f"A {model.gate.kind} gate decides by an edge's share of its row, which is no product of query and key;"
            " only logit gates can be split."
        )
    if _caps_scores(model):
        raise GossamerError(
            f"{model.name} caps its scores softly, so they are no product of query and key and cannot be split."
        )
