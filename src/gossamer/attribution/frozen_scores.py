"""Scores as bilinear forms of the frozen stream: how one head's queries and keys come out of what its layer reads.

    score_ij = scaling * (M_i W_Q N(x_i) + ...) . (M_j W_K N(x_j) + ...)

`M` is all that happens between a projection and the product: rotations by position, and norms of queries and keys with
their scale held. It is found by sending unit vectors through the attention module in the place of its projections'
output; where queries and keys of the run do not follow from it, the head is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gossamer.attention import tape
from gossamer.attribution.frozen import FrozenModel
from gossamer.circuits.projections import InputSlices, input_slices
from gossamer.errors import GossamerError

Side = Literal["q", "k"]
LARGE = 1e3  # so large that the epsilon of a norm of queries or keys does not count


@dataclass(frozen=True, eq=False)
class FrozenSide:
    """A head's query or key at every position: `map_QED` of the normed stream there, plus `bias_QE`."""

    map_QED: Tensor
    bias_QE: Tensor


@dataclass(frozen=True, eq=False)
class FrozenHead:
    """Queries, keys and the factor on their product."""

    query: FrozenSide
    key: FrozenSide
    scaling: float


@torch.no_grad()
def freeze_scores(frozen: FrozenModel, layer: int, head: int) -> FrozenHead:
    """A head's scores on the prompt of a frozen model."""
    parts, hf = frozen.model.anatomy, frozen.model.hf
    with tape(hf, record=["q", "k", "scores"], layers=[layer]) as run:
        hf(input_ids=frozen.ids_Q[None], use_cache=False, logits_to_keep=1)
    block = frozen.layers[layer]
    normed_QD = block.attention_norm.linear(block.resid_QD) + block.attention_norm.bias_D
    sides: dict[Side, FrozenSide] = {}
    for side in ("q", "k"):
        receiver = head if side == "q" else parts.n_heads + head // (parts.n_heads // parts.n_key_heads)
        weight_ED, bias_E = _projection(input_slices(parts, layer), receiver)
        between_QEE = _between(frozen, layer, head, receiver, side)
        made_QE = torch.einsum("qef,fd,qd->qe", between_QEE, weight_ED, normed_QD) + between_QEE @ bias_E
        between_QEE = between_QEE * _scale(made_QE, run[side, layer][0, head], frozen.model.name)
        sides[side] = FrozenSide(between_QEE @ weight_ED, between_QEE @ bias_E)
    scaling = _scaling(run["q", layer][0, head], run["k", layer][0, head], run["scores", layer][0, head])
    return FrozenHead(sides["q"], sides["k"], scaling)


def _projection(slices: list[InputSlices], receiver: int) -> tuple[Tensor, Tensor]:
    for part in slices:
        if part.receivers.start <= receiver < part.receivers.stop:
            mine = receiver - part.receivers.start
            weight_ED = part.weight_RED[mine]
            return weight_ED, weight_ED.new_zeros(len(weight_ED)) if part.bias_RE is None else part.bias_RE[mine]
    raise AssertionError("every head has a projection")


def _between(frozen: FrozenModel, layer: int, head: int, receiver: int, side: Side) -> Tensor:
    """What becomes [Q,E,E] of unit vectors in the place of a receiver's projection, up to a factor a position."""
    parts, hf = frozen.model.anatomy, frozen.model.hf
    width = parts.d_head
    with _units_in_place(input_slices(parts, layer), width), tape(hf, record=[side], layers=[layer]) as probe:
        hf(input_ids=frozen.ids_Q.expand(width, -1), use_cache=False, logits_to_keep=1)
    return probe[side, layer][:, head].permute(1, 2, 0) / LARGE


@contextmanager
def _units_in_place(slices: list[InputSlices], width: int) -> Iterator[None]:
    """In batch row e, every receiver of a layer is given the unit vector e."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        units_BE = LARGE * torch.eye(width, dtype=output.dtype, device=output.device)
        return units_BE.repeat(1, output.shape[-1] // width)[:, None].expand_as(output)

    with ExitStack() as stack:
        for part in slices:
            stack.callback(part.module.register_forward_hook(hook).remove)
        yield


def _scale(made_QE: Tensor, run_QE: Tensor, name: str) -> Tensor:
    """The factor [Q,1,1] that makes one of the other; one where nothing stands between projection and product."""
    size_Q = made_QE.square().sum(-1).clamp_min(torch.finfo(made_QE.dtype).tiny)
    scale_Q = (made_QE * run_QE).sum(-1) / size_Q
    tolerance = 1e-3 * float(run_QE.abs().max()) + 1e-12
    if not torch.allclose(made_QE * scale_Q[:, None], run_QE, atol=tolerance, rtol=0):
        raise GossamerError(
            f"The queries and keys of {name} are not linear in the frozen residual stream, so its scores cannot be"
            " split; use a model of a supported family."
        )
    return scale_Q[:, None, None]


def _scaling(query_QE: Tensor, key_KE: Tensor, score_QK: Tensor) -> float:
    """The factor between products and scores, read off where they are largest."""
    product_QK = query_QE @ key_KE.T
    product_QK = product_QK.masked_fill(~score_QK.isfinite(), 0.0)
    largest = int(product_QK.abs().argmax())
    return float(score_QK.flatten()[largest] / product_QK.flatten()[largest])
