"""The two things a flow gate needs beyond scores: what an edge would write, and how large the residual stream is.

`log |W_O^h v_j|` comes from the values through the Gram matrix of the head's slice of the output projection (E x E, so
a KV cache needs nothing more), `log |residual_i|` from a hook on the block that holds the attention.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError

# Keyed by the attention module's id; each thread starts with its own, so that two never read each other's.
_log_norms: ContextVar[dict[int, Tensor] | None] = ContextVar("gossamer_residual_norms", default=None)


class ResidualNorm:
    """A forward hook on a block: remembers the norm of its input for the attention inside it."""

    def __init__(self, attention_path: str) -> None:
        self.attention_path = attention_path

    def __call__(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before the block runs."""
        resid_BQD = args[0] if args else kwargs["hidden_states"]
        norms = _log_norms.get()
        if norms is None:
            _log_norms.set(norms := {})
        norms[id(block.get_submodule(self.attention_path))] = log_norm(resid_BQD)

    @classmethod
    def watch(cls, block: nn.Module, attention: nn.Module) -> None:
        """Hook a block, once."""
        path = next((name for name, module in block.named_modules() if module is attention), None)
        if path is None:
            raise GossamerError(
                "The residual source of a flow gate must be the block that contains the attention module."
            )
        block.register_forward_pre_hook(cls(path), with_kwargs=True)

    @staticmethod
    def unwatch(model: nn.Module) -> None:
        """Remove every hook of this kind from the model."""
        for module in model.modules():
            for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, ResidualNorm)]:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def log_norm(vectors: Tensor) -> Tensor:
    """`log |x|` over the last dimension, at least in float32."""
    wide = vectors if vectors.dtype == torch.float64 else vectors.float()
    return _half_log(wide.square().sum(-1))


def _half_log(squared: Tensor) -> Tensor:
    """Finite also for nothing at all: zero over zero must not make a gate NaN."""
    return squared.clamp_min(torch.finfo(squared.dtype).tiny).log() / 2


def residual_log_norm(attention: nn.Module) -> Tensor:
    """`log |residual|` [B,Q] of the forward now running through this attention module."""
    norm_BQ = (_log_norms.get() or {}).pop(id(attention), None)
    if norm_BQ is None:
        raise GossamerError(
            "A flow gate did not see the input of its block; run the attention module as part of its model."
        )
    return norm_BQ


def write_log_norm(projection: nn.Module, value_BHKE: Tensor) -> Tensor:
    """`log |W_O^h v_j|` [B,H,K] for a Linear or a GPT-2 Conv1D output projection."""
    if hasattr(projection, "base_layer"):
        raise GossamerError(
            "A flow gate cannot be combined with an adapter on the attention's output projection; leave that projection"
            " out of the adapter's targets."
        )
    _, n_heads, _, width = value_BHKE.shape
    weight = projection.weight
    assert isinstance(weight, Tensor)
    weight_HED = (weight.T if isinstance(projection, nn.Linear) else weight).reshape(n_heads, width, -1)
    wide = torch.promote_types(value_BHKE.dtype, torch.float32)
    weight_HED, value_BHKE = weight_HED.to(wide), value_BHKE.to(wide)
    gram_HEE = weight_HED @ weight_HED.transpose(1, 2)
    squared_BHK = ((value_BHKE @ gram_HEE) * value_BHKE).sum(-1)
    return _half_log(squared_BHK)
