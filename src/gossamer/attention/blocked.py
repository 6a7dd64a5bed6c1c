"""Gated attention tile by tile: the reference's result with memory linear in length, and its own backward.

A tile is a box of (batch, head, query, key) small enough to stay in the processor's cache; every step works in place on
a few buffers of that size. Nothing of size query x key survives the forward: the backward recomputes each tile from
queries, keys and values. Scores, softmax and gate logits are at least float32; the products with values and gradients
run in the values' own precision (bfloat16 under autocast).

With p = softmax, A = open edges, dP = dO V^T, delta_i = dO_i . o_i, and dg the gradient of the gate logits:

    dg = dP p sigmoid'(z / tau_b) / tau_b + expected' sigmoid'(g / tau_p) / tau_p
    ds = p (A dP - delta - [relative] sum_j dg) + dg
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gossamer.attention.boxes import Box, BoxGradients, Frame, Gradients
from gossamer.attention.call import AttentionCall, GateTerms, Tile
from gossamer.attention.reference import FORBIDDEN


def blocked_attention(call: AttentionCall) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Output [B,Q,H,E]; with sampling also the expected open edges [H] (differentiable) and the open ones [H]."""
    assert not call.dropout, "dropout of attention weights is the reference's business"
    gate = call.gate
    terms = (gate.offset_H, gate.query_term_BQ, gate.key_term_BHK) if gate is not None else (None, None, None)
    out_BQHE, expected_H, open_H = _Blocked.apply(
        call.query_BHQE, call.key_BHKE, call.value_BHKE, *terms, call.sink_H, call
    )
    return (out_BQHE, expected_H, open_H) if call.noise is not None else (out_BQHE, None, None)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BHQE: Tensor,
        key_BHKE: Tensor,
        value_BHKE: Tensor,
        offset_H: Tensor | None,
        query_term_BQ: Tensor | None,
        key_term_BHK: Tensor | None,
        sink_H: Tensor | None,
        call: AttentionCall,
    ) -> tuple[Tensor, Tensor, Tensor]:
        out_BQHE, expected_H, open_H = _forward(call)
        ctx.save_for_backward(query_BHQE, key_BHKE, value_BHKE, offset_H, query_term_BQ, key_term_BHK, sink_H, out_BQHE)
        ctx.call = _without_tensors(call)
        ctx.mark_non_differentiable(open_H)
        return out_BQHE, expected_H, open_H

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out_BQHE: Tensor, grad_expected_H: Tensor, _grad_open: Tensor) -> tuple[Any, ...]:
        *tensors, out_BQHE = ctx.saved_tensors
        call = _with_tensors(ctx.call, *tensors)
        with torch.autocast(out_BQHE.device.type, enabled=False):
            gradients = _backward(call, out_BQHE, grad_out_BQHE, grad_expected_H)
        return (*gradients, None)


