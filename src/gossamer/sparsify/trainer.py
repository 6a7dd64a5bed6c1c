"""One optimisation step after the other; files, signals and displays live elsewhere (`run`).

A step is a function of the state and the step number alone: data order, noise and rates are computed from
(seed, step), and there is no other randomness (dropout is off). That is what makes a resumed run exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import gates_of, sampled_gates
from gossamer.errors import GossamerError
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.data import Sequences, step_rows
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.forward import (
    cross_entropy_sum,
    divergence_sum,
    logits_of,
    model_inputs,
    target_tensor,
)
from gossamer.sparsify.objective import Constraint, lagrangian
from gossamer.sparsify.student import Student, parameter_groups

_SEED_STRIDE = 1_000_003  # processes draw different noise


@dataclass(frozen=True)
class StepRecord:
    """What one step did; everything here is reproducible to the last bit, so no times."""

    step: int
    loss: float
    target: float | None
    violation: float | None
    violation_average: float | None
    multiplier: float | None
    open_share: float
    expected_open: float | None
    divergence: float | None
    tau: float
    rate_factor: float
    gradient_norm: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass
class _Sums:
    """Sums over the micro-batches of a step, of this process."""

    loss: float = 0.0
    dense_loss: float = 0.0
    divergence: float = 0.0
    open_share: float = 0.0
    expected_open: float = 0.0


class NotFiniteError(GossamerError):
    """A loss or a gradient that is not a number."""


class Trainer:
    """The state of a run in memory: student, optimiser, multiplier, and the number of steps done."""

    def __init__(
        self,
        student: Student,
        teacher: nn.Module | None,
        text: Sequences,
        config: SparsifyConfig,
        *,
        dense_loss: float,
        processes: Processes,
    ) -> None:
        if config.batch % processes.count:
            raise GossamerError(f"A batch of {config.batch} cannot be divided over {processes.count} processes evenly.")
        self.student, self.teacher, self.text, self.config = student, teacher, text, config
        self.dense_loss, self.processes = dense_loss, processes
        self.parameters = list(student.trainable().values())
        groups = parameter_groups(student, config)
        fused = all(parameter.dtype in (torch.float32, torch.float64) for parameter in self.parameters)
        self.optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), fused=fused)
        self.multiplier = config.multiplier()
        self.noise, self.rate, self.slacks = config.noise(), config.rate(), config.slacks()
        self.step = 0
        self.units: list[Tensor] | None = None  # per layer and head, what one unit of gate logit is

    def advance(self) -> StepRecord:
        """Do one step."""
        config, step = self.config, self.step
        factor = self.rate.factor(step)
        self.multiplier.band = config.multiplier_band * max(self.slacks.slack(step), config.slack)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_rate"] * factor
        sums = self._gradients(step)
        self.processes.average_gradients(self.parameters)
        norm = float(nn.utils.clip_grad_norm_(self.parameters, config.clip))
        values = [sums.loss, sums.dense_loss, sums.divergence, sums.open_share, sums.expected_open]
        sums = _Sums(*self.processes.mean(values))
        if not (math.isfinite(sums.loss) and math.isfinite(norm)):
            raise NotFiniteError(
                f"the {'loss' if math.isfinite(norm) else 'gradient'} of step {step + 1} is not a number"
            )
        weight = self.multiplier.weight
        target = self._target(sums)
        violation = None if target is None else self._constrained_value(sums) - target
        self._move()
        if violation is not None:
            self.multiplier.update(violation)
        self.step += 1
        return self._record(sums, target, violation, weight=weight, factor=factor, norm=norm)

    def _move(self) -> None:
        """One step of the optimiser; offsets move in their heads' units."""
        offsets = [gate.offset_H for gate in gates_of(self.student.hf)] if self.units is not None else []
        before = [offset_H.detach().clone() for offset_H in offsets]
        self.optimizer.step()
        for offset_H, old_H, unit_H in zip(offsets, before, self.units or [], strict=True):
            offset_H.data.copy_(old_H + unit_H * (offset_H.detach() - old_H))
        self.optimizer.zero_grad(set_to_none=True)

    def _gradients(self, step: int) -> _Sums:
        """Forward and backward over the micro-batches; gradients of the step's mean loss are left on the parameters."""
        micro_batches, n_targets = self._micro_batches(step)
        sums = _Sums()
        for micro, part in enumerate(micro_batches):
            inputs, targets_BQ = model_inputs(part, self.processes.device), target_tensor(part, self.processes.device)
            teacher_BQV = self._teacher_logits(inputs)
            with self._sampling(step, micro) as run:
                logits_BQV = logits_of(self.student.hf, inputs, bf16=self.student.bf16)
            loss = cross_entropy_sum(logits_BQV, targets_BQ) / n_targets
            divergence = self._divergence(logits_BQV, teacher_BQV, targets_BQ, n_targets, sums)
            constrained = self._constrained(loss, divergence)
            if run is None:
                constrained.backward()
                sums.open_share += 1 / len(micro_batches)
            else:
                penalty = run.expected_open / len(micro_batches)
                lagrangian(penalty, constrained, self.multiplier.weight).backward()
                sums.expected_open += float(penalty.detach())
                sums.open_share += run.open_share / len(micro_batches)
            sums.loss += float(loss.detach())
        return sums

    def _micro_batches(self, step: int) -> tuple[list[Sequences], float]:
        """This process's sequences of a step, and the step's targets per process (so that means are over the step)."""
        config, processes = self.config, self.processes
        rows = step_rows(
            step, seed=config.seed, n_sequences=len(self.text), per_step=config.sequences_per_step
        ).reshape(config.accumulation, config.batch)
        n_targets = int((self.text.rows(rows.reshape(-1)).targets() >= 0).sum())
        mine = rows[:, processes.index :: processes.count]
        return [self.text.rows(part) for part in mine], max(n_targets, 1) / processes.count

    @contextmanager
    def _sampling(self, step: int, micro: int) -> Iterator[Any]:
        if self.config.control:
            yield None
            return
        with sampled_gates(
            self.student.hf,
            tau=self.noise.tau(step),
            tau_backward=self.noise.backward_tau(step),
            penalty_tau=self.config.penalty_tau,
            seed=self.config.seed + _SEED_STRIDE * self.processes.index,
            step=step * self.config.accumulation + micro,
            units=self.units,
        ) as run:
            yield run

    def _teacher_logits(self, inputs: dict[str, Any]) -> Tensor | None:
        if self.teacher is None:
            return None
        with torch.no_grad():
            return logits_of(self.teacher, inputs, bf16=self.student.bf16)

    def _divergence(
        self, logits_BQV: Tensor, teacher_BQV: Tensor | None, targets_BQ: Tensor, n_targets: float, sums: _Sums
    ) -> Tensor | None:
        if teacher_BQV is None:
            return None
        with torch.set_grad_enabled(self.config.constraint == "kl" or self.config.distillation > 0):
            divergence = divergence_sum(logits_BQV, teacher_BQV, targets_BQ) / n_targets
        sums.divergence += float(divergence.detach())
        sums.dense_loss += float(cross_entropy_sum(teacher_BQV, targets_BQ) / n_targets)
        return divergence

    def _constrained(self, loss: Tensor, divergence: Tensor | None) -> Tensor:
        """The quantity whose gradient holds the constraint up."""
        if self.config.control or divergence is None:
            return loss
        if self.config.constraint == "kl":
            return divergence
        share = self.config.distillation
        return (1 - share) * loss + share * divergence if share else loss

    def _constrained_value(self, sums: _Sums) -> float:
        return sums.divergence if self.config.constraint == "kl" else sums.loss

    def _target(self, sums: _Sums) -> float | None:
        """What the constrained value of this step should stay under."""
        if self.config.control:
            return None
        constraint = Constraint(self.config.constraint, self.slacks.slack(self.step))
        return constraint.target(self._dense_loss(sums))

    def _dense_loss(self, sums: _Sums) -> float:
        return sums.dense_loss if self.config.reference == "paired" and self.teacher is not None else self.dense_loss

    def _record(
        self,
        sums: _Sums,
        target: float | None,
        violation: float | None,
        *,
        weight: float,
        factor: float,
        norm: float,
    ) -> StepRecord:
        gated = not self.config.control
        return StepRecord(
            step=self.step,
            loss=sums.loss,
            target=target,
            violation=violation,
            violation_average=self.multiplier.average if gated else None,
            multiplier=weight if gated else None,
            open_share=sums.open_share,
            expected_open=sums.expected_open if gated else None,
            divergence=sums.divergence if self.teacher is not None else None,
            tau=self.noise.tau(self.step - 1) if gated else 0.0,
            rate_factor=factor,
            gradient_norm=norm,
        )
