"""Edge patching as slow and obvious as can be: one receiver after the other, each by running whole modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer import LoadedModel
from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.streams import Parts


class SlowEdges:
    """Keeps what each source wrote under its name, and computes each receiver's input as a plain sum over sources.

    A head's query is cut out of what the whole attention module projects when ALL of it is given that head's query
    input; likewise for keys and values. A head's share is what the output projection makes of that head alone.
    """

    def __init__(self, model: LoadedModel, clean_BT: Tensor, corrupt_BT: Tensor) -> None:
        self.model, self.anatomy = model, model.anatomy
        self.graph: ComponentGraph = Parts.of(model).graph
        self.block_calls = self._block_calls(clean_BT)
        self.embedded = {"clean": self._embedding(clean_BT), "corrupt": self._embedding(corrupt_BT)}
        self.corrupt: dict[str, Tensor] = {}
        nothing_SR = np.zeros_like(self.graph.is_edge_SR)
        self.corrupt = self._run(self.embedded["corrupt"], np.ones_like(nothing_SR))

    @torch.no_grad()
    def logits(self, kept_SR: np.ndarray) -> Tensor:
        """Logits [B,V] after the last token of the circuit's run."""
        return self._run(self.embedded["clean"], kept_SR)["logits"]

    def _run(self, embedded_BTD: Tensor, kept_SR: np.ndarray) -> dict[str, Tensor]:
        written = {"input": embedded_BTD}
        for layer in range(self.graph.n_layers):
            names = [f"a{layer}.h{head}" for head in range(self.graph.n_heads)]
            if self.anatomy.parallel:  # both read the stream in front of the block
                mlp_BTD = self._mlp(layer, self._input(self.graph.mlp_receiver(layer), written, kept_SR))
                written |= dict(zip(names, self._heads(layer, written, kept_SR), strict=True))
            else:
                written |= dict(zip(names, self._heads(layer, written, kept_SR), strict=True))
                mlp_BTD = self._mlp(layer, self._input(self.graph.mlp_receiver(layer), written, kept_SR))
            written[f"m{layer}"] = mlp_BTD
        last_BTD = self.anatomy.final_norm(self._input(self.graph.logits_receiver, written, kept_SR))
        logits_BV = self.anatomy.unembedding(last_BTD[:, -1])
        softcap = getattr(self.model.hf.config, "final_logit_softcapping", None)
        written["logits"] = logits_BV if softcap is None else softcap * torch.tanh(logits_BV / softcap)
        return written

    def _input(self, receiver: int, written: dict[str, Tensor], kept_SR: np.ndarray) -> Tensor:
        total = torch.zeros_like(written["input"])
        for source in range(self.graph.n_sources_of(receiver)):
            name = self.graph.sources[source].name
            total = total + (written[name] if kept_SR[source, receiver] else self.corrupt[name])
        return total

    def _mlp(self, layer: int, resid_BTD: Tensor) -> Tensor:
        norm, mlp = self.anatomy.mlp_norms[layer], self.anatomy.mlps[layer]
        out_BTD = mlp(resid_BTD if norm is None else norm(resid_BTD))
        writer = self.anatomy.mlp_writers[layer]
        return out_BTD if writer is mlp else writer(out_BTD)

    def _heads(self, layer: int, written: dict[str, Tensor], kept_SR: np.ndarray) -> list[Tensor]:
        graph, first = self.graph, self.graph.attention_receivers(layer).start
        assembled: dict[nn.Module, Tensor] = {}
        for receiver in range(first, first + graph.receivers_per_layer - 1):
            node = graph.receivers[receiver]
            projected = self._projected(layer, self._input(receiver, written, kept_SR))
            module, columns = self._columns(layer, node.kind, node.head)
            if module not in assembled:
                assembled[module] = torch.zeros_like(projected[module])
            assembled[module][..., columns] = projected[module][..., columns]
        return self._shares(layer, assembled)

    def _columns(self, layer: int, kind: str, head: int) -> tuple[nn.Module, slice]:
        """Where a head's query, key or value is in the output of which projection."""
        anatomy, modules = self.anatomy, self.anatomy.input_projections[layer]
        width, number = anatomy.d_head, "qkv".index(kind)
        if len(modules) == 3:
            return modules[number], slice(head * width, (head + 1) * width)
        if anatomy.family == "gpt_neox":
            start = (3 * head + number) * width
        else:
            start = (0, anatomy.n_heads, anatomy.n_heads + anatomy.n_key_heads)[number] * width + head * width
        return modules[0], slice(start, start + width)

    def _projected(self, layer: int, resid_BTD: Tensor) -> dict[nn.Module, Tensor]:
        norm = self.anatomy.attention_norms[layer]
        normed_BTD = resid_BTD if norm is None else norm(resid_BTD)
        return {module: module(normed_BTD) for module in self.anatomy.input_projections[layer]}

    def _shares(self, layer: int, assembled: dict[nn.Module, Tensor]) -> list[Tensor]:
        """What each head writes when the projections return what was assembled."""
        anatomy, attention = self.anatomy, self.anatomy.attentions[layer]
        seen: list[Tensor] = []
        hooks = [module.register_forward_hook(lambda m, *_: assembled[m]) for module in assembled]
        projection = anatomy.output_projections[layer]
        hooks.append(projection.register_forward_pre_hook(lambda _, args: seen.append(args[0])))
        out_BTD = self._call_attention(layer, attention, self.embedded_like(layer))
        for hook in hooks:
            hook.remove()
        (heads_BTX,) = seen
        shares, nothing_BTD = [], projection(torch.zeros_like(heads_BTX))
        for head in range(anatomy.n_heads):
            alone_BTX = torch.zeros_like(heads_BTX)
            columns = slice(head * anatomy.d_head, (head + 1) * anatomy.d_head)
            alone_BTX[..., columns] = heads_BTX[..., columns]
            shares.append(projection(alone_BTX) - nothing_BTD + nothing_BTD / anatomy.n_heads)
        writer = anatomy.attention_writers[layer]
        if writer is not attention:  # a post-norm: the factor it applied to the whole
            factor_BTD = writer(out_BTD) / out_BTD
            shares = [share * factor_BTD for share in shares]
        return shares

    def embedded_like(self, layer: int) -> Tensor:
        return torch.zeros_like(self.embedded["clean"])

    def _call_attention(self, layer: int, attention: nn.Module, hidden_BTD: Tensor) -> Tensor:
        args, kwargs = self.block_calls[layer]
        if args:
            args = (hidden_BTD, *args[1:])
        else:
            kwargs = kwargs | {"hidden_states": hidden_BTD}
        return attention(*args, **kwargs)[0]

    def _block_calls(self, ids_BT: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """How each attention module is called in an ordinary run (masks, positions)."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        hooks = [
            attention.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
            for attention in self.anatomy.attentions
        ]
        self.model.logits(ids_BT)
        for hook in hooks:
            hook.remove()
        return calls

    def _embedding(self, ids_BT: Tensor) -> Tensor:
        seen: list[Tensor] = []
        hook = self.anatomy.blocks[0].register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        self.model.logits(ids_BT)
        hook.remove()
        return seen[0]


class FrozenNorm(nn.Module):
    """A norm with the scale that it had on one input: affine."""

    def __init__(self, norm: nn.Module, seen_BTD: Tensor) -> None:
        super().__init__()
        self.centres = isinstance(norm, nn.LayerNorm)
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        size = (
            seen_BTD.var(-1, keepdim=True, unbiased=False) if self.centres else seen_BTD.square().mean(-1, keepdim=True)
        )
        self.scale = torch.rsqrt(size + (norm.eps if self.centres else norm.epsilon))

    def forward(self, x: Tensor) -> Tensor:
        if self.centres:
            x = x - x.mean(-1, keepdim=True)
        scale = self.scale if x.shape[-2] == self.scale.shape[-2] else self.scale[:, -x.shape[-2] :]
        normed = x * scale * self.weight
        return normed if self.bias is None else normed + self.bias


@torch.no_grad()
def freeze_norms(model: LoadedModel, ids_BT: Tensor) -> None:
    """Replace every norm of the residual stream by itself frozen in the run on these prompts."""
    anatomy = model.anatomy
    norms = {id(n): n for n in (*anatomy.attention_norms, *anatomy.mlp_norms, anatomy.final_norm) if n is not None}
    if anatomy.post_norm:
        norms |= {id(n): n for n in (*anatomy.attention_writers, *anatomy.mlp_writers)}
    seen: dict[int, Tensor] = {}
    hooks = [norm.register_forward_pre_hook(lambda m, args: seen.update({id(m): args[0]})) for norm in norms.values()]
    model.logits(ids_BT)
    for hook in hooks:
        hook.remove()
    for parent in list(model.hf.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in norms:
                setattr(parent, name, FrozenNorm(child, seen[id(child)]))