def _forward(call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, n_query, _ = call.query_BHQE.shape
    out_BQHE = call.value_BHKE.new_zeros(batch, n_query, heads, call.value_BHKE.shape[-1])
    frame = Frame(call)
    expected_H, open_H = (torch.zeros(heads, dtype=frame.dtype, device=out_BQHE.device) for _ in range(2))
    for box, tiles in frame.boxes():
        for tile in tiles:
            p, g = box.probabilities(tile)
            if call.gate is not None:
                if call.noise is not None:
                    tau = call.noise.penalty_tau
                    box.in_units(g)
                    w = torch.sigmoid(g if tau == 1 else torch.mul(g, 1 / tau, out=box.take(2)), out=box.take(2))
                    expected_H[tile.head] += box.per_head(w)
                    box.add_noise(tile, g)
                is_open = torch.gt(g, 0, out=box.take(2))
                if call.noise is not None:
                    open_H[tile.head] += box.per_head(is_open)
                if call.watch is not None:
                    call.watch(tile, box.split(p), box.split(is_open))
                p.mul_(is_open)
            elif call.watch is not None:
                call.watch(tile, box.split(p), box.split(torch.gt(g, FORBIDDEN / 2, out=box.take(2))))
            out = torch.bmm(box.narrow(p, 2), box.v[:, tile.key])
            out_BQHE[tile.batch, tile.query, tile.head] = box.split(out).transpose(1, 2)
    return out_BQHE, expected_H, open_H


def _backward(
    call: AttentionCall, out_BQHE: Tensor, grad_out_BQHE: Tensor, grad_expected_H: Tensor | None
) -> tuple[Tensor | None, ...]:
    frame = Frame(call)
    totals = Gradients(call, frame.dtype)
    for box, tiles in frame.boxes():
        grads = box.open_gradients(out_BQHE, grad_out_BQHE, grad_expected_H)
        for tile in tiles:
            p, g = box.probabilities(tile, keep_slope=True)
            dout = grads.dout[:, tile.query]
            dp = torch.bmm(dout, box.v[:, tile.key].transpose(1, 2), out=box.take_narrow(6))
            dp = dp if dp.dtype == frame.dtype else box.take(3).copy_(dp)
            dg = None
            if call.gate is None:
                carried = p
            else:
                dg, is_open = _open_and_surrogate(call, box, tile, grads, p, g, dp)
                carried = torch.mul(p, is_open, out=is_open)
            carried_narrow = box.narrow(carried, 5)
            grads.dv[:, tile.key] += torch.bmm(carried_narrow.transpose(1, 2), dout)
            ds = dp.mul_(carried)
            minus = grads.minus_delta[:, tile.query]
            if dg is not None and call.gate is not None and call.gate.relative:
                minus = minus - dg.sum(-1, keepdim=True)
            ds.addcmul_(p, minus.expand_as(p))
            if dg is not None:
                ds.add_(dg)
                grads.add_gate(tile, dg)
            if box.p_sink is not None:
                grads.dsink += (box.p_sink * minus).sum((1, 2))
            if box.slope is not None:
                ds.mul_(box.slope)
            ds = box.narrow(ds, 5)
            grads.dq[:, tile.query] = torch.bmm(ds, box.k_narrow[:, tile.key])
            grads.dk[:, tile.key] += torch.bmm(ds.transpose(1, 2), box.q_narrow[:, tile.query])
        totals.store(box, grads)
    return totals.finish()


def _open_and_surrogate(
    call: AttentionCall, box: Box, tile: Tile, grads: BoxGradients, p: Tensor, g: Tensor, dp: Tensor
) -> tuple[Tensor | None, Tensor]:
    """The gradient of the gate logits (None without sampling) and the open edges; overwrites `g`."""
    noise = call.noise
    if noise is None:
        return None, torch.gt(g, 0, out=box.take(2))
    backward = torch.ops.aten.sigmoid_backward.grad_input  # gradient * s * (1 - s) in one pass
    tau = noise.penalty_tau
    box.in_units(g)
    dg = torch.sigmoid(g if tau == 1 else torch.mul(g, 1 / tau, out=box.take(4)), out=box.take(4))
    dg = backward(grads.expected.expand_as(g), dg, grad_input=dg)
    box.add_noise(tile, g)
    is_open = torch.gt(g, 0, out=box.take(2))
    if noise.tau_backward != 1:
        g.mul_(1 / noise.tau_backward)
    slope = backward(grads.surrogate.expand_as(g), g.sigmoid_(), grad_input=g)
    dg.addcmul_(slope.mul_(p), dp)
    return box.in_units(dg), is_open


def _without_tensors(call: AttentionCall) -> AttentionCall:
    """The call without what autograd keeps (or it would never be freed)."""
    empty = call.query_BHQE.new_empty(0)
    gate = None if call.gate is None else GateTerms(empty, call.gate.relative)
    return AttentionCall(
        empty, empty, empty, call.scaling, call.allowed_BHQK, gate, call.noise, call.softcap, None, call.dropout
    )


def _with_tensors(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offset: Tensor | None,
    query_term: Tensor | None,
    key_term: Tensor | None,
    sink: Tensor | None,
) -> AttentionCall:
    gate = None
    if call.gate is not None:
        assert offset is not None
        gate = GateTerms(offset, call.gate.relative, query_term, key_term)
    return AttentionCall(
        query, key, value, call.scaling, call.allowed_BHQK, gate, call.noise, call.softcap, sink, call.dropout
    )
