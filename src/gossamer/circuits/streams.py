"""Where sources write and receivers read, as ordinary forward hooks on the modules that the anatomy names.

`listening(model, listener)` calls the listener's methods while the model runs; what a method returns takes the place of
what was there, None leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.projections import (
    InputSlices,
    OutputSlices,
    component_graph,
    input_slices,
    output_slices,
    post_norm_scale,
)
from gossamer.models import LoadedModel


class Listener:
    """Hears every reading and writing of the residual stream; the methods here change nothing."""

    splits_heads = False  # whether `heads_wrote` is called
    replaces_projections = False  # whether every `projection` is replaced, so that the model need not compute it

    def embedded(self, resid_BTD: Tensor) -> Tensor | None:
        """What the embedding wrote."""

    def attention_reads(self, layer: int, resid_BTD: Tensor) -> None:
        """The residual stream in front of a block."""

    def projection(self, layer: int, part: InputSlices, out: Tensor) -> Tensor | None:
        """Queries, keys or values (or all of them) of a layer, [B,T,rows]."""

    def heads_wrote(self, layer: int, shares_HBTD: Tensor) -> None:
        """What each head wrote."""

    def attention_wrote(self, layer: int, out_BTD: Tensor) -> Tensor | None:
        """What the attention wrote."""

    def mlp_reads(self, layer: int, resid_BTD: Tensor) -> Tensor | None:
        """The MLP's input."""

    def mlp_wrote(self, layer: int, out_BTD: Tensor) -> Tensor | None:
        """What the MLP wrote."""

    def logits_read(self, resid_BTD: Tensor) -> Tensor | None:
        """The final norm's input."""


@dataclass(frozen=True, eq=False)
class Parts:
    """A model's graph with its projections cut by heads; made once for many runs."""

    model: LoadedModel
    graph: ComponentGraph
    inputs: tuple[tuple[InputSlices, ...], ...]
    outputs: tuple[OutputSlices, ...]

    @classmethod
    def of(cls, model: LoadedModel) -> Parts:
        """Cut a model into its parts, or say why that cannot be done."""
        graph, layers = component_graph(model), range(model.anatomy.n_layers)
        return cls(
            model,
            graph,
            tuple(tuple(input_slices(model.anatomy, layer)) for layer in layers),
            tuple(output_slices(model.anatomy, layer) for layer in layers),
        )

    def logits(self, ids_BT: Tensor, listener: Listener | None = None) -> Tensor:
        """Logits [B,V] after the last token, heard by a listener."""
        hf = self.model.hf
        was_training = hf.training
        hf.eval()
        try:
            with listening(self, listener or Listener()):
                return hf(input_ids=ids_BT.to(hf.device), use_cache=False, logits_to_keep=1).logits[:, -1]
        finally:
            hf.train(was_training)


@contextmanager
def listening(parts: Parts, listener: Listener) -> Iterator[None]:
    """Hook the model for the length of the block."""
    anatomy = parts.model.anatomy
    with ExitStack() as stack:

        def before(module: nn.Module, hear: Callable[[Tensor], Tensor | None]) -> None:
            stack.callback(module.register_forward_pre_hook(_reader(hear), with_kwargs=True).remove)

        def after(module: nn.Module, hear: Callable[[Tensor], Tensor | None]) -> None:
            stack.callback(module.register_forward_hook(_writer(hear)).remove)

        for layer in range(anatomy.n_layers):
            before(anatomy.blocks[layer], _block_reader(listener, layer))
            for part in parts.inputs[layer]:
                if listener.replaces_projections:
                    before(part.module, _first_token)
                after(part.module, partial(listener.projection, layer, part))
            if listener.splits_heads:
                _split_heads(parts, layer, listener, before, after)
            after(anatomy.attention_writers[layer], partial(listener.attention_wrote, layer))
            norm = anatomy.mlp_norms[layer]
            before(anatomy.mlps[layer] if norm is None else norm, partial(listener.mlp_reads, layer))
            after(anatomy.mlp_writers[layer], partial(listener.mlp_wrote, layer))
        before(anatomy.final_norm, listener.logits_read)
        yield


