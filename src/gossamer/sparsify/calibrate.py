"""Where the gates start: per head, the offset that keeps a chosen share of the head's attention.

For every head, the edges of a little text are sorted by their gate logit (without offset); the edges that hold
`keep_mass` of the head's softmax mass, the largest logits first, stay open, and the offset puts zero between them and
the rest. Measured with every gate open, so that each layer sees what it sees in the dense model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import ForceOpen, gates_of, tape
from gossamer.sparsify.data import Sequences
from gossamer.sparsify.forward import logits_of, model_inputs
from gossamer.sparsify.measure import Measurement

MOST_SEQUENCES = 8
MOST_NUMBERS = 64_000_000  # recorded at once, so that long texts and deep models fit into memory
TIED = 1e-3  # in nats
SMALLEST_UNIT = 0.1


@dataclass(frozen=True)
class Calibration:
    """What the starting offsets keep and cost, measured on held-out text with deterministic gates."""

    keep_mass: float | None
    dense_loss: float
    start: Measurement

    @property
    def cost(self) -> float:
        """Nats lost at step 0."""
        return self.start.loss - self.dense_loss

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"keep_mass": self.keep_mass, "cost": self.cost, **self.start.to_dict()}


def calibrate(model: nn.Module, text: Sequences, *, keep_mass: float) -> None:
    """Set every head's offset so that the edges that stay open hold `keep_mass` of its attention."""
    sample = text.rows(slice(0, min(len(text), MOST_SEQUENCES)))
    gates = gates_of(model)
    heads = gates[0].offset_H.numel()
    per_layer = 2 * sample.ids_NT.size * sample.length * heads
    at_once = max(1, MOST_NUMBERS // per_layer)
    for first in range(0, len(gates), at_once):
        layers = list(range(first, min(first + at_once, len(gates))))
        for layer, offset_H in _offsets(model, sample, layers, keep_mass).items():
            gates[layer].offset_H.data.copy_(offset_H)


@torch.no_grad()
def _offsets(model: nn.Module, sample: Sequences, layers: list[int], keep_mass: float) -> dict[int, Tensor]:
    device = next(model.parameters()).device
    n_layers = len(gates_of(model))
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    dense = [ForceOpen(layer, everything) for layer in range(n_layers)]
    with tape(model, record=("gate", "softmax"), replace=dense, layers=layers) as recorded:
        logits_of(model, model_inputs(sample, device), bf16=False)
    result: dict[int, Tensor] = {}
    for layer in layers:
        offset_H = gates_of(model)[layer].offset_H.detach()
        logits_BHQK = recorded["gate", layer] - offset_H[:, None, None]
        result[layer] = keeping_offsets(logits_BHQK, recorded["softmax", layer], keep_mass)
    return result


@torch.no_grad()
def score_units(model: nn.Module, text: Sequences) -> list[Tensor]:
    """Per layer and head [H], the spread of the gate logits over allowed pairs: the unit of that head's training."""
    sample = text.rows(slice(0, min(len(text), MOST_SEQUENCES)))
    units: list[Tensor] = []
    for layer in range(len(gates_of(model))):
        with tape(model, record=("gate", "allowed"), layers=[layer]) as recorded:
            logits_of(model, model_inputs(sample, next(model.parameters()).device), bf16=False)
        logits_BHQK = recorded["gate", layer]
        allowed_BHQK = recorded["allowed", layer].expand_as(logits_BHQK)
        spread = [logits_BHQK[:, head][allowed_BHQK[:, head]].std() for head in range(logits_BHQK.shape[1])]
        units.append(torch.stack(spread).clamp(min=SMALLEST_UNIT))
    return units


def keeping_offsets(logits_BHQK: Tensor, softmax_BHQK: Tensor, keep_mass: float) -> Tensor:
    """Per head, minus a threshold between the last kept logit and the first that is dropped."""
    return torch.stack(
        [
            _keeping_offset(logits_BHQK[:, head].reshape(-1), softmax_BHQK[:, head].reshape(-1), keep_mass)
            for head in range(logits_BHQK.shape[1])
        ]
    )


def _keeping_offset(logits: Tensor, mass: Tensor, keep_mass: float) -> Tensor:
    carrying = mass > 0  # pairs that are not allowed carry nothing
    ordered, order = logits[carrying].float().sort(descending=True)
    kept = mass[carrying][order].double().cumsum(0)
    last = int(torch.searchsorted(kept, kept[-1] * keep_mass).clamp(max=len(ordered) - 1))
    threshold = (ordered[last] + ordered[min(last + 1, len(ordered) - 1)]) / 2
    tied = bool(ordered[last] - threshold < TIED)  # then all of them stay
    return -threshold + (TIED if tied else 0.0)
