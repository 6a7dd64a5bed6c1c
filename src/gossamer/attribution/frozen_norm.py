"""A norm with its scale held at what it was in one run: from then on a linear map and a constant.

    norm(x) = gain * (x - mean x) / size(x) + bias      LayerNorm; without mean and bias: RMSNorm, whatever its family

Gain and bias are read off the module by what it does to inputs made for the purpose, the scale 1 / size off what it did
in the run, so that no family's way of keeping them need be known.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError

LARGE = 2.0**17  # so large that a norm's epsilon does not count, and exact: the mean of equal numbers is that number


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """`x -> gain * scale * (x, less its mean if centred) + bias`, with a scale for each position of the prompt."""

    gain_D: Tensor
    bias_D: Tensor
    scale_Q1: Tensor
    centred: bool

    def linear(self, resid_NQD: Tensor) -> Tensor:
        """The linear part, for [..., Q, D]."""
        if self.centred:
            resid_NQD = resid_NQD - resid_NQD.mean(-1, keepdim=True)
        return resid_NQD * self.scale_Q1 * self.gain_D

    def transposed(self, cotangent_NQD: Tensor) -> Tensor:
        """The transpose of the linear part."""
        pulled_NQD = cotangent_NQD * self.scale_Q1 * self.gain_D
        return pulled_NQD - pulled_NQD.mean(-1, keepdim=True) if self.centred else pulled_NQD

    def at(self, position_N: Tensor) -> FrozenNorm:
        """The norm for rows that are at these positions."""
        return FrozenNorm(self.gain_D, self.bias_D, self.scale_Q1[position_N], self.centred)

    @classmethod
    def identity(cls, like_QD: Tensor) -> FrozenNorm:
        """Where a family has no norm."""
        return cls(torch.ones_like(like_QD[0]), torch.zeros_like(like_QD[0]), torch.ones_like(like_QD[:, :1]), False)


@torch.no_grad()
def freeze_norm(norm: nn.Module | None, read_QD: Tensor, gave_QD: Tensor) -> FrozenNorm:
    """The norm as it worked on `read_QD`; anything that is not a norm is refused."""
    if norm is None or isinstance(norm, nn.Identity):
        return FrozenNorm.identity(read_QD)
    bias_D = _output(norm, torch.zeros_like(read_QD[0]))
    centred = bool((_output(norm, torch.full_like(read_QD[0], LARGE)) - bias_D).abs().max() < 1e-3)
    probe_D = _balanced(read_QD[0])
    gain_D = (_output(norm, LARGE * probe_D) - bias_D) * probe_D.square().mean().sqrt() / probe_D
    unscaled = FrozenNorm(gain_D, bias_D, torch.ones_like(read_QD[:, :1]), centred).linear(read_QD)
    size_Q1 = unscaled.square().sum(-1, keepdim=True).clamp_min(torch.finfo(read_QD.dtype).tiny)
    scale_Q1 = ((gave_QD - bias_D) * unscaled).sum(-1, keepdim=True) / size_Q1
    frozen = FrozenNorm(gain_D, bias_D, scale_Q1, centred)
    tolerance = 1e-3 * float(gave_QD.abs().max()) + 1e-12
    if not torch.allclose(frozen.linear(read_QD) + bias_D, gave_QD, atol=tolerance, rtol=0):
        raise GossamerError(
            f"A {type(norm).__name__} does more than centre, scale and shift, so it cannot be frozen; use a model of a"
            " supported family with its own norms."
        )
    return frozen


def _output(norm: nn.Module, input_D: Tensor) -> Tensor:
    return norm.forward(input_D[None, None])[0, 0]  # past the hooks


def _balanced(like_D: Tensor) -> Tensor:
    """Numbers of mean zero, none of them zero."""
    probe_D = torch.ones_like(like_D)
    probe_D[1::2] = -1
    if len(probe_D) % 2:
        probe_D[-1] = -2
        probe_D[-2] = 1
    return probe_D
