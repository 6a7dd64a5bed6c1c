"""The controller that holds the number of active features at its target by moving the sparsity coefficients."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST, LARGEST = 1e-6, 1e3


class SparsityController:
    """One coefficient a layer; proportional to, and integrating, the logarithm of active over wanted features.

    A coefficient multiplies its layer's active features divided by the target, in units of a layer's unexplained
    variance. Its own dynamics are a PI controller's: the integral finds the level, the proportional part damps it.
    """

    def __init__(self, n_layers: int, *, rate: float, gain: float) -> None:
        self.rate, self.gain = rate, gain
        self.level_L = torch.full((n_layers,), math.log(1e-2))

    def coefficients(self, l0_L: Tensor, target: float) -> Tensor:
        """The coefficients for a step whose active features are known; moves the integral."""
        excess_L = (l0_L.detach().clamp(min=1e-3) / target).log().clamp(-1, 1)
        self.level_L = (self.level_L.to(excess_L) + self.rate * excess_L).clamp(math.log(SMALLEST), math.log(LARGEST))
        return (self.level_L + self.gain * excess_L).exp()
