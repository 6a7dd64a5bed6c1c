"""Every setting of a sparsification run, in one frozen record that is stored with the run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gossamer.attention import GateConfig
from gossamer.errors import GossamerError, nearest
from gossamer.sparsify.objective import Constraint, ConstraintKind, Multiplier
from gossamer.sparsify.schedule import LearningRateSchedule, NoiseSchedule, SlackSchedule

GateKind = Literal["logit", "mass", "flow"]
Trainable = Literal["full", "attention", "lora"]
Reference = Literal["paired", "fixed"]
Choice = Literal["best", "last"]
PACE_ONLY = ("checkpoint_every",)  # settings that do not change what is computed


@dataclass(frozen=True)
class SparsifyConfig:
    """All settings of a run; `steps` or `minutes` says how long it is, and minutes become steps once.

    Constraint: `slack` nats, reached from `slack_start` (if given) over the first `slack_share` of the run. Training
    aims at the share `aim` of it, so that measurements on held-out text, which scatter, stay within it. A negative
    share aims below the dense model's loss, to keep up with a dense control where more training lowers the loss.
    `reference="paired"` compares with the dense model on the very batch (one more forward pass, far less
    noise); `"fixed"` compares with the dense model's loss on the held-out text, measured once. `distillation` is the
    share of the dense model's own predictions among what the constrained cross-entropy learns from.
    Gate: with `score_units` noise, penalty and the offsets' rate are relative to the range of each head's scores.
    `keep_mass` is the share of each head's attention the starting offsets keep; None starts from `gate_offset`.
    `control` trains the dense control instead: same tokens, same schedule, no gates.
    `choose="best"` keeps the sparsest held-out measurement that met the constraint, `"last"` the final weights.
    """

    slack: float = 0.01
    slack_start: float | None = None
    slack_share: float = 0.6
    aim: float = 0.9
    constraint: ConstraintKind = "cross-entropy"
    reference: Reference = "paired"
    distillation: float = 0.0
    gate: GateKind = "logit"
    gate_offset: float | None = None
    keep_mass: float | None = 0.99
    score_units: bool = True
    control: bool = False
    trainable: Trainable = "full"
    lora_rank: int = 16
    lora_alpha: float = 32.0

    steps: int | None = None
    minutes: float | None = None
    batch: int = 16
    length: int | None = None
    accumulation: int = 1
    learning_rate: float = 5e-4
    gate_learning_rate: float = 1.5e-2
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    clip: float = 1.0
    warmup_share: float = 0.02
    decay_share: float = 0.3
    final_rate_share: float = 0.1

    noise_start: float = 0.3
    noise_end: float = 0.05
    deterministic_share: float = 0.1
    backward_floor: float = 0.3
    penalty_tau: float = 1.0
    multiplier_start: float = 1.0
    multiplier_rate: float = 0.02
    multiplier_averaging: float = 0.9
    multiplier_proportional: float = 1.0
    multiplier_band: float = 1.0  # in units of the present slack, or of the final one if that is wider
    multiplier_minimum: float = 0.02
    multiplier_maximum: float = 20.0
    patience: int = 300

    bf16: bool = False
    seed: int = 0
    held_out: int = 32
    evaluate_every: int = 50
    checkpoint_every: int = 100
    choose: Choice = "best"

    def __post_init__(self) -> None:
        self._check_types()
        self.objective()
        self._check_ranges()
        self.multiplier()

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimisation step, over all processes."""
        assert self.length is not None
        return self.sequences_per_step * self.length

    @property
    def sequences_per_step(self) -> int:
        """Sequences in one optimisation step, over all processes."""
        return self.batch * self.accumulation

    @property
    def needs_teacher(self) -> bool:
        """Whether every step runs the dense model too."""
        return not self.control and (self.constraint == "kl" or self.reference == "paired" or self.distillation > 0)

    def objective(self) -> Constraint:
        """The constraint."""
        return Constraint(self.constraint, self.slack)

    def multiplier(self) -> Multiplier:
        """A fresh multiplier. It slows down within a band around the target."""
        return Multiplier(
            value=self.multiplier_start,
            rate=self.multiplier_rate,
            averaging=self.multiplier_averaging,
            minimum=self.multiplier_minimum,
            maximum=self.multiplier_maximum,
            band=self.multiplier_band * self.slack,
            proportional=self.multiplier_proportional,
        )

    def slacks(self) -> SlackSchedule:
        """The slack over the run's steps."""
        assert self.steps is not None
        end = self.aim * self.slack
        return SlackSchedule(self.steps, end if self.slack_start is None else self.slack_start, end, self.slack_share)

    def noise(self) -> NoiseSchedule:
        """The noise over the run's steps."""
        assert self.steps is not None
        return NoiseSchedule(
            self.steps, self.noise_start, self.noise_end, self.deterministic_share, self.backward_floor
        )

    def rate(self) -> LearningRateSchedule:
        """The learning rate's factor over the run's steps."""
        assert self.steps is not None
        warmup = round(self.steps * self.warmup_share)
        return LearningRateSchedule(self.steps, warmup, self.decay_share, self.final_rate_share)

    def gate_config(self) -> GateConfig:
        """The gate that is attached before calibration."""
        if self.gate_offset is None:
            return GateConfig(kind=self.gate)
        return GateConfig(kind=self.gate, offset=self.gate_offset)

    def replace(self, **changes: Any) -> SparsifyConfig:
        """A copy with some settings changed."""
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    def digest(self) -> str:
        """A short hash of the settings that decide the result."""
        settings = {name: value for name, value in self.to_dict().items() if name not in PACE_ONLY}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SparsifyConfig:
        """The record `to_dict` wrote; an unknown setting is refused."""
        _refuse_unknown(data)
        return cls(**data)

    def _check_types(self) -> None:
        for name, kind in get_type_hints(type(self)).items():
            value, kinds = getattr(self, name), get_args(kind) or (kind,)
            if get_origin(kind) is Literal:
                if value not in kinds:
                    raise GossamerError(
                        f"{name} is one of {', '.join(kinds)}, not {value!r}.{nearest(str(value), kinds)}"
                    )
            elif not any(_is_a(one, value) for one in kinds):
                raise GossamerError(f"{name} is {_IN_WORDS[kinds[0]]}, not {value!r}.")

    def _check_ranges(self) -> None:
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None and not allowed.holds(value):
                raise GossamerError(f"{name} must be {allowed.words}, not {value}.")
        if self.slack_start is not None and self.slack_start < self.slack:
            raise GossamerError(f"The slack cannot start at {self.slack_start}, below the {self.slack} it ends at.")
        if self.aim <= 0 and self.constraint == "kl":
            raise GossamerError("A divergence is never below 0: aim at a positive share of its slack, such as 0.9.")


