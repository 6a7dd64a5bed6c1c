"""The frozen model: one prompt's run with attention patterns and norm scales held, so that its stream is linear.

With `x_l` the residual stream before block l, `N` its frozen norms, `P_h` the carried pattern of head h (softmax times
open gates), and `m_l` what the MLP writes to the stream (behind its post-norm, if any), which is taken as given:

    attention   a_l = post( sum_h P_h N(x_l) V_h O_h + constants )
    MLP reads   N'(x_l + a_l)                 or N'(x_l) in parallel blocks (NeoX)
    stream      x_l+1 = x_l + a_l + m_l
    logits      U N_f(x_L), before a soft-cap if the family has one

`post` is the norm behind the attention where there is one (OLMo-2, Gemma), with its scale held too: a head's share of
what the layer wrote is then linear in what the head read. Queries and keys, their norms and rotations act through the
pattern only. `freeze` checks against the run itself that this is all the model does, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import tape
from gossamer.attribution.frozen_layer import FrozenLayer
from gossamer.attribution.frozen_norm import FrozenNorm, freeze_norm
from gossamer.circuits.projections import input_slices, linear_parts, output_slices
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.models.anatomy import Anatomy

Mlp = Callable[[int, Tensor], Tensor]  # layer and what the MLP reads [Q,D] -> what it writes to the stream [Q,D]


@dataclass(frozen=True, eq=False)
class FrozenModel:
    """A model frozen on one prompt; `embedding_QD` are the tokens' vectors, `position_QD` those of their positions."""

    model: LoadedModel = field(repr=False)
    ids_Q: Tensor
    layers: tuple[FrozenLayer, ...] = field(repr=False)
    embedding_QD: Tensor = field(repr=False)
    position_QD: Tensor = field(repr=False)
    final_norm: FrozenNorm = field(repr=False)
    unembedding_VD: Tensor = field(repr=False)
    unembedding_bias_V: Tensor = field(repr=False)
    logits_V: Tensor = field(repr=False)  # of the run itself, after the last token, before any soft-cap

    @property
    def n_layers(self) -> int:
        """How many blocks."""
        return len(self.layers)

    @property
    def n_positions(self) -> int:
        """How many tokens."""
        return len(self.ids_Q)

    @property
    def pattern_LHQK(self) -> Tensor:
        """The carried pattern of every head."""
        return torch.stack([layer.pattern_HQK for layer in self.layers])

    def apply_head(self, layer: int, head: int, resid_NQD: Tensor) -> Tensor:
        """What one head writes when the residual stream before its block is [..., Q, D]; no biases."""
        return self.layers[layer].apply(resid_NQD, [head])

    def pull_back_head(self, layer: int, head: int, cotangent_NQD: Tensor) -> Tensor:
        """The transpose of `apply_head`."""
        return self.layers[layer].pull_back(cotangent_NQD, [head])

    def pull_back_block(self, layer: int, cotangent_NQD: Tensor) -> Tensor:
        """A cotangent after a block as one before it: straight on, and through the block's heads."""
        return cotangent_NQD + self.layers[layer].pull_back(cotangent_NQD)

    def logit_cotangents(self, direction_NV: Tensor) -> Tensor:
        """Cotangents [N,Q,D] after the last block of these directions among the logits of the last position."""
        cotangent_NQD = self.embedding_QD.new_zeros(len(direction_NV), self.n_positions, self.embedding_QD.shape[1])
        cotangent_NQD[:, -1] = direction_NV @ self.unembedding_VD
        return self.final_norm.transposed(cotangent_NQD)

    def logit_constants(self, direction_NV: Tensor) -> Tensor:
        """What final norm and unembedding add [N] of their own to these directions."""
        return direction_NV @ (self.unembedding_VD @ self.final_norm.bias_D + self.unembedding_bias_V)

    def forward(self, embedding_QD: Tensor | None = None, mlp: Mlp | None = None) -> Tensor:
        """Logits [V] after the last token with other token vectors, or other MLPs, in place of the recorded ones."""
        resid_QD = (self.embedding_QD if embedding_QD is None else embedding_QD) + self.position_QD
        for index, layer in enumerate(self.layers):
            attended_QD = resid_QD + layer.apply(resid_QD) + layer.constant_QD
            read_QD = layer.mlp_norm.linear(resid_QD if layer.parallel else attended_QD) + layer.mlp_norm.bias_D
            resid_QD = attended_QD + (layer.mlp_written_QD if mlp is None else mlp(index, read_QD))
        last_D = (self.final_norm.linear(resid_QD) + self.final_norm.bias_D)[-1]
        return self.unembedding_VD @ last_D + self.unembedding_bias_V


