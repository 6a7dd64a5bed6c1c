"""A flow gate's norms stay finite where there is nothing: a padding token's embedding is zero in many models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gossamer.attention.residual import log_norm, write_log_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_of_nothing_are_finite(dtype: torch.dtype) -> None:
    nothing = torch.zeros(1, 3, 4, dtype=dtype, requires_grad=True)
    norms = log_norm(nothing)
    norms.sum().backward()
    assert norms.isfinite().all()
    assert nothing.grad is not None
    assert nothing.grad.isfinite().all()
    writes_BHK = write_log_norm(nn.Linear(8, 8).to(dtype), torch.zeros(1, 2, 3, 4, dtype=dtype))
    assert (norms < -40).all()
    assert writes_BHK.isfinite().all()


def test_norms_of_something() -> None:
    assert log_norm(torch.tensor([3.0, 4.0])).exp() == pytest.approx(5)
