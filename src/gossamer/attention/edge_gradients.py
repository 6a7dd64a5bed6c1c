"""The gradient of a number in every attention weight at once: the first-order value of every edge in one backward pass.

The gradient in the weight of an edge (head, query, key) is what the edge's value vector, added once more to the head's
output, would change. Gates are constants in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gossamer.attention.tape import Weights, tape


@dataclass(frozen=True, eq=False)
class Patterns:
    """What every head multiplied values with in one forward, and which of its edges were open: [L, B, H, Q, K]."""

    weights_LBHQK: Tensor
    open_LBHQK: Tensor


@torch.no_grad()
def record_patterns(hf: nn.Module, forward: Callable[[], object]) -> Patterns:
    """The patterns of the one forward that `forward` runs."""
    with tape(hf, record=("weights", "open")) as heard:
        forward()
    layers = heard.layers("weights")
    return Patterns(*(torch.stack([heard[name, layer] for layer in layers]) for name in ("weights", "open")))


def weight_gradient(
    hf: nn.Module, metric: Callable[[], Tensor], weights_LBHQK: Tensor, shares: Sequence[float] = ()
) -> Tensor:
    """The gradient [L, B, H, Q, K] of `metric`, a scalar that runs one forward, in every attention weight.

    Without `shares` in the run as it is: later patterns follow from what earlier ones carry. With them, every pattern
    is held at that share of `weights_LBHQK` and follows nothing, and the gradients at all shares are averaged.
    """
    total = torch.zeros_like(weights_LBHQK)
    for share in shares or (None,):
        held_L = [] if share is None else [(share * held).detach().requires_grad_() for held in weights_LBHQK]
        held = [Weights(layer, weights) for layer, weights in enumerate(held_L)]
        with torch.enable_grad(), tape(hf, record=("weights",), replace=held) as heard:
            value = metric()
        used_L = held_L or [heard["weights", layer] for layer in range(len(weights_LBHQK))]
        # the last layer's weights of earlier queries never reach the answer
        found_L = torch.autograd.grad(value, used_L, allow_unused=True)
        total += torch.stack([torch.zeros_like(w) if g is None else g for g, w in zip(found_L, used_L, strict=True)])
    return total / max(1, len(shares))


def midpoints(steps: int) -> list[float]:
    """The shares at which the midpoint rule looks at a path from zero to one."""
    return [(step + 0.5) / steps for step in range(steps)]
