"""Which tokens a label may name: readable ones, which training has told apart from all others.

A vocabulary holds tokens that say nothing to a reader (control characters, pieces of a letter, special tokens) and some
that no text ever had. Those were pushed down together whatever came, until their unembeddings were all but one vector;
what raises one of them raises them all, by accident.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gossamer.attribution.targets import spelled
from gossamer.models import LoadedModel

TOLD_APART = 0.99  # the cosine of two unembeddings from which on they are one
AT_A_TIME = 64


class Nameable:
    """Finds the best tokens that may be named; what it has found out about a token it remembers."""

    def __init__(self, model: LoadedModel, unembedding_VD: Tensor) -> None:
        self.model = model
        self.unit_VD = torch.nn.functional.normalize(unembedding_VD, dim=1)
        self.known: dict[int, bool] = {}

    def best(self, raised_V: Tensor, n: int) -> tuple[str, ...]:
        """The at most `n` tokens that are raised most and may be named; what is not raised is not among them."""
        order = [token for token in raised_V.argsort(descending=True).tolist() if raised_V[token] > 0]
        found: list[str] = []
        for first in range(0, len(order), AT_A_TIME):
            some = order[first : first + AT_A_TIME]
            self._find_out(some)
            found += [spelled(self.model, token) for token in some if self.known[token]]
            if len(found) >= n:
                break
        return tuple(found[:n])

    def _find_out(self, tokens: list[int]) -> None:
        new = [token for token in tokens if token not in self.known]
        alike_NV = self.unit_VD[new] @ self.unit_VD.T
        alike_NV[torch.arange(len(new)), new] = 0
        for token, alike in zip(new, alike_NV.amax(1).tolist(), strict=True):
            self.known[token] = alike < TOLD_APART and self._is_readable(token)

    def _is_readable(self, token: int) -> bool:
        tokenizer = self.model.optional_tokenizer
        if tokenizer is None:
            return True
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        return token not in self._special and "\ufffd" not in text and bool(text.strip()) and text.isprintable()

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.model.tokenizer.all_special_ids)
