"""What a run trains on and what it is measured on, and in which order: a pure function of the seed and the step."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gossamer.corpus.sequences import Integers, Sequences
from gossamer.errors import GossamerError


def split_held_out(text: Sequences, held_out: int) -> tuple[Sequences, Sequences]:
    """Training and held-out sequences: the last ones, at most a tenth of a short text, never in both."""
    if len(text) < 2:
        raise GossamerError(
            f"The text does not fill 2 sequences of {text.length} tokens, one to train on and one to measure on: "
            "give more text or a shorter length."
        )
    n_held_out = min(held_out, max(1, len(text) // 10))
    return text.rows(slice(0, len(text) - n_held_out)), text.rows(slice(len(text) - n_held_out, len(text)))


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, n_sequences: int) -> Integers:
    return np.random.default_rng((seed, epoch)).permutation(n_sequences)


def step_rows(step: int, *, seed: int, n_sequences: int, per_step: int) -> Integers:
    """The sequences of one step: epochs one after the other, each in an order of its own."""
    positions = np.arange(step * per_step, (step + 1) * per_step)
    epochs = positions // n_sequences
    rows = np.empty(per_step, dtype=np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = _epoch_order(seed, int(epoch), n_sequences)[positions[here] % n_sequences]
    return rows
