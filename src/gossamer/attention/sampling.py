"""Gates in training: straight-through samples, their noise, and the penalty.

`z = g + tau * n` with `n` standard logistic noise; forward `A = 1[z > 0]`, backward the derivative of
`sigmoid(z / tau_backward)`. The penalty is the mean over allowed pairs of `sigmoid(g / penalty_tau)`:

- `penalty_tau=1` (the default) is the surrogate `sigmoid(g)`, which keeps its shape while the noise is annealed;
- `penalty_tau=tau` is the true probability of an edge being open under the noise that is used.

Scores of one head may range over a few tenths, those of another over tens. With `units` u_h, one per head, all three
temperatures are in that head's own unit: `tau u_h`, `tau_backward u_h`, `penalty_tau u_h`. What is open without noise
is the same for any units.

Noise is counter-based. One pool is drawn a step, a function of (seed, step); a tile of a layer reads it from a place
that is a function of (seed, step, layer, which forward, tile). Nothing else enters, so a run resumed on a device of
the same kind draws the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.attention.call import AttentionCall

_POOL_ELEMENTS = 2**21  # enough that tiles rarely meet the same numbers; tiny models draw less


def _hash(*counters: int) -> int:
    text = ",".join(str(int(counter)) for counter in counters).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 1 else 1


@dataclass
class NoisePool:
    """Standard logistic noise of one training step, read at hashed places."""

    seed: int
    step: int
    _pools: dict[tuple[int, torch.device, torch.dtype], Tensor] = field(default_factory=dict)

    def read(self, place: tuple[int, ...], shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A view of `shape` at a place given by counters. Never write to it."""
        count = int(torch.Size(shape).numel())
        size = max(min(32 * _power_of_two(count), _POOL_ELEMENTS), 2 * _power_of_two(count))
        start = _hash(self.seed, self.step, *place) % ((size - count) // 16 + 1) * 16
        return self._pool(size, like)[start : start + count].view(shape)

    def _pool(self, size: int, like: Tensor) -> Tensor:
        key = (size, like.device, like.dtype)
        if key not in self._pools:
            generator = torch.Generator(like.device).manual_seed(_hash(self.seed, self.step))
            uniform = torch.rand(size, generator=generator, device=like.device).clamp_(1e-7, 1 - 1e-7)
            self._pools[key] = torch.logit(uniform).to(dtype=like.dtype)
        return self._pools[key]


@dataclass(frozen=True)
class LayerNoise:
    """How one layer's gates are sampled in one forward."""

    tau: float
    tau_backward: float
    penalty_tau: float
    pool: NoisePool
    layer: int
    forward_index: int
    unit_H: Tensor | None = None

    def tile(self, index: int, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """The noise of one tile."""
        return self.pool.read((self.layer, self.forward_index, index), shape, like)


@dataclass
class SampledGates:
    """What the forwards inside `sampled_gates` did; sums over layers, heads, batch and forwards."""

    tau: float
    tau_backward: float
    penalty_tau: float
    pool: NoisePool
    layers: dict[int, int]
    units: Sequence[Tensor] | None = None
    _expected_H: list[Tensor] = field(default_factory=list)
    _open_H: list[Tensor] = field(default_factory=list)
    _allowed: list[Tensor | int] = field(default_factory=list)
    _forwards: dict[int, int] = field(default_factory=dict)

    def noise_for(self, module: nn.Module) -> LayerNoise | None:
        """The sampling of a module that belongs to this context's model."""
        layer = self.layers.get(id(module))
        if layer is None:
            return None
        forward = self._forwards.get(layer, 0)
        self._forwards[layer] = forward + 1
        unit_H = None if self.units is None else self.units[layer]
        return LayerNoise(self.tau, self.tau_backward, self.penalty_tau, self.pool, layer, forward, unit_H)

    def account(self, call: AttentionCall, expected_H: Tensor, open_H: Tensor) -> None:
        """Add one layer's sums."""
        self._expected_H.append(expected_H)
        self._open_H.append(open_H.detach())
        self._allowed.append(call.count_allowed())

    @property
    def expected_open(self) -> Tensor:
        """The penalty, differentiable: the mean of `sigmoid(g / penalty_tau)` over allowed pairs."""
        self._require_forward()
        device = self._expected_H[-1].device
        total = torch.stack([part.sum().to(device) for part in self._expected_H]).sum()
        return total / self.allowed_pairs

    @property
    def open_share(self) -> float:
        """Share of allowed pairs that were open in the sample."""
        return self.open_pairs / self.allowed_pairs

    @property
    def open_pairs(self) -> int:
        """Open edges of the sample."""
        self._require_forward()
        return sum(int(part.double().sum()) for part in self._open_H)

    @property
    def allowed_pairs(self) -> int:
        """Allowed (query, key) pairs over layers, heads and batch."""
        self._require_forward()
        return sum(int(part) for part in self._allowed)

    def _require_forward(self) -> None:
        if not self._allowed:
            raise GossamerError(
                "No forward of the gated model ran inside `sampled_gates`, so there is nothing to count."
            )


_active: ContextVar[tuple[SampledGates, ...]] = ContextVar("gossamer_sampled_gates", default=())


def active_sampling(module: nn.Module) -> SampledGates | None:
    """The innermost sampling context that holds this attention module."""
    for run in reversed(_active.get()):
        if id(module) in run.layers:
            return run
    return None


def refuse_checkpointing(model: nn.Module, what: str) -> None:
    """Recomputed forwards would draw noise anew, or find the tape closed."""
    if any(getattr(module, "gradient_checkpointing", False) is True for module in model.modules()):
        raise GossamerError(
            f"Activation checkpointing runs attention a second time, which {what} cannot follow;"
            " call `model.gradient_checkpointing_disable()` first."
        )


@contextmanager
def sampled_gates(
    model: nn.Module,
    *,
    tau: float = 1.0,
    tau_backward: float = 1.0,
    penalty_tau: float = 1.0,
    seed: int = 0,
    step: int = 0,
    units: Sequence[Tensor] | None = None,
) -> Iterator[SampledGates]:
    """Sample the model's gates in every forward of this block, with straight-through gradients.

    `tau` scales the noise (0: none, still straight-through), `tau_backward` the surrogate's slope, `penalty_tau` the
    penalty `sigmoid(g / penalty_tau)`: 1 for the surrogate `sigmoid(g)`, `tau` for the true probability of being open.
    `units` [H] per layer make the temperatures relative to each head's range of scores.
    """
    from gossamer.attention.gates import attentions_of

    if tau < 0 or tau_backward <= 0 or penalty_tau <= 0:
        raise GossamerError("Sampled gates need tau >= 0, tau_backward > 0 and penalty_tau > 0.")
    refuse_checkpointing(model, "sampled gates")
    layers = {id(module): mark.layer for mark, module in attentions_of(model) if hasattr(module, "gate")}
    if not layers:
        raise GossamerError(f"{type(model).__name__} has no gates to sample; attach gates first.")
    if units is not None and (len(units) != len(layers) or any(bool((unit_H <= 0).any()) for unit_H in units)):
        raise GossamerError(f"Units are one tensor of positive numbers for each of the {len(layers)} layers.")
    run = SampledGates(float(tau), float(tau_backward), float(penalty_tau), NoisePool(seed, step), layers, units)
    token = _active.set((*_active.get(), run))
    try:
        yield run
    finally:
        _active.reset(token)
