"""The replacement model of one prompt: the frozen model with its MLPs written out as transcoder features and an error.

    what MLP t writes  =  sum over active features of layers s <= t of activation * decoder(s, t)
                          + decoder bias of t + error of t

The error is what the features leave over, so the replacement model gives the run's own logits. A feature that is active
responds to changes of its input with slope one, one that is not stays off: on and off are frozen like the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gossamer.attribution.frozen import FrozenModel, Mlp
from gossamer.errors import GossamerError
from gossamer.transcoders.module import TranscoderSet


@dataclass(frozen=True, eq=False)
class ActiveFeatures:
    """Features that are on somewhere in the prompt, in the order of layer, position and number."""

    layer_N: Tensor
    position_N: Tensor
    feature_N: Tensor
    activation_N: Tensor

    def __len__(self) -> int:
        return len(self.layer_N)

    def of_layer(self, layer: int) -> slice:
        """The features of one layer lie together."""
        start, stop = torch.searchsorted(self.layer_N, torch.tensor([layer, layer + 1], device=self.layer_N.device))
        return slice(int(start), int(stop))

    def kept(self, keep_N: Tensor) -> ActiveFeatures:
        """Some of them."""
        return ActiveFeatures(
            self.layer_N[keep_N], self.position_N[keep_N], self.feature_N[keep_N], self.activation_N[keep_N]
        )


@dataclass(frozen=True, eq=False)
class Replacement:
    """A frozen model and the active features that stand for its MLPs; features left out are part of the error."""

    frozen: FrozenModel
    transcoders: TranscoderSet
    features: ActiveFeatures
    n_left_out: int = 0  # features that are on but count as error

    @cached_property
    def preactivation_N(self) -> Tensor:
        """Of each feature in the run itself."""
        return self.read(torch.stack([layer.mlp_input_QD for layer in self.frozen.layers]))

    @cached_property
    def error_LQD(self) -> Tensor:
        """What the features and the decoder bias leave of what each MLP wrote."""
        whole_LQD = torch.stack([layer.mlp_written_QD for layer in self.frozen.layers])
        return whole_LQD - self.written(self.features.activation_N) - self.transcoders.decoder_bias_LD[:, None]

    def encoders(self, chosen: slice | Tensor) -> Tensor:
        """The read directions [N,D] of these features."""
        return self.transcoders.encoder_LFD[self.features.layer_N[chosen], self.features.feature_N[chosen]]

    def encoder_biases(self, chosen: slice | Tensor) -> Tensor:
        """The encoder biases [N] of these features."""
        return self.transcoders.encoder_bias_LF[self.features.layer_N[chosen], self.features.feature_N[chosen]]

    def read(self, input_LQD: Tensor) -> Tensor:
        """The pre-activations [N] of the features on these inputs of the MLPs."""
        everything = slice(None)
        read_ND = input_LQD[self.features.layer_N, self.features.position_N]
        return (read_ND * self.encoders(everything)).sum(-1) + self.encoder_biases(everything)

    def write_directions(self, source: int, target: int) -> Tensor:
        """What the active features of a layer write in the place of an MLP, per unit of activation [n,D]."""
        return self.transcoders.decoder(source, target)[self.features.feature_N[self.features.of_layer(source)]]

    def written_by(self, target: int, activation_N: Tensor) -> Tensor:
        """What features at these activations write in the place of one MLP [Q,D], without biases."""
        written_QD = torch.zeros_like(self.frozen.embedding_QD)
        for source in self.transcoders.sources(target):
            mine = self.features.of_layer(source)
            write_ND = self.write_directions(source, target) * activation_N[mine, None]
            written_QD.index_add_(0, self.features.position_N[mine], write_ND)
        return written_QD

    def written(self, activation_N: Tensor) -> Tensor:
        """The same for all MLPs [L,Q,D]."""
        return torch.stack([self.written_by(target, activation_N) for target in range(self.frozen.n_layers)])

    def responding(self, held_N: Tensor, *, may_go_off: bool = False) -> Mlp:
        """MLPs whose features follow what they read, but for those held at an activation (NaN is free).

        Features stay on, as a linear model needs, unless they `may_go_off` below their threshold.
        """
        features, now_N = self.features, self.features.activation_N.clone()
        floor_N = self._thresholds() if may_go_off else torch.full_like(now_N, -torch.inf)

        def mlp(layer: int, read_QD: Tensor) -> Tensor:
            mine = features.of_layer(layer)
            free_N = (read_QD[features.position_N[mine]] * self.encoders(mine)).sum(-1) + self.encoder_biases(mine)
            free_N = torch.where(free_N > floor_N[mine], free_N, 0.0)
            now_N[mine] = torch.where(held_N[mine].isnan(), free_N, held_N[mine])
            return self.written_by(layer, now_N) + self.transcoders.decoder_bias_LD[layer] + self.error_LQD[layer]

        return mlp

    def keeping(self, keep_N: Tensor) -> Replacement:
        """The same with some of the features; what the others wrote moves into the errors."""
        dropped = len(self.features) - int(keep_N.sum())
        kept = self.features.kept(keep_N)
        return Replacement(self.frozen, self.transcoders, kept, self.n_left_out + dropped)

    def _thresholds(self) -> Tensor:
        """The pre-activation [N] above which each feature is on."""
        threshold_LF = self.transcoders.threshold_LF
        if threshold_LF is None:
            return torch.zeros_like(self.features.activation_N)
        return threshold_LF[self.features.layer_N, self.features.feature_N]


@torch.no_grad()
def replace_mlps(
    frozen: FrozenModel, transcoders: TranscoderSet, *, leave_out: Sequence[int] | None = None
) -> Replacement:
    """Write a frozen model's MLPs as features; at the positions in `leave_out` everything counts as error.

    By default that is the first position, if the transcoders say that they were not made for it.
    """
    _require_fit(frozen, transcoders)
    if leave_out is None:
        leave_out = (0,) if transcoders.provenance.get("skips_first_position") else ()
    found = [_active(transcoders, layer, block.mlp_input_QD, leave_out) for layer, block in enumerate(frozen.layers)]
    features = ActiveFeatures(*(torch.cat(parts) for parts in zip(*found, strict=True)))
    replacement = Replacement(frozen, transcoders, features)
    worst = float((replacement.preactivation_N - features.activation_N).abs().max()) if len(features) else 0.0
    if worst > 1e-3 * float(features.activation_N.abs().max() if len(features) else 0) + 1e-6:
        raise GossamerError(
            "These transcoders' active features do not follow their pre-activations one to one, so no linear effects"
            " can be attributed to them; use ReLU, JumpReLU or TopK transcoders."
        )
    return replacement


def _active(
    transcoders: TranscoderSet, layer: int, input_QD: Tensor, leave_out: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    activation_QF = transcoders.encode(layer, input_QD).clone()
    activation_QF[list(leave_out)] = 0
    position_N, feature_N = activation_QF.nonzero(as_tuple=True)
    return torch.full_like(position_N, layer), position_N, feature_N, activation_QF[position_N, feature_N]


def _require_fit(frozen: FrozenModel, transcoders: TranscoderSet) -> None:
    model, width = frozen.model, frozen.embedding_QD.shape[1]
    if (transcoders.n_layers, transcoders.width) != (frozen.n_layers, width):
        raise GossamerError(
            f"The transcoders are for a model of {transcoders.n_layers} layers and width {transcoders.width}, but"
            f" {model.name} has {frozen.n_layers} layers and width {width}; use transcoders trained on this model."
        )
    if transcoders.skip_LDD is not None:
        raise GossamerError(
            "These transcoders have a skip connection, a path past their features that attribution graphs do not know;"
            " use transcoders without one."
        )
    if transcoders.encoder_LFD.dtype != model.dtype or transcoders.encoder_LFD.device != model.device:
        raise GossamerError(
            f"The transcoders are {transcoders.encoder_LFD.dtype} on {transcoders.encoder_LFD.device} and {model.name}"
            f" is {model.dtype} on {model.device}; move one to the other with .to(...)."
        )