@torch.no_grad()
def freeze(model: LoadedModel, ids_Q: Tensor) -> FrozenModel:
    """Run a model on one prompt (token ids [Q]) and freeze its attention patterns and norm scales."""
    _refuse(model, ids_Q)
    parts, hf = model.anatomy, model.hf
    was_training = hf.training
    hf.eval()
    try:
        with _hearing(_modules(parts)) as heard, tape(hf, record=["weights"]) as recorded:
            hf(input_ids=ids_Q[None].to(model.device), use_cache=False, logits_to_keep=1)
    finally:
        hf.train(was_training)
    layers = tuple(_layer(parts, index, heard, recorded["weights", index][0]) for index in range(parts.n_layers))
    final_norm = freeze_norm(parts.final_norm, *heard[parts.final_norm])
    weight_VD, bias_V = linear_parts(parts.unembedding)
    first_QD = layers[0].resid_QD
    position_QD = torch.zeros_like(first_QD)
    if parts.position_embedding is not None:
        position_QD = position_QD + heard[parts.position_embedding][1]
    frozen = FrozenModel(
        model,
        ids_Q.to(model.device),
        layers,
        first_QD - position_QD,
        position_QD,
        final_norm,
        weight_VD,
        weight_VD.new_zeros(len(weight_VD)) if bias_V is None else bias_V,
        heard[parts.unembedding][1][-1],
    )
    _check(frozen)
    return frozen


def _refuse(model: LoadedModel, ids_Q: Tensor) -> None:
    if ids_Q.ndim != 1 or len(ids_Q) == 0:
        raise GossamerError("Attribution works on one prompt of at least one token; give its token ids as [Q].")
    room = model.room_after(len(ids_Q))
    if room is not None and room < 0:
        raise GossamerError(
            f"The prompt has {len(ids_Q)} tokens and {model.name} reads at most {model.context_length}; shorten it."
        )
    if model.dtype not in (torch.float32, torch.float64):
        raise GossamerError(
            f"Attribution adds up thousands of small terms, too fine for {str(model.dtype).removeprefix('torch.')};"
            f" load {model.name} with dtype=torch.float32."
        )


Heard = dict[nn.Module, tuple[Tensor, Tensor]]  # what each module read and gave, without the batch dimension


def _modules(parts: Anatomy) -> list[nn.Module]:
    per_layer = (*parts.attention_norms, *parts.attention_writers, *parts.mlp_norms, *parts.mlp_writers)
    others = (*parts.blocks, *parts.mlps, parts.final_norm, parts.unembedding, parts.position_embedding)
    return list(dict.fromkeys(module for module in (*per_layer, *others) if module is not None))


@contextmanager
def _hearing(modules: Sequence[nn.Module]) -> Iterator[Heard]:
    """Keep what modules read and give while the model runs once."""
    heard: Heard = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if module in heard:
            raise GossamerError("A module of this model runs more than once a forward, so the run cannot be frozen.")
        read = args[0] if args else kwargs["hidden_states"]
        heard[module] = (read[0], (output[0] if isinstance(output, tuple) else output)[0])

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield heard


def _layer(parts: Anatomy, index: int, heard: Heard, pattern_HQK: Tensor) -> FrozenLayer:
    resid_QD = heard[parts.blocks[index]][0]
    value_HED, value_bias_HE = _values(parts, index)
    written = output_slices(parts, index)

    def frozen(norm: nn.Module | None) -> FrozenNorm:
        return FrozenNorm.identity(resid_QD) if norm is None else freeze_norm(norm, *heard[norm])

    return FrozenLayer(
        pattern_HQK.to(resid_QD.dtype),
        value_HED,
        value_bias_HE,
        written.weight_HED,
        torch.zeros_like(resid_QD[0]) if written.bias_D is None else written.bias_D,
        frozen(parts.attention_norms[index]),
        frozen(parts.attention_writers[index] if parts.post_norm else None),
        frozen(parts.mlp_norms[index]),
        frozen(parts.mlp_writers[index] if parts.post_norm else None),
        parts.parallel,
        resid_QD,
        *heard[parts.mlps[index]],
    )


def _values(parts: Anatomy, index: int) -> tuple[Tensor, Tensor]:
    """Every head's value weight and bias; the values are the last of a layer's inputs, one a key head."""
    last = input_slices(parts, index)[-1]
    n_keys = parts.n_key_heads
    of_head_H = torch.arange(parts.n_heads) // (parts.n_heads // n_keys)
    weight_GED = last.weight_RED[-n_keys:]
    if last.bias_RE is None:
        return weight_GED[of_head_H], weight_GED.new_zeros(parts.n_heads, weight_GED.shape[1])
    return weight_GED[of_head_H], last.bias_RE[-n_keys:][of_head_H]


def _check(frozen: FrozenModel) -> None:
    """The frozen model must give back the run it was made from, at every MLP and at the logits."""

    def compare(what: str, ours: Tensor, theirs: Tensor) -> None:
        worst, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
        if not worst <= 1e-3 * size + 1e-6:
            raise GossamerError(
                f"{frozen.model.name} does more than the frozen model knows of: {what} differ by {worst:.2g} of"
                f" {size:.2g}, so attributions would be wrong; use a model of a supported family."
            )

    def recorded(index: int, read_QD: Tensor) -> Tensor:
        compare(f"the inputs of the MLP in layer {index}", read_QD, frozen.layers[index].mlp_input_QD)
        return frozen.layers[index].mlp_written_QD

    compare("the logits", frozen.forward(mlp=recorded), frozen.logits_V)
