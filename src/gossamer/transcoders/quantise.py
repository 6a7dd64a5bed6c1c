"""Tensors as int8 with one float32 scale a row, for shipping."""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_SUFFIX = ".scale"
LARGEST = 127


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """int8 values and the scale [..., 1] of each row (the last axis); a row of zeros stays one."""
    scale = values.abs().amax(-1, keepdim=True).float() / LARGEST
    scale = torch.where(scale > 0, scale, 1.0)
    return (values.float() / scale).round().clamp(-LARGEST, LARGEST).to(torch.int8), scale


def dequantise(values: Tensor, scale: Tensor) -> Tensor:
    """The float32 tensor that was stored, to within half a scale."""
    return values.float() * scale
