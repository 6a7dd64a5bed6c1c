"""How often a model does a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gossamer.tasks.task import Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def next_token_logits(hf: PreTrainedModel, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] after the last token, in float32 or better."""
    logits_BV = hf(input_ids=ids_BT.to(hf.device), use_cache=False, logits_to_keep=1).logits[:, -1]
    return logits_BV.to("cpu", torch.promote_types(logits_BV.dtype, torch.float32))


def correct(hf: PreTrainedModel, task: Task, *, batch: int = 64) -> torch.Tensor:
    """Whether each clean prompt [n] is answered rightly, in the task's order."""
    result = torch.zeros(len(task), dtype=torch.bool)
    was_training = hf.training
    hf.eval()
    for rows in task.batches(batch):
        result[list(rows.rows)] = task.correct(next_token_logits(hf, rows.clean_BT), rows)
    hf.train(was_training)
    return result


def accuracy(hf: PreTrainedModel, task: Task, *, batch: int = 64) -> float:
    """The share of clean prompts answered rightly."""
    return correct(hf, task, batch=batch).double().mean().item()
