"""One process or many: the same code, through accelerate.

Every process holds the whole model and a share of each batch; gradients are averaged over processes in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor


class Processes:
    """Which process this is, how many there are, and what they do together."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        on_cpu = device is not None and torch.device(device).type == "cpu"
        self._state = PartialState(cpu=on_cpu)
        self.index: int = self._state.process_index
        self.count: int = self._state.num_processes
        self.is_main: bool = self._state.is_main_process
        self.device = torch.device(device) if device is not None and self.count == 1 else self._state.device

    def wait(self) -> None:
        """Until every process is here."""
        if self.count > 1:
            self._state.wait_for_everyone()

    def mean(self, values: Sequence[float]) -> list[float]:
        """The mean over processes of each value."""
        if self.count == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        return [float(value) for value in reduce(together, reduction="mean")]

    def average_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace every gradient by its mean over processes."""
        if self.count == 1:
            return
        gradients = [
            parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in parameters
        ]
        flat = reduce(torch.cat([gradient.reshape(-1).float() for gradient in gradients]), reduction="mean")
        pieces = flat.split([gradient.numel() for gradient in gradients])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.dtype)
