"""Where a training step's activations come from: the model's own forward pass, on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

from gossamer.corpus.order import step_rows
from gossamer.corpus.sequences import Sequences
from gossamer.models import LoadedModel
from gossamer.transcoders.learner import Scales
from gossamer.transcoders.sites import mlp_activity

SEQUENCES_FOR_SCALES = 256


class Activations(Protocol):
    """What the trainer reads from; a batch is a function of the step alone, so that a run can be taken up again."""

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """What the MLPs read and write [L, N, D] in one step."""

    def sample(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of a fixed sample, to measure scales on."""


class OnTheFly:
    """A forward pass a step: best where the model is cheap beside its transcoders."""

    def __init__(self, model: LoadedModel, text: Sequences, *, batch: int, seed: int) -> None:
        self.model, self.text, self.per_step, self.seed = model, text, batch, seed
        model.hf.eval()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The step's sequences: epochs one after the other, each in an order of its own."""
        rows = step_rows(step, seed=self.seed, n_sequences=len(self.text), per_step=self.per_step)
        return mlp_activity(self.model, self.text.rows(rows))

    def sample(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The first sequences of the text."""
        first = self.text.rows(slice(0, SEQUENCES_FOR_SCALES))
        for start in range(0, len(first), self.per_step):
            yield mlp_activity(self.model, first.rows(slice(start, start + self.per_step)))


def scales_of(activations: Activations) -> Scales:
    """Centres and sizes of a source's activations."""
    return Scales.of(activations.sample())