@dataclass(frozen=True)
class Range:
    """The numbers a setting may have, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


COUNT = Range("at least 1", lambda number: number >= 1)
POSITIVE = Range("more than 0", lambda number: number > 0)
NOT_NEGATIVE = Range("at least 0", lambda number: number >= 0)
SHARE = Range("a share between 0 and 1", lambda number: 0 <= number <= 1)
AVERAGING = Range("at least 0 and less than 1", lambda number: 0 <= number < 1)

RANGES: dict[str, Range] = {
    **dict.fromkeys(("steps", "batch", "accumulation", "held_out", "evaluate_every", "checkpoint_every"), COUNT),
    **dict.fromkeys(("lora_rank", "patience"), COUNT),
    "length": Range("at least 2, so that there is something to predict", lambda number: number >= 2),
    "seed": Range("at least 0 and less than 2**32", lambda number: 0 <= number < 2**32),
    **dict.fromkeys(("minutes", "learning_rate", "gate_learning_rate", "clip", "lora_alpha"), POSITIVE),
    **dict.fromkeys(("noise_start", "noise_end", "backward_floor", "penalty_tau"), POSITIVE),
    **dict.fromkeys(("weight_decay", "multiplier_rate", "multiplier_proportional", "multiplier_band"), NOT_NEGATIVE),
    **dict.fromkeys(("slack_share", "warmup_share", "decay_share", "final_rate_share"), SHARE),
    **dict.fromkeys(("deterministic_share", "distillation"), SHARE),
    **dict.fromkeys(("beta1", "beta2", "multiplier_averaging"), AVERAGING),
    "keep_mass": Range("a share between 0 and 1 (0.99, say)", lambda number: 0 < number < 1),
    "aim": Range("at most 1: training aims at no more than all of the slack", lambda number: number <= 1),
}

_IN_WORDS: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a finite number"}


def _is_a(kind: Any, value: Any) -> bool:
    """Whether a value is what an annotation says; a truth value is no number, and infinity is none to train with."""
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)


def _refuse_unknown(settings: dict[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(SparsifyConfig)]
    for name in settings:
        if name not in known:
            raise GossamerError(f"There is no setting {name!r}.{nearest(name, known)}")
