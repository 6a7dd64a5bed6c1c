"""The deterministic model on fixed held-out text: the only figures that are reported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gossamer.attention import gates_of, sampled_gates
from gossamer.sparsify.data import Sequences
from gossamer.sparsify.density import Density, density_of
from gossamer.sparsify.forward import cross_entropy_sum, divergence_sum, logits_of, model_inputs, target_tensor


@dataclass(frozen=True)
class Measurement:
    """Loss on held-out text, and for a gated model its density; divergence if a dense model was given."""

    loss: float
    density: Density | None = None
    divergence: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        data: dict[str, Any] = {"loss": self.loss}
        if self.divergence is not None:
            data["divergence"] = self.divergence
        return data | ({} if self.density is None else self.density.to_dict())


@torch.no_grad()
def measure(model: nn.Module, text: Sequences, *, batch: int, teacher: nn.Module | None = None) -> Measurement:
    """Run the model, as it is and with deterministic gates, over all of `text`."""
    device = next(model.parameters()).device
    loss = divergence = 0.0
    open_edges = n_targets = 0
    for part in _parts(text, batch):
        inputs, targets_BQ = model_inputs(part, device), target_tensor(part, device)
        if gates_of(model):
            with sampled_gates(model, tau=0.0) as run:
                logits_BQV = logits_of(model, inputs, bf16=False)
            open_edges += int(run.open_pairs)
        else:
            logits_BQV = logits_of(model, inputs, bf16=False)
        loss += float(cross_entropy_sum(logits_BQV, targets_BQ))
        if teacher is not None:
            divergence += float(divergence_sum(logits_BQV, logits_of(teacher, inputs, bf16=False), targets_BQ))
        n_targets += int((targets_BQ >= 0).sum())
    density = _density(model, text, open_edges)
    return Measurement(loss / n_targets, density, divergence / n_targets if teacher is not None else None)


def _parts(text: Sequences, batch: int) -> Iterator[Sequences]:
    for start in range(0, len(text), batch):
        yield text.rows(slice(start, start + batch))


def _density(model: nn.Module, text: Sequences, open_edges: int) -> Density | None:
    gates = gates_of(model)
    if not gates:
        return None
    heads = sum(gate.offset_H.numel() for gate in gates)
    return density_of(text, open_edges=open_edges, n_layers=1, n_heads=heads)
