"""The metric of circuits of edges, each run for real on every prompt of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

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
        """How far rounding takes patched runs from the runs they must equal: the clean one, and the corrupt one."""
        everything_SR = torch.from_numpy(self.parts.graph.is_edge_SR)
        error, flips = {"all edges": 0.0, "no edge": 0.0}, {"all edges": 0, "no edge": 0}
        compared = 0
        for rows in self.task.batches(self.batch):
            corrupt, _ = recorded(self.parts, rows.corrupt_BT)
            for kept, ids_BT in (("all edges", rows.clean_BT), ("no edge", rows.corrupt_BT)):
                kept_SR = everything_SR if kept == "all edges" else torch.zeros_like(everything_SR)
                plain_BV, plain = self._with_gates(partial(self.parts.logits, ids_BT))
                run = partial(patched_logits, self.parts, rows.clean_BT, corrupt, kept_SR)
                patched_BV, patched = self._with_gates(run)
                error[kept] = max(error[kept], float((patched_BV - plain_BV).abs().max()))
                flips[kept] += sum(int((a != b).sum()) for a, b in zip(plain, patched, strict=True))
                compared += sum(open_BHQK.numel() for open_BHQK in plain)
        return {
            **{f"largest logit error with {kept}": largest for kept, largest in error.items()},
            **{f"gates flipped with {kept}": float(count) for kept, count in flips.items()},
            "gates compared": float(compared),
        }

    @torch.no_grad()
    def _with_gates(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A run's logits, and which edges each layer had open; none of a dense model, which has no gates."""
        if not self.parts.model.is_sparse:
            return run(), []
        with tape(self.parts.model.hf, record=["open"]) as heard:
            logits_BV = run()
        return logits_BV, [heard["open", layer] for layer in heard.layers("open")]

    def _numbers(self, logits_BV: torch.Tensor, rows: TokenBatch, clean_BV: torch.Tensor) -> Floats:
        return self.metric(logits_BV, rows, clean_BV).double().cpu().numpy()
