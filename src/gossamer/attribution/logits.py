"""Which logits a graph explains: the likeliest next tokens, or those that were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.attribution.frozen import FrozenModel
from gossamer.errors import GossamerError

MOST_TARGETS, COVERED = 10, 0.95


@dataclass(frozen=True, eq=False)
class LogitTargets:
    """Tokens after the prompt, their probabilities, and their logits less the mean of all."""

    ids_K: Tensor
    probability_K: Tensor
    value_K: Tensor

    def directions(self, like_V: Tensor) -> Tensor:
        """Each target as a direction [K,V] among the logits."""
        direction_KV = like_V.new_full((len(self.ids_K), len(like_V)), -1 / len(like_V))
        direction_KV[torch.arange(len(self.ids_K)), self.ids_K] += 1
        return direction_KV


def logit_targets(frozen: FrozenModel, tokens: Sequence[int] | None = None) -> LogitTargets:
    """The given tokens, or the likeliest: at most ten, as many as it takes to cover 95 % of the probability."""
    logits_V = frozen.logits_V
    cap = getattr(frozen.model.hf.config, "final_logit_softcapping", None)
    probability_V = (torch.tanh(logits_V / cap) * cap if cap else logits_V).softmax(-1)
    if tokens is None:
        ordered = probability_V.sort(descending=True)
        n = int((ordered.values.cumsum(0) < COVERED).sum()) + 1
        ids_K = ordered.indices[: min(n, MOST_TARGETS)]
    else:
        ids_K = _checked(tokens, len(logits_V)).to(logits_V.device)
    return LogitTargets(ids_K, probability_V[ids_K], logits_V[ids_K] - logits_V.mean())


def _checked(tokens: Sequence[int], n_vocabulary: int) -> Tensor:
    if not tokens or len(set(tokens)) < len(tokens):
        raise GossamerError(f"The target tokens {list(tokens)} must be different ones, and at least one.")
    if min(tokens) < 0 or max(tokens) >= n_vocabulary:
        raise GossamerError(f"The target tokens {list(tokens)} must be ids below {n_vocabulary}.")
    return torch.tensor(list(tokens))
