"""Random transcoders for a model, some of whose features are on and some off."""

from __future__ import annotations

import torch
from torch import Tensor

from gossamer import LoadedModel
from gossamer.transcoders import TranscoderSet, TranscoderShape, Weights


def random_transcoders(
    model: LoadedModel, kind: str, *, n_features: int = 12, activation: str = "jumprelu", seed: int = 3
) -> TranscoderSet:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 0.3) -> Tensor:
        return size * torch.randn(*shape, generator=generator, dtype=torch.float64)

    n_layers, width = model.anatomy.n_layers, model.anatomy.d_model
    k = 4 if activation == "topk" else None
    shape = TranscoderShape(kind, n_layers, n_features, width, activation, k)
    weights = Weights(
        encoder_LFD=normal(n_layers, n_features, width),
        encoder_bias_LF=normal(n_layers, n_features),
        decoder_FTD=[normal(n_features, len(shape.targets(source)), width) for source in range(n_layers)],
        decoder_bias_LD=normal(n_layers, width),
        threshold_LF=0.2 + normal(n_layers, n_features).abs() if activation == "jumprelu" else None,
    )
    return TranscoderSet(shape, weights)
