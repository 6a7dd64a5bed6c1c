"""Task accuracy of several models on the same prompts, and the loss on the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.errors import GossamerError
from gossamer.evaluate.report import TaskScore
from gossamer.evaluate.statistics import wilson
from gossamer.models import LoadedModel
from gossamer.tasks import NAMES, Task, get
from gossamer.tasks.accuracy import next_token_logits

ROWS_AT_ONCE = 64


def task_scores(
    models: Mapping[str, LoadedModel],
    names: Sequence[str] = NAMES,
    *,
    n: int,
    seed: int,
    tell: Callable[[str], None] | None = None,
) -> tuple[list[TaskScore], list[str]]:
    """Every model on `n` held-out prompts of every task; a sentence for each task that these models cannot be given."""
    tokenizer = next(iter(models.values())).tokenizer
    for name in names:
        if name not in NAMES:
            get(name, tokenizer, 1)  # says which names there are
    scores: list[TaskScore] = []
    skipped: list[str] = []
    for name in names:
        try:
            task = get(name, tokenizer, n, seed=seed)
            _require_room(task, models)
        except GossamerError as unsuitable:
            skipped.append(f"The task {name} was not measured: {unsuitable}")
            continue
        for role, model in models.items():
            if tell is not None:
                tell(f"task {name}, {role}")
            scores.append(score(model.hf, task, role=role))
    return scores, skipped


def _require_room(task: Task, models: Mapping[str, LoadedModel]) -> None:
    longest = max(group.clean_BT.shape[1] for group in task.tokens)
    for model in models.values():
        room = model.room_after(longest)
        if room is not None and room < 0:
            raise GossamerError(
                f"its prompts have up to {longest} tokens and {model.name} has {model.context_length} positions."
            )


@torch.no_grad()
def score(hf: PreTrainedModel, task: Task, *, role: str) -> TaskScore:
    """One model on one task."""
    right, nats = 0, 0.0
    for rows in task.batches(ROWS_AT_ONCE):
        logits_BV = next_token_logits(hf, rows.clean_BT)
        right += int(task.correct(logits_BV, rows).sum())
        nats += float(answer_nats(logits_BV, rows.answers_BA).sum())
    return TaskScore(task.name, role, len(task), task.chance, wilson(right, len(task)), nats / len(task))


def answer_nats(logits_BV: Tensor, answers_BA: Tensor) -> Tensor:
    """Minus the log of the probability [B] of all right answers together."""
    log_BA = logits_BV.double().log_softmax(-1).gather(1, answers_BA.clamp(min=0))
    return -log_BA.masked_fill(answers_BA < 0, -torch.inf).logsumexp(1)
