"""Exact edge patching: a run in which every node sees its own mixture of clean and corrupt inputs.

With `w_u` what source u writes in the patched run and `w_u(corrupt)` what it wrote in the corrupt run, receiver v reads

    x_v = x_v(corrupt) + sum over kept edges u -> v of (w_u - w_u(corrupt)),

so that over an edge outside the circuit it gets what u wrote in the corrupt run. The embedding writes its clean value.
Each receiver is normed, projected and computed on its own input: every head has its own query input, every key head its
own key and value input. With all edges kept this is the clean run, with none the corrupt run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer.circuits.projections import InputSlices
from gossamer.circuits.streams import Listener, Parts, Recorder


class PatchedRun(Listener):
    """The listener that mixes inputs; run it on the CLEAN prompts. `kept_SR` may hold shares between 0 and 1."""

    splits_heads = True
    replaces_projections = True

    def __init__(self, parts: Parts, corrupt: Recorder, kept_SR: Tensor) -> None:
        self.parts, self.graph, self.corrupt = parts, parts.graph, corrupt
        self.kept_SR = kept_SR.to(corrupt.written_SBTD)
        self.changed_SBTD = torch.zeros_like(corrupt.written_SBTD)

    def embedded(self, resid_BTD: Tensor) -> None:
        """The embedding writes its clean value."""
        self.changed_SBTD[0] = resid_BTD - self.corrupt.written_SBTD[0]

    def projection(self, layer: int, part: InputSlices, out: Tensor) -> Tensor:
        """Queries, keys and values, each from its own input."""
        first = self.graph.attention_receivers(layer).start
        receivers = slice(first + part.receivers.start, first + part.receivers.stop)
        # receivers that keep the same read the same: mixed and normed once
        kept_US, which_R = torch.unique(self._kept(receivers), dim=0, return_inverse=True)
        mixed_UBTD = self._mixed(self.corrupt.attention_reads_LBTD[layer], kept_US)
        norm = self.parts.model.anatomy.attention_norms[layer]
        normed_UBTD = mixed_UBTD if norm is None else norm(mixed_UBTD)
        return part.project(normed_UBTD[which_R])

    def heads_wrote(self, layer: int, shares_HBTD: Tensor) -> None:
        """Remember how the heads' writing differs from the corrupt run."""
        heads = self.graph.head_sources(layer)
        torch.sub(shares_HBTD, self.corrupt.written_SBTD[heads], out=self.changed_SBTD[heads])

    def mlp_reads(self, layer: int, resid_BTD: Tensor) -> Tensor:
        """The MLP's own input."""
        return self._single(self.corrupt.mlp_reads_LBTD[layer], self.graph.mlp_receiver(layer))

    def mlp_wrote(self, layer: int, out_BTD: Tensor) -> None:
        """Remember how the MLP's writing differs from the corrupt run."""
        source = self.graph.mlp_source(layer)
        torch.sub(out_BTD, self.corrupt.written_SBTD[source], out=self.changed_SBTD[source])

    def logits_read(self, resid_BTD: Tensor) -> Tensor:
        """The final norm's own input."""
        return self._single(self.corrupt.logits_reads_BTD, self.graph.logits_receiver)

    def _mixed(self, corrupt_BTD: Tensor, kept_RS: Tensor) -> Tensor:
        """The inputs [R,B,T,D] of receivers that read at the same place."""
        changed_SX = self.changed_SBTD[: kept_RS.shape[1]].flatten(1)
        used_S = kept_RS.any(0)
        if int(used_S.sum()) < len(used_S) / 2:  # then a copy of these is cheaper than all the others' zeros
            kept_RS, changed_SX = kept_RS[:, used_S], changed_SX[used_S]
        return torch.addmm(corrupt_BTD.reshape(1, -1), kept_RS, changed_SX).unflatten(1, corrupt_BTD.shape)

    def _kept(self, receivers: slice) -> Tensor:
        """What each of these receivers keeps of the sources in front of it."""
        return self.kept_SR[: self.graph.n_sources_of(receivers.start), receivers].T

    def _single(self, corrupt_BTD: Tensor, receiver: int) -> Tensor:
        return self._mixed(corrupt_BTD, self._kept(slice(receiver, receiver + 1)))[0]


@torch.no_grad()
def patched_logits(parts: Parts, clean_BT: Tensor, corrupt: Recorder, kept_SR: Tensor) -> Tensor:
    """Logits [B,V] after the last token of the clean prompts when only the kept edges carry what the run computes."""
    return parts.logits(clean_BT, PatchedRun(parts, corrupt, kept_SR))
