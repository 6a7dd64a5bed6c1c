"""Noise and learning rate as pure functions of the step, so that a resumed run takes exactly the same path."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class NoiseSchedule:
    """The sampling noise tau falls geometrically from `start` to `end`; the last share of the run has none at all.

    Without noise (tau = 0) gates are deterministic and gradients straight-through: the model that is trained is then
    the model that is reported.
    """

    steps: int
    start: float = 1.0
    end: float = 0.1
    deterministic_share: float = 0.1
    backward_floor: float = 0.3

    def noisy_steps(self) -> int:
        """How many steps have noise."""
        return self.steps - round(self.steps * self.deterministic_share)

    def tau(self, step: int) -> float:
        """The noise's scale in step 0, 1, ...: 0 means none."""
        noisy = self.noisy_steps()
        if step >= noisy:
            return 0.0
        progress = step / max(noisy - 1, 1)
        return self.start * (self.end / self.start) ** progress

    def backward_tau(self, step: int) -> float:
        """The width of the surrogate's slope: as wide as the noise, but not below the floor."""
        return max(self.tau(step), self.backward_floor)


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warm-up from zero, a plateau, and a cosine descent to `final_share` over the last `decay_share` of the run."""

    steps: int
    warmup_steps: int
    decay_share: float = 0.3
    final_share: float = 0.1

    def factor(self, step: int) -> float:
        """What the learning rates are multiplied with in step 0, 1, ..."""
        return self._warmup(step) * self._decay(step)

    def _warmup(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warmup_steps + 1))

    def _decay(self, step: int) -> float:
        first = self.steps - round(self.steps * self.decay_share)
        if step < first:
            return 1.0
        progress = (step - first + 1) / (self.steps - first)
        return self.final_share + (1 - self.final_share) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class SlackSchedule:
    """The slack falls in a line from `start` to `end` over the first `share` of the run, and stays there.

    Room at the beginning lets edges go before the weights have learned to do without them; only `end` is the promise.
    """

    steps: int
    start: float
    end: float
    share: float = 0.6

    def slack(self, step: int) -> float:
        """The slack in step 0, 1, ..."""
        progress = min(1.0, step / max(1.0, self.steps * self.share))
        return self.start + (self.end - self.start) * progress
