"""From sequences to logits and losses: what training and measuring share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from gossamer.corpus.inputs import model_inputs, on_device
from gossamer.corpus.sequences import Sequences

__all__ = [
    "IGNORED",
    "autocast",
    "cross_entropy_sum",
    "divergence_sum",
    "logits_of",
    "model_inputs",
    "target_tensor",
]

IGNORED = -100


def target_tensor(text: Sequences, device: torch.device | str) -> Tensor:
    """What every position should predict, `IGNORED` where there is nothing to predict."""
    return on_device(text.targets(), device)


def autocast(device: torch.device | str, *, bf16: bool) -> AbstractContextManager[Any]:
    """bfloat16 for matrix products. One block per forward: a block caches the low-precision weights it has seen."""
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=bf16)


def logits_of(model: nn.Module, inputs: dict[str, Any], *, bf16: bool) -> Tensor:
    """The model's logits in float32, from a forward pass with an autocast block of its own."""
    with autocast(inputs["input_ids"].device, bf16=bf16):
        logits_BQV: Tensor = model(**inputs).logits
    return logits_BQV if logits_BQV.dtype == torch.float64 else logits_BQV.float()


def cross_entropy_sum(logits_BQV: Tensor, targets_BQ: Tensor) -> Tensor:
    """Summed cross-entropy over the positions that have a target, in nats."""
    return F.cross_entropy(logits_BQV.flatten(0, 1), targets_BQ.flatten(), ignore_index=IGNORED, reduction="sum")


def divergence_sum(student_BQV: Tensor, teacher_BQV: Tensor, targets_BQ: Tensor) -> Tensor:
    """Summed KL(teacher || student) over the positions that have a target, in nats."""
    counted = (targets_BQ != IGNORED).flatten()
    teacher_log = F.log_softmax(teacher_BQV.flatten(0, 1)[counted], dim=-1)
    student_log = F.log_softmax(student_BQV.flatten(0, 1)[counted], dim=-1)
    return F.kl_div(student_log, teacher_log, log_target=True, reduction="sum")
