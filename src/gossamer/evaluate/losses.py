"""Losses of several models on the same text, sequence by sequence, so that they can be compared in pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.attention import HeadOutput, attentions_of, gates_of, sampled_gates, tape
from gossamer.corpus import Sequences
from gossamer.evaluate.statistics import Floats
from gossamer.sparsify.density import Density, density_of
from gossamer.sparsify.forward import IGNORED, logits_of, model_inputs, target_tensor

MOST_NUMBERS = 2**25  # logits held at once, over all models

Forward = Callable[[dict[str, Any]], tuple[Tensor, int]]  # inputs to logits and open edges


@dataclass(frozen=True)
class TextLosses:
    """One model on a text: per sequence the summed cross-entropy and KL(reference || model), and all open edges."""

    nats_N: Floats
    divergence_N: Floats
    tokens_N: Floats
    open_edges: int

    @property
    def loss(self) -> float:
        """Mean cross-entropy per predicted token, in nats."""
        return float(self.nats_N.sum() / self.tokens_N.sum())

    @property
    def divergence(self) -> float:
        """Mean KL(reference || model) per predicted token, in nats."""
        return float(self.divergence_N.sum() / self.tokens_N.sum())


def as_it_is(hf: nn.Module) -> Forward:
    """The model with deterministic gates (or none)."""

    def forward(inputs: dict[str, Any]) -> tuple[Tensor, int]:
        if not gates_of(hf):
            return logits_of(hf, inputs, bf16=False), 0
        with sampled_gates(hf, tau=0.0) as run:
            logits_BQV = logits_of(hf, inputs, bf16=False)
        return logits_BQV, run.open_pairs

    return forward


def without_attention(hf: nn.Module) -> Forward:
    """The model with every edge shut: all heads put out zero, only the output projections' biases remain."""
    silent = [HeadOutput(mark.layer, None, 0.0) for mark, _ in attentions_of(hf)]

    def forward(inputs: dict[str, Any]) -> tuple[Tensor, int]:
        with tape(hf, replace=silent):
            return logits_of(hf, inputs, bf16=False), 0

    return forward


@torch.no_grad()
def losses_on(
    text: Sequences, models: Mapping[str, Forward], *, reference: str, device: torch.device, vocabulary: int
) -> dict[str, TextLosses]:
    """Every model on every sequence; divergence is from the model named `reference`."""
    collected: dict[str, list[Tensor]] = {name: [] for name in models}
    tokens: list[Tensor] = []
    open_edges = dict.fromkeys(models, 0)
    order = [reference, *(name for name in models if name != reference)]
    for part in parts(text, rows_at_once(text.length, vocabulary, copies=6)):
        inputs, targets_BQ = model_inputs(part, device), target_tensor(part, device)
        tokens.append((targets_BQ != IGNORED).sum(1))
        reference_BQV: Tensor | None = None
        for name in order:
            logits_BQV, n_open = models[name](inputs)
            log_BQV = logits_BQV.log_softmax(-1)
            reference_BQV = log_BQV if reference_BQV is None else reference_BQV
            collected[name].append(torch.stack(_sums(log_BQV, reference_BQV, targets_BQ)).cpu())
            open_edges[name] += n_open
    tokens_N = torch.cat(tokens).cpu().numpy().astype(np.float64)
    result = {}
    for name in models:
        nats_N, divergence_N = torch.cat(collected[name], 1).numpy()
        result[name] = TextLosses(nats_N, divergence_N, tokens_N, open_edges[name])
    return result


def _sums(log_BQV: Tensor, reference_BQV: Tensor, targets_BQ: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and divergence from the reference, summed over each sequence's predicted tokens."""
    counted_BQ = targets_BQ != IGNORED
    nats_BQ = -log_BQV.gather(-1, targets_BQ.clamp(min=0)[..., None])[..., 0]
    if log_BQV is reference_BQV:
        divergence_BQ = torch.zeros_like(nats_BQ)
    else:
        divergence_BQ = (reference_BQV.exp() * (reference_BQV - log_BQV)).sum(-1)
    return (nats_BQ.double() * counted_BQ).sum(1), (divergence_BQ.double() * counted_BQ).sum(1)


def rows_at_once(length: int, vocabulary: int, *, copies: int) -> int:
    """How many sequences fit into memory."""
    return max(1, MOST_NUMBERS // (length * vocabulary * copies))


def parts(text: Sequences, rows: int) -> Iterator[Sequences]:
    """The text in pieces of at most `rows` sequences."""
    for start in range(0, len(text), rows):
        yield text.rows(slice(start, start + rows))


def density_on(text: Sequences, open_edges: int, hf: nn.Module) -> Density:
    """Density of a gated model's open edges on the text."""
    gates = gates_of(hf)
    return density_of(text, open_edges=open_edges, n_layers=len(gates), n_heads=gates[0].offset_H.numel())


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Without dropout; each model's mode is put back afterwards."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)
