"""Interventions: scale features, heads or single attention edges, and see what the logits do.

`predicted_change` asks the graph: attention, norms and every feature's on or off stay as in the run, features that are
on follow their inputs, errors stay. That is the total effect along all paths of the unpruned graph.

`recomputed_change` asks the replacement model: features stand in the place of MLPs as before, may go off, and errors
stay, but attention, gates and norms are computed anew. What it gets right and the graph does not is what frozen
patterns and norms hide.

`measured_change` asks the model itself: everything behind the intervention, attention, norms, gates and MLPs, is
computed anew. A feature is scaled by adding to what the MLPs write what its decoders make of the difference between the
activation it should have and the one it has in the intervened run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.attention import Weights, tape
from gossamer.attribution.frozen import Mlp
from gossamer.attribution.replacement import Replacement
from gossamer.errors import GossamerError


@dataclass(frozen=True)
class ScaleFeatures:
    """Hold features, given as (layer, position, number), at a multiple of their activation; 0 takes them away."""

    features: tuple[tuple[int, int, int], ...]
    factor: float = 0.0


@dataclass(frozen=True)
class ScaleAttention:
    """Multiply what a head carries, at one query, from one key, or everywhere; 0 takes it away."""

    layer: int
    head: int
    query: int | None = None
    key: int | None = None
    factor: float = 0.0

    def pattern(self, pattern_HQK: Tensor) -> Tensor:
        """The layer's pattern under this intervention."""
        changed_HQK = pattern_HQK.clone()
        query = slice(None) if self.query is None else self.query
        key = slice(None) if self.key is None else self.key
        changed_HQK[self.head, query, key] *= self.factor
        return changed_HQK


Intervention = ScaleFeatures | ScaleAttention


@torch.no_grad()
def predicted_change(replacement: Replacement, intervention: Intervention) -> Tensor:
    """The change [V] of the logits after the prompt that the graph predicts."""
    frozen, held_N = replacement.frozen, _held(replacement, intervention)
    if isinstance(intervention, ScaleAttention):
        layers = list(frozen.layers)
        block = layers[intervention.layer]
        layers[intervention.layer] = replace(block, pattern_HQK=intervention.pattern(block.pattern_HQK))
        frozen = replace(frozen, layers=tuple(layers))
    return frozen.forward(mlp=replacement.responding(held_N)) - replacement.frozen.logits_V


@torch.no_grad()
def recomputed_change(replacement: Replacement, intervention: Intervention) -> Tensor:
    """The change [V] of the replacement model's logits, attention, gates and norms computed anew."""
    mlp = replacement.responding(_held(replacement, intervention), may_go_off=True)
    with ExitStack() as stack:
        stack.enter_context(_replaced_mlps(replacement, mlp))
        if isinstance(intervention, ScaleAttention):
            stack.enter_context(_scaled_attention(replacement, intervention))
        return _rerun(replacement)


@torch.no_grad()
def measured_change(replacement: Replacement, intervention: Intervention) -> Tensor:
    """The change [V] of the model's own logits after the prompt, everything behind the intervention computed anew."""
    scaled = _scaled_features if isinstance(intervention, ScaleFeatures) else _scaled_attention
    with scaled(replacement, intervention):  # type: ignore[arg-type]
        return _rerun(replacement)


def _rerun(replacement: Replacement) -> Tensor:
    """How far the logits of a run of the model, as it now is, are from those of the recorded run."""
    frozen = replacement.frozen
    model, logits = frozen.model, list[Tensor]()
    keep = model.anatomy.unembedding.register_forward_hook(lambda module, args, output: logits.append(output))
    with ExitStack() as stack:
        stack.callback(keep.remove)
        model.hf.eval()
        model.hf(input_ids=frozen.ids_Q[None], use_cache=False, logits_to_keep=1)
    return logits[0][0, -1] - frozen.logits_V


def _held(replacement: Replacement, intervention: Intervention) -> Tensor:
    """The activations [N] at which an intervention holds features; NaN for those that it leaves alone."""
    held_N = torch.full_like(replacement.features.activation_N, torch.nan)
    if isinstance(intervention, ScaleFeatures):
        chosen = _found(replacement, intervention)
        held_N[chosen] = replacement.features.activation_N[chosen] * intervention.factor
    else:
        _require_head(replacement, intervention)
    return held_N


