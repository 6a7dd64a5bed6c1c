"""The bookkeeping of the fast path: a call's tensors cut into boxes, scratch memory, gradients on their way back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from gossamer.attention.call import AttentionCall, GateTerms, Tile, tiles_of
from gossamer.attention.reference import FORBIDDEN

_ALIGN = 16  # matrix products with other widths are up to three times slower


class Frame:
    """What all boxes of one call share: precision, buffers, and masks as something to add to scores."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call
        self.dtype = torch.promote_types(call.query_BHQE.dtype, torch.float32)
        self.device = call.query_BHQE.device
        self.tiles = list(tiles_of(call))
        self.buffers: dict[tuple[int, torch.dtype], Tensor] = {}
        self.largest = max(torch.Size(tile.shape).numel() for tile in self.tiles)
        self.bias_BHQK: Tensor | None = None
        self.has_keys_BHQ1: Tensor | None = None
        self.triangle: Tensor | None = None
        if call.allowed_BHQK is not None:
            self.bias_BHQK = (~call.allowed_BHQK).to(self.dtype).mul_(FORBIDDEN)
            if call.gate is None:  # a gate shuts rows without allowed keys; without one their softmax is cleared
                self.has_keys_BHQ1 = call.allowed_BHQK.any(-1, keepdim=True).to(self.dtype)
        else:
            size = max(tile.shape[2] for tile in self.tiles)
            self.triangle = torch.full((size, size), FORBIDDEN, dtype=self.dtype, device=self.device).triu_(1)

    def boxes(self) -> Iterator[tuple[Box, list[Tile]]]:
        """Runs of tiles over the same batch rows and heads, with their tensors prepared once."""
        for _, run in groupby(self.tiles, key=lambda tile: (tile.batch.start, tile.head.start)):
            tiles = list(run)
            yield Box(self, tiles[0]), tiles

    def buffer(self, slot: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Scratch memory, the same for every tile; a slot's previous content is gone."""
        key = (slot, dtype)
        if key not in self.buffers:
            self.buffers[key] = torch.empty(self.largest, dtype=dtype, device=self.device)
        return self.buffers[key][: torch.Size(shape).numel()].view(shape)


class Box:
    """Some batch rows and heads of a call, flattened to one dimension N, copied into the layout products like."""

    def __init__(self, frame: Frame, tile: Tile) -> None:
        call = frame.call
        self.frame, self.call = frame, call
        self.batch, self.head = tile.batch, tile.head
        self.shape: tuple[int, ...] = ()
        where = (tile.batch, tile.head)
        gate = call.gate
        offset_H = gate.offset_H[tile.head].to(frame.dtype) if gate is not None else None
        query, key = call.query_BHQE[where], call.key_BHKE[where]
        self.q = self._aligned(query, call.scaling)
        self.k = self._aligned(key, 1.0)
        self.v = call.value_BHKE[where].flatten(0, 1)
        same = self.v.dtype == frame.dtype
        self.q_narrow = self.q if same else self.q.to(self.v.dtype)
        self.k_narrow = self.k if same else self.k.to(self.v.dtype)
        rows = query.shape[0]
        self.offset_N11 = None if offset_H is None else offset_H.repeat(rows)[:, None, None]
        self.query_term, self.key_term = self._terms(gate)
        self.sink_N11 = None
        if call.sink_H is not None:
            self.sink_N11 = call.sink_H[tile.head].to(frame.dtype).repeat(rows)[:, None, None]
        self.p_sink: Tensor | None = None
        self.slope: Tensor | None = None
        self.per_unit_N11: Tensor | None = None
        if call.noise is not None and call.noise.unit_H is not None:
            self.per_unit_N11 = (1 / call.noise.unit_H[tile.head].to(frame.dtype)).repeat(rows)[:, None, None]

    def _aligned(self, source: Tensor, scale: float) -> Tensor:
        rows, heads, length, width = source.shape
        aligned = -(-width // _ALIGN) * _ALIGN
        box = torch.zeros(rows, heads, length, aligned, dtype=self.frame.dtype, device=source.device)
        box[..., :width] = source
        if scale != 1.0:
            box.mul_(scale)
        return box.flatten(0, 1)

    def _terms(self, gate: GateTerms | None) -> tuple[Tensor | None, Tensor | None]:
        if gate is None or gate.query_term_BQ is None or gate.key_term_BHK is None:
            return None, None
        query_BQ = gate.query_term_BQ[self.batch].to(self.frame.dtype)
        key_BHK = gate.key_term_BHK[self.batch, self.head].to(self.frame.dtype)
        return query_BQ.repeat_interleave(key_BHK.shape[1], 0)[:, :, None], key_BHK.flatten(0, 1)[:, None, :]

    def take(self, slot: int) -> Tensor:
        """A scratch tensor of the current tile's shape."""
        return self.frame.buffer(slot, self.shape, self.frame.dtype)

    def take_narrow(self, slot: int) -> Tensor:
        """The same in the values' precision."""
        return self.frame.buffer(slot, self.shape, self.v.dtype)

    def narrow(self, tensor: Tensor, slot: int) -> Tensor:
        """A tile in the values' precision."""
        return tensor if tensor.dtype == self.v.dtype else self.take_narrow(slot).copy_(tensor)

    def split(self, flat: Tensor) -> Tensor:
        """N back to batch and heads."""
        rows = self.batch.stop - self.batch.start
        return flat.unflatten(0, (rows, flat.shape[0] // rows))

    def per_head(self, flat: Tensor) -> Tensor:
        """Sums over everything but heads."""
        return self.split(flat.sum((1, 2))).sum(0)

    def probabilities(self, tile: Tile, *, keep_slope: bool = False) -> tuple[Tensor, Tensor]:
        """Softmax over allowed keys, and gate logits (far below zero on forbidden pairs); slots 0 and 1."""
        call = self.call
        self.shape = (self.q.shape[0], tile.shape[2], tile.shape[3])
        s = torch.bmm(self.q[:, tile.query], self.k[:, tile.key].transpose(1, 2), out=self.take(0))
        if call.softcap is not None:
            s.mul_(1 / call.softcap).tanh_()
            if keep_slope:
                self.slope = 1 - s.square()
            s.mul_(call.softcap)
        self._forbid(s, tile)
        if call.gate is not None and call.gate.relative:
            g = torch.log_softmax(s, -1, out=self.take(1))
            if self.sink_N11 is not None:
                g.add_(self._beside_sink(s, logarithm=True))
            p = torch.exp(g, out=s)
            assert self.offset_N11 is not None
            g.add_(self.offset_N11 if self.query_term is None else self.offset_N11 + self.query_term[:, tile.query])
            if self.key_term is not None:
                g.add_(self.key_term[..., tile.key])
            if self.frame.bias_BHQK is not None:
                self._forbid(g, tile)
            return p, g
        p = torch.softmax(s, -1, out=self.take(1))
        if self.sink_N11 is not None:
            p.mul_(self._beside_sink(s, logarithm=False))
        if self.frame.has_keys_BHQ1 is not None:
            self.split(p).mul_(self._mine(self.frame.has_keys_BHQ1, tile))
        if self.offset_N11 is not None:
            s.add_(self.offset_N11)
        return p, s

    def in_units(self, logits: Tensor) -> Tensor:
        """Gate logits in their head's own unit (or gradients of such), in place."""
        return logits if self.per_unit_N11 is None else logits.mul_(self.per_unit_N11)

    def _beside_sink(self, s: Tensor, *, logarithm: bool) -> Tensor:
        """The share of attention that a learned sink leaves to the keys."""
        assert self.sink_N11 is not None
        advantage = s.logsumexp(-1, keepdim=True) - self.sink_N11
        self.p_sink = torch.sigmoid(-advantage)
        return functional.logsigmoid(advantage) if logarithm else torch.sigmoid(advantage)

    def _forbid(self, scores: Tensor, tile: Tile) -> None:
        if self.frame.bias_BHQK is not None:
            self.split(scores).add_(self._mine(self.frame.bias_BHQK, tile)[..., tile.key])
        elif tile.shape[2] > 1:
            assert self.frame.triangle is not None
            size = tile.shape[2]
            scores[:, :, -size:].add_(self.frame.triangle[:size, :size])

    @staticmethod
    def _mine(shared_BHQX: Tensor, tile: Tile) -> Tensor:
        rows = tile.batch if shared_BHQX.shape[0] > 1 else slice(None)
        heads = tile.head if shared_BHQX.shape[1] > 1 else slice(None)
        return shared_BHQX[rows, heads, tile.query]

    def add_noise(self, tile: Tile, g: Tensor) -> None:
        """`z = g + tau n`, in place."""
        noise = self.call.noise
        assert noise is not None
        if noise.tau:
            g.add_(noise.tile(tile.index, tile.shape, g).view(g.shape), alpha=noise.tau)

    def open_gradients(self, out_BQHE: Tensor, grad_out_BQHE: Tensor, grad_expected_H: Tensor | None) -> BoxGradients:
        """Accumulators for this box."""
        where = (self.batch, slice(None), self.head)
        out, dout = out_BQHE[where].transpose(1, 2).flatten(0, 1), grad_out_BQHE[where].transpose(1, 2).flatten(0, 1)
        return BoxGradients(self, out, dout, grad_expected_H)


class BoxGradients:
    """Gradients of one box while its tiles are visited."""

    def __init__(self, box: Box, out: Tensor, dout: Tensor, grad_expected_H: Tensor | None) -> None:
        dtype, call = box.frame.dtype, box.call
        self.dout = dout.to(box.v.dtype).contiguous()
        self.minus_delta = -(dout.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
        self.dq = torch.zeros_like(box.q)
        self.dk = torch.zeros_like(box.k)
        self.dv = torch.zeros_like(box.v, dtype=dtype)
        rows = box.q.shape[0]
        self.doffset, self.dsink = (torch.zeros(rows, dtype=dtype, device=out.device) for _ in range(2))
        self.dquery = None if box.query_term is None else torch.zeros_like(box.query_term)
        self.dkey = None if box.key_term is None else torch.zeros_like(box.key_term)
        if call.noise is not None:
            assert grad_expected_H is not None
            repeats = rows // (box.head.stop - box.head.start)
            self.expected = (grad_expected_H[box.head].to(dtype) / call.noise.penalty_tau).repeat(repeats)[
                :, None, None
            ]
            self.surrogate = torch.full((1, 1, 1), 1 / call.noise.tau_backward, dtype=dtype, device=out.device)

    def add_gate(self, tile: Tile, dg: Tensor) -> None:
        """Gradients of the gate's terms."""
        self.doffset += dg.sum((1, 2))
        if self.dquery is not None and self.dkey is not None:
            self.dquery[:, tile.query] += dg.sum(-1, keepdim=True)
            self.dkey[..., tile.key] += dg.sum(1, keepdim=True)


class Gradients:
    """Gradients of all inputs, in the inputs' shapes and precision."""

    def __init__(self, call: AttentionCall, dtype: torch.dtype) -> None:
        gate = call.gate
        self.call, self.dtype = call, dtype
        self.dq, self.dk, self.dv = (torch.empty_like(t) for t in (call.query_BHQE, call.key_BHKE, call.value_BHKE))
        wide: list[Tensor | None] = []
        inputs = (gate.offset_H, gate.query_term_BQ, gate.key_term_BHK) if gate is not None else (None, None, None)
        for tensor in (*(inputs if call.noise is not None else (None, None, None)), call.sink_H):
            wide.append(None if tensor is None else torch.zeros_like(tensor, dtype=dtype))
        self.doffset_H, self.dquery_BQ, self.dkey_BHK, self.dsink_H = wide

    def store(self, box: Box, grads: BoxGradients) -> None:
        """Put a finished box where it belongs."""
        where, width = (box.batch, box.head), self.dq.shape[-1]
        self.dq[where] = box.split(grads.dq[..., :width].mul_(self.call.scaling))
        self.dk[where] = box.split(grads.dk[..., :width])
        self.dv[where] = box.split(grads.dv)
        if self.doffset_H is not None:
            self.doffset_H[box.head] += box.split(grads.doffset).sum(0)
        if self.dsink_H is not None:
            self.dsink_H[box.head] += box.split(grads.dsink).sum(0)
        if self.dquery_BQ is not None and self.dkey_BHK is not None:
            assert grads.dquery is not None
            assert grads.dkey is not None
            self.dquery_BQ[box.batch] += box.split(grads.dquery[:, :, 0]).sum(1)
            self.dkey_BHK[where] += box.split(grads.dkey[:, 0])

    def finish(self) -> tuple[Tensor | None, ...]:
        """In the order of the function's inputs; without sampling, open edges and gate terms are constants."""
        gate = self.call.gate
        inputs = (gate.offset_H, gate.query_term_BQ, gate.key_term_BHK) if gate is not None else (None, None, None)
        wide = (self.doffset_H, self.dquery_BQ, self.dkey_BHK, self.dsink_H)
        small = [
            None if grad is None or tensor is None else grad.to(tensor.dtype)
            for grad, tensor in zip(wide, (*inputs, self.call.sink_H), strict=True)
        ]
        return (self.dq, self.dk, self.dv, *small)
