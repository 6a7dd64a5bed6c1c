"""The constrained objective: as few open edges as the loss allows.

    min over the weights, max over lambda >= 0:   E[open share] + lambda * (constrained quantity - target)

The multiplier follows GECO (Rezende & Viola 2018): it moves in log space, on a moving average of the violation, so it
rises while the constraint is violated, falls while it is met, and is never negative. The loss that is minimised is the
Lagrangian divided by `1 + lambda`, which keeps its size bounded whatever the multiplier does.

Symbols: `slack` is the room in nats, `target` the level the constrained quantity has to stay under (for cross-entropy
the dense model's loss plus the slack, for the divergence from the dense model the slack itself), `violation` the
constrained quantity minus its target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from gossamer.errors import GossamerError, nearest

ConstraintKind = Literal["cross-entropy", "kl"]


@dataclass(frozen=True)
class Constraint:
    """What has to stay small, and how much room it is given, in nats."""

    kind: ConstraintKind = "cross-entropy"
    slack: float = 0.01

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            known = get_args(ConstraintKind)
            raise GossamerError(
                f"The constraint is {' or '.join(known)}, not {self.kind!r}.{nearest(self.kind, known)}"
            )
        if not (math.isfinite(self.slack) and self.slack > 0):
            raise GossamerError(f"The slack must be more than 0 nats, not {self.slack}; 0.01 is a good first choice.")

    def target(self, dense_loss: float) -> float:
        """The level to stay under, given the dense model's loss on the same text."""
        return self.slack if self.kind == "kl" else dense_loss + self.slack


@dataclass
class Multiplier:
    """The Lagrange multiplier and the moving average that drives it.

    A step multiplies by `exp(rate * clip(average / band, -1, 1))`: full speed outside the band, gently inside it, so
    that it settles instead of swinging. A band of 0 leaves the sign alone.

    Alone, that is an integral controller, which reacts late and overshoots. `proportional` adds an answer to the
    present violation: the weight in use is `value * exp(proportional * clip(average / band, -1, 1))`.
    """

    value: float = 1.0
    rate: float = 0.05
    averaging: float = 0.95
    minimum: float = 0.02
    maximum: float = 20.0
    band: float = 0.0
    proportional: float = 0.0
    average: float = 0.0
    updates: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.value <= self.maximum:
            raise GossamerError(
                f"The multiplier's bounds must enclose its start and be positive, not "
                f"{self.minimum} <= {self.value} <= {self.maximum}."
            )

    def update(self, violation: float) -> float:
        """Take in one step's violation and return the multiplier for the next step."""
        self.updates += 1
        # The first values weigh as much as the later ones: no bias towards zero at the start.
        keep = min(self.averaging, 1 - 1 / self.updates)
        self.average = keep * self.average + (1 - keep) * violation
        moved = self.value * math.exp(self.rate * self._direction())
        self.value = min(max(moved, self.minimum), self.maximum)
        return self.value

    @property
    def weight(self) -> float:
        """The multiplier in use: the value, and the proportional answer to the present violation."""
        answered = self.value * math.exp(self.proportional * self._direction())
        return min(max(answered, self.minimum), self.maximum)

    @property
    def at_ceiling(self) -> bool:
        """Whether the constraint already has all the weight it can get."""
        return self.value >= self.maximum

    def state_dict(self) -> dict[str, Any]:
        """What changes during training."""
        return {"value": self.value, "average": self.average, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`'s result."""
        self.value, self.average, self.updates = float(state["value"]), float(state["average"]), int(state["updates"])

    def _direction(self) -> float:
        if self.band > 0:
            return min(max(self.average / self.band, -1.0), 1.0)
        return math.copysign(1.0, self.average) if self.average else 0.0


def lagrangian(open_share: Any, constrained: Any, multiplier: float) -> Any:
    """`(open share + lambda * constrained quantity) / (1 + lambda)`; the target is a constant and has no gradient."""
    assert multiplier >= 0
    return (open_share + multiplier * constrained) / (1 + multiplier)
