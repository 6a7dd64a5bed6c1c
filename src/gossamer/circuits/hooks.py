"""Recording a run block by block, and changing it: ordinary hooks on the modules that the anatomy names.

Interventions act on a head's output in front of the output projection and on what an MLP writes to the residual stream,
so the same code serves every family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from gossamer.circuits.caches import for_any_batch
from gossamer.models.anatomy import Anatomy


class Edit(Protocol):
    """Interventions for R scenarios at once."""

    def touches(self, layer: int) -> bool:
        """Whether any scenario changes anything in this layer; the other methods are called only where it does."""

    def heads(self, layer: int, heads_RNSHE: Tensor) -> Tensor:
        """Head outputs with the interventions of this layer put in."""

    def mlp(self, layer: int, written_RNSD: Tensor) -> Tensor:
        """What the MLP writes, with the interventions of this layer put in."""


class Untouched:
    """The edit that changes nothing."""

    def touches(self, layer: int) -> bool:
        """Nowhere."""
        return False

    def heads(self, layer: int, heads_RNSHE: Tensor) -> Tensor:
        """As they are."""
        return heads_RNSHE

    def mlp(self, layer: int, written_RNSD: Tensor) -> Tensor:
        """As it is."""
        return written_RNSD


@dataclass(frozen=True, eq=False)
class Run:
    """One forward of a group's prompts, from position `start` on: all that is needed to take it up at any block."""

    hidden_LNSD: list[Tensor]
    heads_LNSHE: list[Tensor]
    mlps_LNSD: list[Tensor]
    calls_L: list[tuple[tuple[Any, ...], dict[str, Any]]]
    metric_N: Tensor


def first_of(output: Any) -> Tensor:
    """What a module returns, or the first of a tuple of it."""
    value = output[0] if isinstance(output, tuple) else output
    assert isinstance(value, Tensor)
    return value


@contextmanager
def recording(parts: Anatomy, run: Run) -> Iterator[None]:
    """Hooks that fill `run` during one forward."""

    def block(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        run.hidden_LNSD.append(hidden)
        run.calls_L.append((for_any_batch(args[1:]), for_any_batch(kwargs)))

    def projection(module: nn.Module, args: tuple[Any, ...]) -> None:
        run.heads_LNSHE.append(args[0].unflatten(-1, (parts.n_heads, -1)))

    def mlp(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        run.mlps_LNSD.append(first_of(output))

    with ExitStack() as stack:
        for layer in range(parts.n_layers):
            handles = (
                parts.blocks[layer].register_forward_pre_hook(block, with_kwargs=True),
                parts.output_projections[layer].register_forward_pre_hook(projection),
                parts.mlp_writers[layer].register_forward_hook(mlp),
            )
            for handle in handles:
                stack.callback(handle.remove)
        yield


@contextmanager
def editing(parts: Anatomy, first_layer: int, scenarios: int, edit: Edit | None) -> Iterator[None]:
    """Hooks that apply an edit in the layers from `first_layer` on."""

    def heads(layer: int) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            flat = args[0]
            split = flat.unflatten(-1, (parts.n_heads, -1)).unflatten(0, (scenarios, -1))
            assert edit is not None
            edited = edit.heads(layer, split)
            return args if edited is split else (edited.reshape(flat.shape), *args[1:])

        return hook

    def mlp(layer: int) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            flat = first_of(output)
            split = flat.unflatten(0, (scenarios, -1))
            assert edit is not None
            edited = edit.mlp(layer, split)
            if edited is split:
                return output
            return (
                (edited.reshape(flat.shape), *output[1:]) if isinstance(output, tuple) else edited.reshape(flat.shape)
            )

        return hook

    with ExitStack() as stack:
        for layer in range(first_layer, parts.n_layers):
            if edit is None or not edit.touches(layer):
                continue
            stack.callback(parts.output_projections[layer].register_forward_pre_hook(heads(layer)).remove)
            stack.callback(parts.mlp_writers[layer].register_forward_hook(mlp(layer)).remove)
        yield
