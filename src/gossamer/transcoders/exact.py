"""Transcoders without error, copied from the weights of a model whose MLPs are one hidden layer of ReLUs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.transcoders.belonging import belonging_to
from gossamer.transcoders.module import TranscoderSet, TranscoderShape, Weights


@torch.no_grad()
def from_mlp(model: LoadedModel) -> TranscoderSet:
    """Per-layer transcoders whose features are the MLPs' neurons; their reconstructions are the MLPs' outputs."""
    parts = model.anatomy
    if parts.post_norm:
        raise GossamerError(f"The MLPs of a {parts.family} model write through a norm, which no linear decoder copies.")
    layers = [_hidden_layer(mlp) for mlp in parts.mlps]
    encoders, encoder_biases, decoders, decoder_biases = zip(*layers, strict=True)
    shape = TranscoderShape("per-layer", parts.n_layers, encoders[0].shape[0], parts.d_model, "relu")
    weights = Weights(
        encoder_LFD=torch.stack(encoders),
        encoder_bias_LF=torch.stack(encoder_biases),
        decoder_FTD=[decoder_FD[:, None] for decoder_FD in decoders],
        decoder_bias_LD=torch.stack(decoder_biases),
    )
    return TranscoderSet(shape, weights, belonging_to(model) | {"made_by": "copied from the MLPs' weights"})


def _hidden_layer(mlp: nn.Module) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Encoder [F, D] and its bias, decoder [F, D] and its bias."""
    parts = [module for module in mlp.modules() if module is not mlp and not isinstance(module, nn.Dropout)]
    maps = [part for part in parts if isinstance(part, nn.Linear | Conv1D)]
    if len(maps) != 2 or [type(part) for part in parts if part not in maps] != [nn.ReLU]:
        raise GossamerError(
            f"Only an MLP with one hidden layer of ReLUs can be copied; a {type(mlp).__name__} of this model holds "
            f"{', '.join(type(part).__name__ for part in parts)}."
        )
    (first_FD, first_bias_F), (second_DF, second_bias_D) = (_matrix(module) for module in maps)
    return first_FD, first_bias_F, second_DF.T.contiguous(), second_bias_D


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Weights [out, in] and bias [out] of a linear map, as copies."""
    weight: Tensor = module.weight.T if isinstance(module, Conv1D) else module.weight  # type: ignore[assignment]
    bias = getattr(module, "bias", None)
    return weight.detach().clone(), weight.new_zeros(weight.shape[0]) if bias is None else bias.detach().clone()
