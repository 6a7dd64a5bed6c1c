"""Slices of the modules that read from and write to the residual stream: one a head, whatever the family fuses.

A head's query, key and value input are projected by rows of a weight that the family keeps together or apart:

    separate   q_proj, k_proj, v_proj: heads one after the other                          Llama, Qwen, OLMo, Gemma, ...
    parts      one module: all queries, then all keys, then all values                    GPT-2, Phi-3
    heads      one module: query, key and value of head 0, then those of head 1, ...      NeoX (query_key_value)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gossamer.attention import gates_of
from gossamer.circuits.component_graph import ComponentGraph
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.models.anatomy import Anatomy

FUSED_IN_PARTS = frozenset({"gpt2", "phi3"})
FUSED_BY_HEADS = frozenset({"gpt_neox"})
SEPARATE = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "smollm3", "olmo", "olmo2", "olmo3", "gemma", "gemma2", "gemma3_text"}
)


def component_graph(model: LoadedModel) -> ComponentGraph:
    """The graph of a model, or the reason why it has none."""
    anatomy = model.anatomy
    if anatomy.family not in FUSED_IN_PARTS | FUSED_BY_HEADS | SEPARATE:
        raise GossamerError(
            f"How {anatomy.family} models keep the projections of their heads is not written down, so they have no edge"
            " circuits; measure circuits of heads instead."
        )
    if any(gate.kind == "flow" for gate in gates_of(model.hf)):
        raise GossamerError(
            "A flow gate reads the size of the whole residual stream, which an edge circuit takes apart; edges are"
            " defined for logit and mass gates, so measure circuits of heads instead."
        )
    if model.dtype not in (torch.float32, torch.float64):
        raise GossamerError(
            f"Edges are differences of large sums, too small for {str(model.dtype).removeprefix('torch.')}; load"
            f" {model.name} with dtype=torch.float32."
        )
    return ComponentGraph(anatomy.n_layers, anatomy.n_heads, anatomy.n_key_heads, anatomy.parallel)


def linear_parts(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight [out, in] and bias [out] of an ordinary linear map."""
    if hasattr(module, "base_layer") or type(module) not in (nn.Linear, Conv1D):
        raise GossamerError(
            f"The attention has a {type(module).__name__} where edge circuits need a plain linear map; merge adapters"
            " (merge_and_unload) and undo quantisation first."
        )
    weight, bias = module.get_parameter("weight"), module.bias
    weight_OI = weight if isinstance(module, nn.Linear) else weight.T
    return weight_OI.detach(), bias.detach() if isinstance(bias, Tensor) else None


@dataclass(frozen=True, eq=False)
class InputSlices:
    """One projection module: which receivers of its layer it serves, and with which rows of its weight."""

    module: nn.Module
    receivers: slice  # within the layer's attention receivers
    weight_RED: Tensor
    bias_RE: Tensor | None
    rows_RE: Tensor  # where each number of each receiver's projection sits in the module's output
    n_rows: int

    def project(self, normed_RBTD: Tensor) -> Tensor:
        """The module's output [B,T,rows] when every receiver has an input of its own."""
        projected_RBTE = torch.einsum("rbtd,red->rbte", normed_RBTD, self.weight_RED)
        if self.bias_RE is not None:
            projected_RBTE = projected_RBTE + self.bias_RE[:, None, None]
        _, batch, length, _ = normed_RBTD.shape
        out = projected_RBTE.new_empty(batch, length, self.n_rows)
        out[:, :, self.rows_RE.flatten()] = projected_RBTE.permute(1, 2, 0, 3).flatten(2)
        return out

    def gradient_to_normed(self, gradient: Tensor) -> Tensor:
        """The gradient [R,B,T,D] at each receiver's normed input, from that at the module's output [B,T,rows]."""
        gradient_BTRE = gradient[:, :, self.rows_RE]
        return torch.einsum("btre,red->rbtd", gradient_BTRE, self.weight_RED)


def input_slices(anatomy: Anatomy, layer: int) -> list[InputSlices]:
    """The projection modules of a layer with their receivers; together they serve each receiver once."""
    modules = anatomy.input_projections[layer]
    n_heads, n_keys, width = anatomy.n_heads, anatomy.n_key_heads, anatomy.d_head
    n_receivers = n_heads + 2 * n_keys
    if len(modules) == 3:
        starts = (0, n_heads, n_heads + n_keys, n_receivers)
        return [
            _slices(module, slice(starts[part], starts[part + 1]), torch.arange(starts[part + 1] - starts[part]), width)
            for part, module in enumerate(modules)
        ]
    (module,) = modules
    places_R = torch.arange(n_receivers)
    if anatomy.family in FUSED_BY_HEADS:  # q, k, v of head 0, then of head 1
        places_R = torch.cat([3 * torch.arange(n_heads) + kind for kind in range(3)])
    return [_slices(module, slice(0, n_receivers), places_R, width)]


def _slices(module: nn.Module, receivers: slice, places_R: Tensor, width: int) -> InputSlices:
    weight, bias = linear_parts(module)
    if weight.shape[0] != len(places_R) * width:
        raise GossamerError(
            f"A projection has {weight.shape[0]} outputs where {len(places_R)} heads of width {width} were expected;"
            " edge circuits do not know this layout."
        )
    rows_RE = (places_R[:, None] * width + torch.arange(width)).to(weight.device)
    bias_RE = None if bias is None else bias[rows_RE]
    return InputSlices(module, receivers, weight[rows_RE], bias_RE, rows_RE, len(weight))


@dataclass(frozen=True, eq=False)
class OutputSlices:
    """The output projection by heads."""

    weight_HED: Tensor
    bias_D: Tensor | None

    def shares(self, heads_BTX: Tensor) -> Tensor:
        """What each head writes [H,B,T,D], from the projection's input; the bias is split evenly."""
        n_heads, width, _ = self.weight_HED.shape
        heads_BTHE = heads_BTX.unflatten(-1, (n_heads, width))
        shares_HBTD = torch.einsum("bthe,hed->hbtd", heads_BTHE, self.weight_HED)
        return shares_HBTD if self.bias_D is None else shares_HBTD + self.bias_D / n_heads


def output_slices(anatomy: Anatomy, layer: int) -> OutputSlices:
    """The output projection of a layer, cut by heads."""
    weight, bias = linear_parts(anatomy.output_projections[layer])
    return OutputSlices(weight.T.unflatten(0, (anatomy.n_heads, -1)), bias)


def post_norm_scale(norm: nn.Module, before_BTD: Tensor, after_BTD: Tensor) -> Tensor:
    """The factors [B,T,D] by which a root-mean-square norm multiplied its input in this call."""
    large = 1e4  # so that the norm's epsilon does not count
    weight_D = norm.forward(torch.full_like(before_BTD[:1, :1], large))[0, 0]  # past the hooks
    weighted_BTD = before_BTD * weight_D
    size_BT1 = weighted_BTD.square().sum(-1, keepdim=True).clamp_min(torch.finfo(before_BTD.dtype).tiny)
    scale_BTD = (after_BTD * weighted_BTD).sum(-1, keepdim=True) / size_BT1 * weight_D
    tolerance = 1e-3 * float(after_BTD.abs().amax()) + 1e-12
    if not torch.allclose(before_BTD * scale_BTD, after_BTD, atol=tolerance, rtol=0):
        raise GossamerError(
            f"The norm behind the attention ({type(norm).__name__}) does more than scale, so what it lets through"
            " cannot be split over heads; measure circuits of heads instead."
        )
    return scale_BTD