@contextmanager
def _scaled_attention(replacement: Replacement, intervention: ScaleAttention) -> Iterator[None]:
    """A tape that scales what a head carries while the model runs."""
    _require_head(replacement, intervention)
    frozen = replacement.frozen
    pattern_HQK = intervention.pattern(frozen.layers[intervention.layer].pattern_HQK)
    with tape(frozen.model.hf, replace=[Weights(intervention.layer, pattern_HQK[None])]):
        yield


@contextmanager
def _replaced_mlps(replacement: Replacement, mlp: Mlp) -> Iterator[None]:
    """Hooks that put other MLPs in the place of the model's own while it runs."""
    parts = replacement.frozen.model.anatomy
    read: dict[int, Tensor] = {}

    def reading(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            read[layer] = _read_by(args, kwargs)

        return hook

    def writing(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            written_BQD = mlp(layer, read[layer])[None]
            return (written_BQD, *output[1:]) if isinstance(output, tuple) else written_BQD

        return hook

    with ExitStack() as stack:
        for layer in range(parts.n_layers):
            stack.callback(parts.mlps[layer].register_forward_pre_hook(reading(layer), with_kwargs=True).remove)
            stack.callback(parts.mlp_writers[layer].register_forward_hook(writing(layer)).remove)
        yield


def _read_by(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What an MLP is called with [Q,D]."""
    return (args[0] if args else kwargs["hidden_states"])[0]


@contextmanager
def _scaled_features(replacement: Replacement, intervention: ScaleFeatures) -> Iterator[None]:
    """Hooks that hold the features while the model runs."""
    parts, transcoders = replacement.frozen.model.anatomy, replacement.transcoders
    features = replacement.features
    chosen = _found(replacement, intervention)
    missing: dict[int, Tensor] = {}  # layer -> what its features lack of the activation they should have

    def reading(layer: int, mine: Tensor) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            now_QF = transcoders.encode(layer, _read_by(args, kwargs))
            now_N = now_QF[features.position_N[mine], features.feature_N[mine]]
            missing[layer] = features.activation_N[mine] * intervention.factor - now_N

        return hook

    def writing(target: int, sources: dict[int, Tensor]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            written_BQD = (output[0] if isinstance(output, tuple) else output).clone()
            for source, mine in sources.items():
                added_ND = transcoders.decoder(source, target)[features.feature_N[mine]] * missing[source][:, None]
                written_BQD[0].index_add_(0, features.position_N[mine], added_ND)
            return (written_BQD, *output[1:]) if isinstance(output, tuple) else written_BQD

        return hook

    of_layer = {int(layer): chosen[features.layer_N[chosen] == layer] for layer in features.layer_N[chosen].unique()}
    with ExitStack() as stack:
        for layer, mine in of_layer.items():
            stack.callback(parts.mlps[layer].register_forward_pre_hook(reading(layer, mine), with_kwargs=True).remove)
        for target in range(parts.n_layers):
            sources = {layer: mine for layer, mine in of_layer.items() if target in transcoders.targets(layer)}
            if sources:
                stack.callback(parts.mlp_writers[target].register_forward_hook(writing(target, sources)).remove)
        yield


def _found(replacement: Replacement, intervention: ScaleFeatures) -> Tensor:
    """The features' places among the active ones."""
    features = replacement.features
    stacked = torch.stack([features.layer_N, features.position_N, features.feature_N], dim=1).tolist()
    place = {tuple(key): index for index, key in enumerate(stacked)}
    for key in intervention.features:
        if key not in place:
            layer, position, number = key
            raise GossamerError(
                f"Feature {number} of layer {layer} is not active at position {position} of this prompt, so there is"
                " nothing to scale; choose one of the graph's features."
            )
    if not intervention.features:
        raise GossamerError("An intervention on features needs at least one of them.")
    return torch.tensor([place[key] for key in intervention.features], device=features.layer_N.device)


def _require_head(replacement: Replacement, intervention: ScaleAttention) -> None:
    pattern_LHQK = replacement.frozen.pattern_LHQK
    where = (intervention.layer, intervention.head, intervention.query or 0, intervention.key or 0)
    if any(not 0 <= index < size for index, size in zip(where, pattern_LHQK.shape, strict=True)):
        n_layers, n_heads, n_positions, _ = pattern_LHQK.shape
        raise GossamerError(
            f"There is no such head or edge: {intervention} in {n_layers} layers of {n_heads} heads over {n_positions}"
            " positions, all counted from 0."
        )
