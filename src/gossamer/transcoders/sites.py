"""What MLPs read and write, recorded or replaced by forward hooks on the modules that the anatomy names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.corpus.inputs import model_inputs, on_device, segment_starts
from gossamer.corpus.sequences import Sequences
from gossamer.models import LoadedModel

Replacement = Callable[[int, list[Tensor], Tensor], Tensor]  # layer, inputs of the layers so far, what the MLP wrote


@dataclass
class MlpActivity:
    """What the MLPs of one forward read and wrote, [B, T, D] a layer."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@contextmanager
def watched(model: LoadedModel, replace: Replacement | None = None) -> Iterator[MlpActivity]:
    """Record the next forward of the model; `replace` may put something else in the place of what an MLP wrote."""
    activity = MlpActivity()

    def on_reading(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if layer == 0:  # a new forward
                activity.inputs.clear()
                activity.outputs.clear()
            activity.inputs.append(args[0])

        return hook

    def on_writing(layer: int) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], written_BTD: Tensor) -> Tensor | None:
            activity.outputs.append(written_BTD)
            return None if replace is None else replace(layer, activity.inputs, written_BTD)

        return hook

    with ExitStack() as hooks:
        for layer, (reader, writer) in enumerate(zip(model.anatomy.mlps, model.anatomy.mlp_writers, strict=True)):
            hooks.callback(reader.register_forward_pre_hook(on_reading(layer)).remove)
            hooks.callback(writer.register_forward_hook(on_writing(layer)).remove)
        yield activity


def counted_positions(text: Sequences) -> Tensor:
    """True [B, T] at the positions transcoders are for: not the first of a document (often its BOS), not padding."""
    if text.segments_NT is None:
        counted_BT = torch.ones(text.ids_NT.shape, dtype=torch.bool)
        counted_BT[:, 0] = False
        return counted_BT
    segments_BT = on_device(text.segments_NT, "cpu")
    return ~segment_starts(segments_BT) & (segments_BT >= 0)


@torch.no_grad()
def mlp_activity(model: LoadedModel, text: Sequences) -> tuple[Tensor, Tensor]:
    """What the MLPs read and write [L, N, D] at the counted positions of the text."""
    counted_N = counted_positions(text).flatten().nonzero()[:, 0].to(model.device, non_blocking=True)
    with watched(model) as activity:
        model.hf.base_model(**model_inputs(text, model.device))

    def counted(seen: list[Tensor]) -> Tensor:
        return torch.stack([seen_BTD.flatten(0, 1)[counted_N] for seen_BTD in seen])

    return counted(activity.inputs), counted(activity.outputs)
