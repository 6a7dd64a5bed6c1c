"""The definition of gated attention, materialised, in the order of the formulas: the specification of every fast path.

1. scores       s_ij = scaling * q_i . k_j, soft-capped if the model says so
2. softmax      over ALL allowed keys (and the learned sink, if any)
3. gate logits  g_ij = s_ij, or log softmax(s)_ij, plus the gate's terms
4. open edges   A_ij = 1[g_ij + tau * n_ij > 0], on allowed pairs only
5. output       o_i = sum_j A_ij softmax(s_i)_j v_j, not renormalised
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.attention.call import AttentionCall, GateTerms, tiles_of
from gossamer.attention.sampling import LayerNoise

FORBIDDEN = (
    -1e30
)  # a score that no exponential survives, and that gradients do (minus infinity makes NaN of empty rows)


@dataclass(frozen=True)
class Edits:
    """What a tape changes: a frozen pattern, edges forced open or shut, or the weights themselves."""

    frozen_open_BHQK: Tensor | None = None
    force_open_BHQK: Tensor | None = None
    force_shut_BHQK: Tensor | None = None
    weights_BHQK: Tensor | None = None
    replaced_H: Tensor | None = None


@dataclass(frozen=True)
class Extras:
    """Everything on the way: scores, softmax before the gate, gate logits, open edges, weights used, and the sums."""

    scores_BHQK: Tensor
    softmax_BHQK: Tensor
    gate_BHQK: Tensor | None
    open_BHQK: Tensor
    weights_BHQK: Tensor
    expected_open_H: Tensor | None
    open_H: Tensor


def gated_attention(call: AttentionCall, edits: Edits | None = None) -> tuple[Tensor, Extras]:
    """Gated attention by its definition: output [B,Q,H,E] and everything on the way to it."""
    wide = torch.promote_types(call.query_BHQE.dtype, torch.float32)
    allowed_BHQK = call.explicit_allowed()
    scores_BHQK = call.query_BHQE.to(wide) @ call.key_BHKE.to(wide).transpose(-1, -2) * call.scaling
    if call.softcap is not None:
        scores_BHQK = call.softcap * torch.tanh(scores_BHQK / call.softcap)
    masked_BHQK = scores_BHQK.masked_fill(~allowed_BHQK, FORBIDDEN)
    normaliser_BHQ1 = masked_BHQK.logsumexp(-1, keepdim=True)
    if call.sink_H is not None:
        normaliser_BHQ1 = torch.logaddexp(normaliser_BHQ1, call.sink_H.to(wide)[:, None, None])
    # a row without any allowed key has no softmax: zeros, and finite gradients
    normaliser_BHQ1 = normaliser_BHQ1.masked_fill(~allowed_BHQK.any(-1, keepdim=True), 0.0)
    log_softmax_BHQK = (scores_BHQK - normaliser_BHQ1).masked_fill(~allowed_BHQK, -torch.inf)
    softmax_BHQK = log_softmax_BHQK.exp()

    gate_BHQK, expected_H = None, None
    open_BHQK = torch.ones_like(softmax_BHQK)
    if call.gate is not None:
        gate_BHQK = gate_logits(call.gate, scores_BHQK, scores_BHQK - normaliser_BHQ1)
        open_BHQK = open_edges(call, gate_BHQK)
        if call.noise is not None:
            probability_BHQK = torch.sigmoid(in_units(gate_BHQK, call.noise) / call.noise.penalty_tau)
            expected_H = (probability_BHQK * allowed_BHQK).sum((0, 2, 3))
    open_BHQK = edit_open(open_BHQK, edits) * allowed_BHQK

    weights_BHQK = softmax_BHQK * open_BHQK
    if edits is not None and edits.weights_BHQK is not None:
        assert edits.replaced_H is not None
        weights_BHQK = torch.where(edits.replaced_H[:, None, None], edits.weights_BHQK.to(wide), weights_BHQK)
    dropped_BHQK = functional.dropout(weights_BHQK, call.dropout) if call.dropout else weights_BHQK
    out_BQHE = (dropped_BHQK.to(call.value_BHKE.dtype) @ call.value_BHKE).transpose(1, 2)
    extras = Extras(
        scores_BHQK, softmax_BHQK, gate_BHQK, open_BHQK, weights_BHQK, expected_H, open_BHQK.detach().sum((0, 2, 3))
    )
    return out_BQHE, extras


def gate_logits(gate: GateTerms, scores_BHQK: Tensor, log_softmax_BHQK: Tensor) -> Tensor:
    """`g`, before any mask: finite everywhere, so that gradients are."""
    logits_BHQK = log_softmax_BHQK if gate.relative else scores_BHQK
    logits_BHQK = logits_BHQK + gate.offset_H.to(logits_BHQK.dtype)[:, None, None]
    if gate.query_term_BQ is not None:
        logits_BHQK = logits_BHQK + gate.query_term_BQ[:, None, :, None]
    if gate.key_term_BHK is not None:
        logits_BHQK = logits_BHQK + gate.key_term_BHK[:, :, None, :]
    return logits_BHQK


def open_edges(call: AttentionCall, gate_BHQK: Tensor) -> Tensor:
    """`A` as numbers: constant without sampling, straight-through with it."""
    if call.noise is None:
        return (gate_BHQK > 0).to(gate_BHQK.dtype)
    noisy_BHQK = in_units(gate_BHQK, call.noise) + call.noise.tau * noise_of(call, call.noise, gate_BHQK)
    soft_BHQK = torch.sigmoid(noisy_BHQK / call.noise.tau_backward)
    return (noisy_BHQK > 0).to(gate_BHQK.dtype) + (soft_BHQK - soft_BHQK.detach())


def in_units(gate_BHQK: Tensor, noise: LayerNoise) -> Tensor:
    """Gate logits in each head's own unit, in which the temperatures are."""
    return gate_BHQK if noise.unit_H is None else gate_BHQK / noise.unit_H.to(gate_BHQK)[:, None, None]


def noise_of(call: AttentionCall, noise: LayerNoise, like_BHQK: Tensor) -> Tensor:
    """The fast path's noise, laid out in full; zero where no pair is allowed."""
    full_BHQK = torch.zeros_like(like_BHQK)
    if noise.tau:
        for tile in tiles_of(call):
            full_BHQK[tile.batch, tile.head, tile.query, tile.key] = noise.tile(tile.index, tile.shape, like_BHQK)
    return full_BHQK


def edit_open(open_BHQK: Tensor, edits: Edits | None) -> Tensor:
    """Frozen pattern first, then forced open, then forced shut."""
    if edits is None:
        return open_BHQK
    if edits.frozen_open_BHQK is not None:
        open_BHQK = edits.frozen_open_BHQK.to(open_BHQK.dtype).expand_as(open_BHQK)
    if edits.force_open_BHQK is not None:
        open_BHQK = torch.where(edits.force_open_BHQK, torch.ones_like(open_BHQK), open_BHQK)
    if edits.force_shut_BHQK is not None:
        open_BHQK = torch.where(edits.force_shut_BHQK, torch.zeros_like(open_BHQK), open_BHQK)
    return open_BHQK