def _first_token(normed_BTD: Tensor) -> Tensor:
    return normed_BTD[:1, :1]


def _block_reader(listener: Listener, layer: int) -> Callable[[Tensor], Tensor | None]:
    def hear(resid_BTD: Tensor) -> Tensor | None:
        replaced = listener.embedded(resid_BTD) if layer == 0 else None
        listener.attention_reads(layer, resid_BTD if replaced is None else replaced)
        return replaced

    return hear


def _split_heads(
    parts: Parts,
    layer: int,
    listener: Listener,
    before: Callable[[nn.Module, Callable[[Tensor], Tensor | None]], None],
    after: Callable[[nn.Module, Callable[[Tensor], Tensor | None]], None],
) -> None:
    """Tell the listener what each head wrote: at the output projection, or behind the post-norm where there is one."""
    anatomy, slices = parts.model.anatomy, parts.outputs[layer]
    if not anatomy.post_norm:
        before(anatomy.output_projections[layer], lambda heads: listener.heads_wrote(layer, slices.shares(heads)))
        return
    norm = anatomy.attention_writers[layer]
    held: dict[str, Tensor] = {}

    def scaled(out_BTD: Tensor) -> None:
        scale_BTD = post_norm_scale(norm, held.pop("attention"), out_BTD)
        listener.heads_wrote(layer, held.pop("shares") * scale_BTD)

    before(anatomy.output_projections[layer], lambda heads: held.update(shares=slices.shares(heads)))
    before(norm, lambda attention_BTD: held.update(attention=attention_BTD))
    after(norm, scaled)


def _reader(hear: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A pre-hook that hears (and may replace) a module's first argument, however it is passed."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replaced = hear(args[0] if args else kwargs["hidden_states"])
        if replaced is None:
            return None
        return ((replaced, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": replaced})

    return hook


def _writer(hear: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A hook that hears (and may replace) a module's output, or the first of a tuple."""

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not isinstance(output, tuple):
            return hear(output)
        replaced = hear(output[0])
        return None if replaced is None else (replaced, *output[1:])

    return hook


class Recorder(Listener):
    """Keeps what every source wrote and what every kind of receiver read in one run."""

    splits_heads = True

    def __init__(self, graph: ComponentGraph) -> None:
        self.graph = graph
        self.written_SBTD = torch.empty(0)
        self.attention_reads_LBTD: list[Tensor] = []
        self.mlp_reads_LBTD: list[Tensor] = []
        self.logits_reads_BTD = torch.empty(0)

    def embedded(self, resid_BTD: Tensor) -> None:
        """Make room for all sources and keep the first."""
        self.written_SBTD = resid_BTD.new_empty(len(self.graph.sources), *resid_BTD.shape)
        self.written_SBTD[0] = resid_BTD

    def attention_reads(self, layer: int, resid_BTD: Tensor) -> None:
        """Keep."""
        self.attention_reads_LBTD.append(resid_BTD)

    def heads_wrote(self, layer: int, shares_HBTD: Tensor) -> None:
        """Keep."""
        self.written_SBTD[self.graph.head_sources(layer)] = shares_HBTD

    def mlp_reads(self, layer: int, resid_BTD: Tensor) -> None:
        """Keep."""
        self.mlp_reads_LBTD.append(resid_BTD)

    def mlp_wrote(self, layer: int, out_BTD: Tensor) -> None:
        """Keep."""
        self.written_SBTD[self.graph.mlp_source(layer)] = out_BTD

    def logits_read(self, resid_BTD: Tensor) -> None:
        """Keep."""
        self.logits_reads_BTD = resid_BTD


@torch.no_grad()
def recorded(parts: Parts, ids_BT: Tensor) -> tuple[Recorder, Tensor]:
    """Run the untouched model on prompts: its streams, and its logits [B,V] after the last token."""
    recorder = Recorder(parts.graph)
    logits_BV = parts.logits(ids_BT, recorder)
    return recorder, logits_BV
