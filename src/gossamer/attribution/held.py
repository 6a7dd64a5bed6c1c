"""A model with parts of it held at what they were in one run, while attention edges change.

    patterns  softmax weights times gates stay as they were; otherwise they follow from what queries and keys become
    norms     the scale of every norm on the residual stream stays as it was; norms of queries and keys belong to the
              patterns
    mlps      every MLP gives out what it gave then, whatever it reads

Gates are constants in every gradient. With all three held the model is linear in what its edges carry: it is the frozen
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gossamer.attribution.frozen import FrozenModel
from gossamer.attribution.frozen_norm import FrozenNorm


@dataclass(frozen=True)
class Held:
    """Which parts are held."""

    patterns: bool = True
    norms: bool = True
    mlps: bool = False

    def describe(self) -> str:
        """In words."""
        names = [name for name in ("patterns", "norms", "mlps") if getattr(self, name)]
        return f"held: gates, {', '.join(names)}" if names else "held: gates only"


LINEAR = Held(patterns=True, norms=True, mlps=True)


@contextmanager
def holding(frozen: FrozenModel, held: Held) -> Iterator[None]:
    """Inside the block the model's norms and MLPs are those of `frozen`, where `held` says so."""
    parts = frozen.model.anatomy
    with ExitStack() as stack:
        for index, layer in enumerate(frozen.layers):
            if held.norms:
                norms = [(parts.attention_norms[index], layer.attention_norm), (parts.mlp_norms[index], layer.mlp_norm)]
                if parts.post_norm:
                    norms += [(parts.attention_writers[index], layer.attention_post)]
                    norms += [(parts.mlp_writers[index], layer.mlp_post)]
                for module, norm in norms:
                    if module is not None:
                        stack.callback(module.register_forward_hook(_norm(norm)).remove)
            if held.mlps:
                stack.callback(parts.mlps[index].register_forward_hook(_constant(layer.mlp_output_QD)).remove)
        if held.norms:
            stack.callback(parts.final_norm.register_forward_hook(_norm(frozen.final_norm)).remove)
        yield


Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]


def _norm(norm: FrozenNorm) -> Hook:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return norm.linear(args[0]) + norm.bias_D

    return hook


def _constant(value_QD: Tensor) -> Hook:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (value_QD.expand_as(output[0]), *output[1:])
        return value_QD.expand_as(output)

    return hook
