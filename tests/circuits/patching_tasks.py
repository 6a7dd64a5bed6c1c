"""A task of random tokens whose prompts have two lengths and first differ in several places, and the naive patching."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from edge_models import N_VOCABULARY

from gossamer import LoadedModel
from gossamer.attention import HeadOutput, Tape, tape
from gossamer.tasks import Pair, Task, TokenBatch


def make_task(n: int = 5, *, first: tuple[int, ...] = (3, 1, 3, 2), metric: str = "logit difference") -> Task:
    """`n` prompts of 7 and 9 tokens; prompt i differs from position first[i] on in every second token."""
    generator = torch.Generator().manual_seed(4)
    rows = {7: list(range(0, n, 2)), 9: list(range(1, n, 2))}
    tokens = []
    for length, members in rows.items():
        clean_BT = torch.randint(1, N_VOCABULARY, (len(members), length), generator=generator)
        corrupt_BT = clean_BT.clone()
        for index, row in enumerate(members):
            places = slice(first[row % len(first)], length, 2)
            corrupt_BT[index, places] = 1 + (clean_BT[index, places] + 7) % (N_VOCABULARY - 1)
        answers_B3 = 1 + torch.stack([torch.randperm(N_VOCABULARY - 1, generator=generator)[:3] for _ in members])
        answers_B3[1:, 1] = -1  # the first prompt of a length has two right answers
        tokens.append(TokenBatch(tuple(members), clean_BT, corrupt_BT, answers_B3[:, :2], answers_B3[:, 2:]))
    pairs = tuple(Pair(f"clean {i}", f"corrupt {i}", ("a",), ("b",), f"template {i % 2}") for i in range(n))
    return Task("random", "random tokens", pairs, tuple(tokens), "wrong answers", metric, 0.5, 0)  # type: ignore[arg-type]


def same_prompts(task: Task) -> Task:
    """The task with the clean prompts as corrupt ones."""
    return replace(task, tokens=tuple(replace(batch, corrupt_BT=batch.clean_BT) for batch in task.tokens))


def score(model: LoadedModel, task: Task, batch: TokenBatch, ids_BT: torch.Tensor) -> torch.Tensor:
    return task.score(model.logits(ids_BT)[:, -1], batch)


def record(model: LoadedModel, ids_BT: torch.Tensor) -> tuple[Tape, list[torch.Tensor]]:
    """Head outputs by the tape, and what every MLP writes."""
    written: list[torch.Tensor] = []
    handles = [
        writer.register_forward_hook(lambda module, args, output: written.append(output))
        for writer in model.anatomy.mlp_writers
    ]
    with tape(model.hf, record=("head_output",)) as heard:
        model.logits(ids_BT)
    for handle in handles:
        handle.remove()
    return heard, written


def naive(model: LoadedModel, task: Task, *, base: str, source: str) -> tuple[np.ndarray, np.ndarray]:
    """One whole forward for each head and each MLP, replaced through the tape or a hook: metrics [L, H, N], [L, N]."""
    parts = model.anatomy
    heads_LHN = np.zeros((parts.n_layers, parts.n_heads, len(task)))
    mlps_LN = np.zeros((parts.n_layers, len(task)))
    for batch in task.tokens:
        rows = list(batch.rows)
        run_on = batch.clean_BT if base == "clean" else batch.corrupt_BT
        heard, written = record(model, batch.clean_BT if source == "clean" else batch.corrupt_BT)
        for layer in range(parts.n_layers):
            for head in range(parts.n_heads):
                value = torch.tensor(0.0) if source == "zero" else heard["head_output", layer][:, :, [head]]
                with tape(model.hf, replace=[HeadOutput(layer, head, value)]):
                    heads_LHN[layer, head, rows] = score(model, task, batch, run_on)
            value = torch.zeros_like(written[layer]) if source == "zero" else written[layer]
            handle = parts.mlp_writers[layer].register_forward_hook(lambda module, args, output, value=value: value)
            mlps_LN[layer, rows] = score(model, task, batch, run_on)
            handle.remove()
    return heads_LHN, mlps_LN
