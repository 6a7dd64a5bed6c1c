"""One optimisation step after the other; files and displays live in `run`.

A step is a function of the state and the step number alone, which is what makes a resumed run exact.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError
from gossamer.transcoders.activations import Activations
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.control import SparsityController
from gossamer.transcoders.learner import Forward, Learner, Scales
from gossamer.transcoders.module import TranscoderShape


@dataclass(frozen=True)
class StepRecord:
    """What a step did, means over layers; reproducible, so no times."""

    step: int
    unexplained: float
    l0: float
    l0_largest: float
    l0_target: float
    dead_share: float
    coefficient: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


class Trainer:
    """The state of a run in memory: learner, optimiser, controller, and when each feature was last active."""

    def __init__(
        self, activations: Activations, config: TranscoderConfig, shape: TranscoderShape, scales: Scales
    ) -> None:
        self.activations, self.config, self.scales = activations, config, scales
        device = scales.input_mean_LD.device
        self.learner = Learner(shape, bandwidth=config.bandwidth, seed=config.seed).to(device)
        self.parameters = {name: p for name, p in self.learner.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.Adam(self.parameters.values(), lr=config.learning_rate, fused=True)
        self.controller = SparsityController(shape.n_layers, rate=config.control_rate, gain=config.control_gain)
        self.last_active_LF = torch.zeros(shape.n_layers, shape.n_features, dtype=torch.int64, device=device)
        self.step = 0
        self._latest: tuple[Tensor, ...] | None = None

    def advance(self) -> None:
        """Do one step; `record` says what it did."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * config.rate_factor(self.step)
        seen = self.scales.normalise(*self.activations.batch(self.step))
        with torch.autocast(seen[0].device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            forward = self.learner(*seen)
        dead_LF = self.dead_features()
        loss = forward.unexplained_L.sum() + config.dead_pull * _pull(forward, dead_LF)
        coefficients_L = torch.zeros_like(forward.l0_L)
        if config.activation == "jumprelu":
            coefficients_L = self.controller.coefficients(forward.l0_L, config.l0_target(self.step))
            loss = loss + (coefficients_L * forward.l0_L).sum() / config.target_l0
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters.values(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.last_active_LF.masked_fill_(forward.active_LF, self.step)
        self._latest = tuple(value.detach() for value in (forward.unexplained_L, forward.l0_L, coefficients_L, dead_LF))
        self.step += 1

    def dead_features(self) -> Tensor:
        """The features [L, F] that were off at every position of the last steps."""
        return self.step - self.last_active_LF > self.config.dead_after

    def record(self) -> StepRecord:
        """What the last step did; waits for the device, so not for every step."""
        assert self._latest is not None
        unexplained_L, l0_L, coefficients_L, dead_LF = self._latest
        record = StepRecord(
            step=self.step,
            unexplained=float(unexplained_L.mean()),
            l0=float(l0_L.mean()),
            l0_largest=float(l0_L.max()),
            l0_target=self.config.l0_target(self.step - 1),
            dead_share=float(dead_LF.float().mean()),
            coefficient=float(coefficients_L.mean()),
        )
        if not math.isfinite(record.unexplained):
            raise GossamerError(
                f"The loss of step {self.step} is not a number; lower the learning rate (now "
                f"{self.config.learning_rate:g})."
            )
        return record


def _pull(forward: Forward, dead_LF: Tensor) -> Tensor:
    """How far dead features' pre-activations lie below where they would be active, mean over positions."""
    distance_LNF = (forward.boundary_LNF.detach() - forward.pre_LNF).relu()
    return (distance_LNF.mean(1) * dead_LF).sum() / forward.l0_L.shape[0]
