"""The metric of circuits of edges, each run for real on every prompt of a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from gossamer.attention import tape
from gossamer.circuits.edge_metrics import Metric
from gossamer.circuits.edge_patching import patched_logits
from gossamer.circuits.effect import Baseline, Bools, Floats
from gossamer.circuits.runs import Batch
from gossamer.circuits.streams import Parts, recorded
from gossamer.errors import GossamerError
from gossamer.tasks import Task, TokenBatch

MEMORY = 2**30


def batch_size(parts: Parts, task: Task, batch: Batch = "auto", *, memory: int = MEMORY) -> int:
    """Prompts at a time: as given, or what fits: what all sources wrote, three times, and one layer's inputs."""
    if batch != "auto":
        if batch < 1:
            raise GossamerError(f"A batch needs at least one prompt, but batch is {batch}; leave it at 'auto'.")
        return batch
    graph, anatomy = parts.graph, parts.model.anatomy
    length = max(group.clean_BT.shape[1] for group in task.tokens)
    vectors = 3 * len(graph.sources) + 6 * graph.receivers_per_layer + 24 * graph.n_layers
    row = length * anatomy.d_model * vectors * (8 if parts.model.dtype == torch.float64 else 4)
    return max(1, min(len(task), memory // row))


@dataclass(frozen=True, eq=False)
class EdgeMeasure:
    """Measures circuits of edges on the prompts of a task."""

    parts: Parts
    task: Task
    metric: Metric
    batch: int

    def circuits(self, kept_CSR: Sequence[Bools]) -> Floats:
        """The metric [C,N] of circuits."""
        measured_CN = np.zeros((len(kept_CSR), len(self.task)))
        for rows, clean_BV in zip(self.task.batches(self.batch), self._clean, strict=True):
            corrupt, _ = recorded(self.parts, rows.corrupt_BT)
            for number, kept_SR in enumerate(kept_CSR):
                logits_BV = patched_logits(self.parts, rows.clean_BT, corrupt, torch.from_numpy(kept_SR))
                measured_CN[number, list(rows.rows)] = self._numbers(logits_BV, rows, clean_BV)
        return measured_CN

    @cached_property
    def baseline(self) -> Baseline:
        """The metric of the untouched model."""
        clean_N, corrupt_N = np.zeros(len(self.task)), np.zeros(len(self.task))
        for rows, clean_BV in zip(self.task.batches(self.batch), self._clean, strict=True):
            with torch.no_grad():
                corrupt_BV = self.parts.logits(rows.corrupt_BT)
            clean_N[list(rows.rows)] = self._numbers(clean_BV, rows, clean_BV)
            corrupt_N[list(rows.rows)] = self._numbers(corrupt_BV, rows, clean_BV)
        return Baseline(clean_N, corrupt_N)

    @cached_property
    def _clean(self) -> list[torch.Tensor]:
        """The logits [B,V] of the clean prompts of each batch."""
        with torch.no_grad():
            return [self.parts.logits(rows.clean_BT) for rows in self.task.batches(self.batch)]

    def check(self) -> dict[str, float]:
        """How far rounding takes the patched run from the runs it must equal, on the first batch."""
        rows = next(self.task.batches(self.batch))
        corrupt, corrupt_BV = recorded(self.parts, rows.corrupt_BT)
        hf, everything_SR = self.parts.model.hf, torch.from_numpy(self.parts.graph.is_edge_SR)
        opened, logits = [], []
        for patched in (False, True):
            with torch.no_grad(), tape(hf, record=["open"]) as heard:
                run = patched_logits(self.parts, rows.clean_BT, corrupt, everything_SR) if patched else None
                logits.append(self.parts.logits(rows.clean_BT) if run is None else run)
            opened.append([heard["open", layer] for layer in heard.layers("open")])
        nothing_BV = patched_logits(self.parts, rows.clean_BT, corrupt, torch.zeros_like(everything_SR))
        return {
            "largest logit error with all edges": float((logits[0] - logits[1]).abs().max()),
            "largest logit error with no edge": float((nothing_BV - corrupt_BV).abs().max()),
            "gates flipped with all edges": float(sum(int((a != b).sum()) for a, b in zip(*opened, strict=True))),
        }

    def _numbers(self, logits_BV: torch.Tensor, rows: TokenBatch, clean_BV: torch.Tensor) -> Floats:
        return self.metric(logits_BV, rows, clean_BV).double().cpu().numpy()
