"""What an edge is scored by: a number a prompt that is large when the model does as the clean prompt asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast, get_args

from torch import Tensor

from gossamer.errors import GossamerError, nearest
from gossamer.tasks import Task, TokenBatch

MetricName = Literal["task", "logit difference", "probability difference", "divergence"]
METRICS: tuple[str, ...] = get_args(MetricName)

# From the logits of a run [B,V], the batch, and the logits of the clean run [B,V] to a number a prompt [B].
Metric = Callable[[Tensor, TokenBatch, Tensor], Tensor]


def metric_of(task: Task, name: str) -> Metric:
    """The metric by name: `task` is the task's own, `divergence` minus the KL divergence from the clean run (nats)."""
    if name not in METRICS:
        raise GossamerError(f"There is no metric {name!r}; choose one of {', '.join(METRICS)}.{nearest(name, METRICS)}")
    if name == "divergence":
        return _closeness
    scored = task if name == "task" else replace(task, metric=cast(Any, name))
    return lambda logits_BV, batch, clean_BV: scored.score(logits_BV, batch)


def metric_label(task: Task, name: str) -> str:
    """What the metric is called in a result."""
    return task.metric if name == "task" else "minus KL(clean, this run)" if name == "divergence" else name


def _closeness(logits_BV: Tensor, batch: TokenBatch, clean_BV: Tensor) -> Tensor:
    expected_BV = clean_BV.detach().log_softmax(-1)
    return -(expected_BV.exp() * (expected_BV - logits_BV.log_softmax(-1))).sum(-1)
