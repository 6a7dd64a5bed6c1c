"""What is trained: transcoders on normalised activations, the jump's gradient, and the terms of the loss.

Inputs and outputs are centred and scaled per layer, so that a layer's squared error is its share of unexplained
variance. `fold` writes the scales into the weights.

The step function 1[pre > threshold] has no gradient; in its place stands the average slope over a window of width
`bandwidth` around the threshold (a rectangle kernel), both for the threshold and for the pre-activation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gossamer.errors import GossamerError
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.module import TranscoderSet, TranscoderShape, Weights, activate

INITIAL_THRESHOLD = 0.1


class _Step(torch.autograd.Function):
    """1[pre > threshold] with a rectangle kernel for its gradient."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, threshold: Tensor, bandwidth: float) -> Tensor:
        ctx.save_for_backward(pre, threshold)
        ctx.bandwidth = bandwidth
        return (pre > threshold).to(pre.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        pre, threshold = ctx.saved_tensors
        inside = ((pre - threshold).abs() < ctx.bandwidth / 2).to(pre.dtype)
        slope = gradient * inside / ctx.bandwidth
        return slope, -slope.sum(1, keepdim=True), None


@dataclass(frozen=True, eq=False)
class Scales:
    """Per layer, what is subtracted from activations and what they are divided by."""

    input_mean_LD: Tensor
    input_scale_L: Tensor
    output_mean_LD: Tensor
    output_scale_L: Tensor

    @classmethod
    def of(cls, sample: Iterable[tuple[Tensor, Tensor]]) -> Scales:
        """Measure them on batches of inputs and outputs: afterwards a layer has mean 0 and mean square 1."""
        inputs, outputs = _Moments(), _Moments()
        for inputs_LND, outputs_LND in sample:
            inputs.add(inputs_LND)
            outputs.add(outputs_LND)
        return cls(*inputs.mean_and_scale(), *outputs.mean_and_scale())

    def normalise(self, inputs_LND: Tensor, outputs_LND: Tensor) -> tuple[Tensor, Tensor]:
        """Both, centred and scaled."""
        return (
            (inputs_LND - self.input_mean_LD[:, None]) / self.input_scale_L[:, None, None],
            (outputs_LND - self.output_mean_LD[:, None]) / self.output_scale_L[:, None, None],
        )


class _Moments:
    """Running mean and size of activations, in float64."""

    def __init__(self) -> None:
        self.count, self.sum_LD, self.squares_L = 0, torch.zeros(()), torch.zeros(())

    def add(self, seen_LND: Tensor) -> None:
        self.count += seen_LND.shape[1]
        self.dtype = seen_LND.dtype
        self.sum_LD = self.sum_LD.to(seen_LND.device) + seen_LND.double().sum(1)
        self.squares_L = self.squares_L.to(seen_LND.device) + seen_LND.double().square().sum((1, 2))

    def mean_and_scale(self) -> tuple[Tensor, Tensor]:
        mean_LD = self.sum_LD / self.count
        variance_L = self.squares_L / self.count - mean_LD.square().sum(1)
        scale_L = (variance_L / mean_LD.shape[1]).clamp(min=1e-16).sqrt()
        return mean_LD.to(self.dtype), scale_L.to(self.dtype)


@dataclass(frozen=True, eq=False)
class Forward:
    """One pass: unexplained variance and active features per layer (with gradients), and which features were on."""

    unexplained_L: Tensor
    l0_L: Tensor
    active_LF: Tensor
    pre_LNF: Tensor
    boundary_LNF: Tensor


class Learner(nn.Module):
    """Trainable transcoders on normalised activations."""

    def __init__(self, shape: TranscoderShape, *, bandwidth: float, seed: int) -> None:
        super().__init__()
        self.shape, self.bandwidth = shape, bandwidth
        n_layers, n_features, width = shape.n_layers, shape.n_features, shape.width
        generator = torch.Generator().manual_seed(seed)
        directions_LFD = torch.randn(n_layers, n_features, width, generator=generator)
        self.encoder_LFD = nn.Parameter(F.normalize(directions_LFD, dim=-1))
        self.encoder_bias_LF = nn.Parameter(torch.zeros(n_layers, n_features))
        self.log_threshold_LF = nn.Parameter(torch.full((n_layers, n_features), INITIAL_THRESHOLD).log())
        self.log_threshold_LF.requires_grad_(shape.activation == "jumprelu")
        sizes = [len(shape.targets(source)) for source in range(n_layers)]
        self.decoder_FTD = nn.ParameterList(torch.zeros(n_features, size, width) for size in sizes)
        self.decoder_bias_LD = nn.Parameter(torch.zeros(n_layers, width))

    def forward(self, inputs_LND: Tensor, outputs_LND: Tensor) -> Forward:
        """Encode every layer, write to every layer, compare with what the MLPs wrote."""
        pre_LNF = torch.baddbmm(self.encoder_bias_LF[:, None], inputs_LND, self.encoder_LFD.mT)
        features_LNF, on_LNF, boundary_LNF = self._activations(pre_LNF)
        error_LND = self._written(features_LNF) - outputs_LND
        return Forward(
            unexplained_L=error_LND.square().mean((1, 2)),
            l0_L=on_LNF.sum((1, 2), dtype=self.decoder_bias_LD.dtype) / pre_LNF.shape[1],
            active_LF=(features_LNF.detach() != 0).any(1),
            pre_LNF=pre_LNF,
            boundary_LNF=boundary_LNF,
        )

    def _activations(self, pre_LNF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Activations, the (differentiable) indicator of being on, and the value a pre-activation must exceed."""
        if self.shape.activation == "jumprelu":
            threshold_LNF = self.log_threshold_LF.exp()[:, None]
            on_LNF = _Step.apply(pre_LNF, threshold_LNF, self.bandwidth)
            return pre_LNF * on_LNF, on_LNF, threshold_LNF
        features_LNF = activate(pre_LNF, self.shape.activation, threshold_F=None, k=self.shape.k)
        on_LNF = (features_LNF > 0).to(pre_LNF.dtype)
        if self.shape.activation == "relu":
            return features_LNF, on_LNF, torch.zeros_like(pre_LNF[:, :, :1])
        smallest_LNF = torch.where(features_LNF > 0, features_LNF, torch.inf).amin(-1, keepdim=True)
        return features_LNF, on_LNF, torch.where(smallest_LNF.isinf(), 0.0, smallest_LNF).detach()

    def _written(self, features_LNF: Tensor) -> Tensor:
        """One matrix product a source layer, over all its targets at once."""
        n_positions = features_LNF.shape[1]
        written_NLD = self.decoder_bias_LD.expand(n_positions, -1, -1).clone()
        for source, (features_NF, decoder_FTD) in enumerate(zip(features_LNF.unbind(), self.decoder_FTD, strict=True)):
            part_ND = features_NF @ decoder_FTD.flatten(1)
            targets = self.shape.targets(source)
            written_NLD[:, targets.start : targets.stop] += part_ND.view(n_positions, len(targets), -1)
        return written_NLD.transpose(0, 1)

    @torch.no_grad()
    def take_over(self, transcoders: TranscoderSet, scales: Scales) -> None:
        """Start from trained transcoders; the inverse of `fold`, for the scales of these activations."""
        if transcoders.shape != self.shape:
            raise GossamerError(f"Training cannot start from {transcoders.describe()}: it needs {self.shape}.")
        given = transcoders.weights()
        bias_LF = given.encoder_bias_LF + torch.einsum("lfd,ld->lf", given.encoder_LFD, scales.input_mean_LD)
        self.encoder_LFD.copy_(given.encoder_LFD * scales.input_scale_L[:, None, None])
        self.encoder_bias_LF.copy_(bias_LF)
        for source, decoder_FTD in enumerate(given.decoder_FTD):
            targets = list(self.shape.targets(source))
            self.decoder_FTD[source].copy_(decoder_FTD / scales.output_scale_L[targets, None])
        centred_LD = given.decoder_bias_LD - scales.output_mean_LD
        self.decoder_bias_LD.copy_(centred_LD / scales.output_scale_L[:, None])
        if given.threshold_LF is not None:
            self.log_threshold_LF.copy_(given.threshold_LF.clamp(min=1e-6).log())

    @torch.no_grad()
    def fold(self, scales: Scales, provenance: dict[str, Any]) -> TranscoderSet:
        """The same transcoders for activations as the model has them."""
        encoder_LFD = self.encoder_LFD / scales.input_scale_L[:, None, None]
        bias_LF = self.encoder_bias_LF - torch.einsum("lfd,ld->lf", encoder_LFD, scales.input_mean_LD)
        decoders = [
            decoder_FTD * scales.output_scale_L[list(self.shape.targets(source)), None]
            for source, decoder_FTD in enumerate(self.decoder_FTD)
        ]
        decoder_bias_LD = self.decoder_bias_LD * scales.output_scale_L[:, None] + scales.output_mean_LD
        threshold_LF = self.log_threshold_LF.exp() if self.shape.activation == "jumprelu" else None
        return TranscoderSet(
            self.shape, Weights(encoder_LFD, bias_LF, decoders, decoder_bias_LD, threshold_LF), provenance
        )


def shape_for(config: TranscoderConfig, n_layers: int, width: int) -> TranscoderShape:
    """The sizes that a configuration means for a model."""
    k = config.target_l0 if config.activation == "topk" else None
    return TranscoderShape(config.kind, n_layers, config.n_features, width, config.activation, k)
