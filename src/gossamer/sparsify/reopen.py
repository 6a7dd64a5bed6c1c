"""The end of a run whose last weights cost a little too much: open their gates just as far as the constraint asks.

All offsets rise by the same shift, in the unit of each head's scores. The shift doubles until held-out text says that
the constraint is met, and is then halved back towards the largest that was not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gossamer.attention import Gate

FIRST, DOUBLINGS, HALVINGS = 0.02, 8, 4


@torch.no_grad()
def reopen(gates: Sequence[Gate], units: Sequence[Tensor] | None, is_enough: Callable[[], bool]) -> None:
    """Try shifts, asking `is_enough` with each of them in place; the offsets are afterwards as they were."""
    before = [gate.offset_H.detach().clone() for gate in gates]

    def tried(shift: float) -> bool:
        for index, (gate, offset_H) in enumerate(zip(gates, before, strict=True)):
            gate.offset_H.copy_(offset_H + shift * (units[index] if units is not None else 1.0))
        return is_enough()

    too_small, enough = 0.0, FIRST
    found = False
    for _ in range(DOUBLINGS):
        found = tried(enough)
        if found:
            break
        too_small, enough = enough, 2 * enough
    for _ in range(HALVINGS if found else 0):
        middle = (too_small + enough) / 2
        too_small, enough = (too_small, middle) if tried(middle) else (middle, enough)
    for gate, offset_H in zip(gates, before, strict=True):
        gate.offset_H.copy_(offset_H)
