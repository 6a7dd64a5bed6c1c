"""The settings of a training run; checked when they are made, stored with the run."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, Self, get_args

from gossamer.errors import GossamerError, nearest
from gossamer.transcoders.module import Activation, Kind

Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TranscoderConfig:
    """How transcoders are trained.

    `target_l0` is the number of active features a layer and position: a topk transcoder keeps exactly so many, for the
    others a controller moves each layer's sparsity coefficient until that many are left. The target falls
    geometrically from half of all features over `sparsity_share` of the run. `bandwidth` is the width, in units of a
    pre-activation, of the kernel through which a jumprelu's jump gets its gradient. A feature that was off for
    `dead_after` steps is dead: `dead_pull` is the weight of the term that draws its pre-activation to its threshold.
    `precision` is that of the matrix products in training; weights, optimiser and reports are float32 either way.
    """

    kind: Kind = "cross-layer"
    n_features: int = 1024
    activation: Activation = "jumprelu"
    target_l0: int = 32
    steps: int = 6_000
    batch: int = 64
    learning_rate: float = 1e-3
    warmup_share: float = 0.02
    decay_share: float = 0.4
    sparsity_share: float = 0.4
    bandwidth: float = 0.5
    control_rate: float = 0.01
    control_gain: float = 1.0
    dead_after: int = 200
    dead_pull: float = 1e-2
    clip: float = 1.0
    precision: Precision = "float32"
    seed: int = 0
    checkpoint_every: int = 500

    def __post_init__(self) -> None:
        for name in ("n_features", "target_l0", "steps", "batch", "dead_after", "checkpoint_every"):
            if int(getattr(self, name)) < 1:
                raise GossamerError(f"{name} is a positive whole number, not {getattr(self, name)}.")
        for name in ("learning_rate", "bandwidth", "clip"):
            if not getattr(self, name) > 0:
                raise GossamerError(f"{name} is a positive number, not {getattr(self, name)}.")
        if self.precision not in get_args(Precision):
            raise GossamerError(f"precision is one of {', '.join(get_args(Precision))}, not {self.precision!r}.")
        if self.activation == "relu":
            raise GossamerError("A relu transcoder has no sparsity to train; choose jumprelu or topk.")
        if self.target_l0 >= self.n_features:
            raise GossamerError(
                f"{self.target_l0} active of {self.n_features} features is not sparse; lower target_l0."
            )

    def rate_factor(self, step: int) -> float:
        """The learning rate's share of its peak: a linear warm-up, a plateau, a linear decay to 0."""
        warmup, decay = max(self.warmup_share * self.steps, 1), max(self.decay_share * self.steps, 1)
        return min(1.0, (step + 1) / warmup, (self.steps - step) / decay)

    def l0_target(self, step: int) -> float:
        """How many features a layer should be active after this step."""
        progress = min(1.0, step / max(self.sparsity_share * self.steps, 1))
        start = max(self.n_features / 2, self.target_l0)
        return math.exp((1 - progress) * math.log(start) + progress * math.log(self.target_l0))

    def replace(self, **changes: Any) -> Self:
        """The same settings but for some."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Settings from plain data; an unknown name is refused."""
        known = {item.name for item in fields(cls)}
        for name in settings:
            if name not in known:
                raise GossamerError(f"There is no setting {name!r}.{nearest(name, known)}")
        return cls(**settings)
