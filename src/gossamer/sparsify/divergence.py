"""When a constraint is out of reach.

Criterion: the multiplier has been at its ceiling for `patience` steps in a row, so that nearly all of the gradient
works for the constraint, and in all that time the violation's moving average has not fallen by a tenth.
"""

from __future__ import annotations

from typing import Any

from gossamer.errors import GossamerError
from gossamer.sparsify.objective import Multiplier

_PROGRESS = 0.9


class DivergedError(GossamerError):
    """The constraint cannot be met from here."""


class DivergenceWatch:
    """Counts steps at the ceiling without progress."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.steps = 0
        self.reference = 0.0

    @property
    def suspicious(self) -> bool:
        """At the ceiling without progress: no state to keep as the last good one."""
        return self.steps > 0

    def see(self, multiplier: Multiplier) -> None:
        """Take in the multiplier after a step."""
        if not multiplier.at_ceiling:
            self.steps = 0
            return
        if self.steps == 0 or multiplier.average < _PROGRESS * self.reference:
            self.steps, self.reference = 0, multiplier.average
        self.steps += 1
        if self.steps > self.patience:
            raise DivergedError(
                f"the constraint is out of reach (its multiplier has been at {multiplier.maximum:g} for "
                f"{self.patience} steps, and the violation of {multiplier.average:.3g} nats is not shrinking): give "
                "more slack, a lower learning rate, or start from gates that keep more"
            )

    def state_dict(self) -> dict[str, Any]:
        """What changes during training."""
        return {"steps": self.steps, "reference": self.reference}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`'s result."""
        self.steps, self.reference = int(state["steps"]), float(state["reference"])
