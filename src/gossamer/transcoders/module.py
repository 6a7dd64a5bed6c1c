"""The transcoders of a whole model: sparse features that read what each MLP reads and write what it writes.

    pre_lf   = encoder_lf · x_l + encoder_bias_lf            x_l: what the MLP of layer l reads
    a_lf     = pre_lf where it exceeds the threshold, else 0  (jumprelu; relu: above 0; topk: the k largest above 0)
    y_t      = Σ_{l ≤ t} Σ_f a_lf decoder(l, t)_f + decoder_bias_t (+ skip_t x_t)

A per-layer transcoder writes to its own layer only, so the sum has the single term l = t; a feature of a cross-layer
transcoder writes to its own and every later layer. What an MLP reads is the input of its module; what it writes is
what is added to the residual stream: the output of the MLP module, or of its post-norm where the family has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.models import LoadedModel

Kind = Literal["per-layer", "cross-layer"]
Activation = Literal["jumprelu", "topk", "relu"]


@dataclass(frozen=True)
class TranscoderShape:
    """The sizes of a set, and what turns a pre-activation into an activation (`k` belongs to topk)."""

    kind: Kind
    n_layers: int
    n_features: int
    width: int
    activation: Activation = "jumprelu"
    k: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("per-layer", "cross-layer"):
            raise GossamerError(f"Transcoders are per-layer or cross-layer, not {self.kind!r}.")
        if self.activation not in ("jumprelu", "topk", "relu"):
            raise GossamerError(f"A transcoder's activation is jumprelu, topk or relu, not {self.activation!r}.")
        if (self.activation == "topk") != (self.k is not None):
            raise GossamerError("A topk transcoder needs k, and no other transcoder has one.")

    def targets(self, source: int) -> range:
        """The layers that a feature of layer `source` writes to."""
        return range(source, self.n_layers if self.kind == "cross-layer" else source + 1)

    def sources(self, target: int) -> range:
        """The layers whose features write to layer `target`."""
        return range(0 if self.kind == "cross-layer" else target, target + 1)


def activate(pre_NF: Tensor, activation: Activation, *, threshold_F: Tensor | None, k: int | None) -> Tensor:
    """Feature activations from pre-activations; a jumprelu feature that is on has its pre-activation's value."""
    if activation == "jumprelu":
        assert threshold_F is not None
        return torch.where(pre_NF > threshold_F, pre_NF, 0.0)
    positive_NF = pre_NF.relu()
    if activation == "relu":
        return positive_NF
    assert k is not None
    largest = positive_NF.topk(min(k, pre_NF.shape[-1]), dim=-1)
    return torch.zeros_like(pre_NF).scatter(-1, largest.indices, largest.values)


@dataclass(frozen=True, eq=False)
class Weights:
    """The tensors of a set; `decoder_FTD` has one entry a source layer, its T axis running over the targets."""

    encoder_LFD: Tensor
    encoder_bias_LF: Tensor
    decoder_FTD: Sequence[Tensor]
    decoder_bias_LD: Tensor
    threshold_LF: Tensor | None = None
    skip_LDD: Tensor | None = None


class TranscoderSet(nn.Module):
    """Per-layer or cross-layer transcoders of one model, for reading: nothing here is trained.

    `provenance` says which model they belong to (`require_model` checks it) and how they were made. Features are
    defined behind the first position of a document only: there they count as off.
    """

    encoder_LFD: Tensor
    encoder_bias_LF: Tensor
    decoder_bias_LD: Tensor
    threshold_LF: Tensor | None
    skip_LDD: Tensor | None

    def __init__(self, shape: TranscoderShape, weights: Weights, provenance: dict[str, Any] | None = None) -> None:
        super().__init__()
        _check(shape, weights)
        self.shape, self.provenance = shape, provenance or {}
        self.kind, self.activation, self.k = shape.kind, shape.activation, shape.k
        self.n_layers, self.n_features, self.width = shape.n_layers, shape.n_features, shape.width
        self.register_buffer("encoder_LFD", weights.encoder_LFD)
        self.register_buffer("encoder_bias_LF", weights.encoder_bias_LF)
        self.register_buffer("decoder_bias_LD", weights.decoder_bias_LD)
        self.register_buffer("threshold_LF", weights.threshold_LF)
        self.register_buffer("skip_LDD", weights.skip_LDD)
        for source, decoder_FTD in enumerate(weights.decoder_FTD):
            self.register_buffer(f"decoder_{source}", decoder_FTD)

    def targets(self, source: int) -> range:
        """The layers that a feature of layer `source` writes to."""
        return self.shape.targets(source)

    def sources(self, target: int) -> range:
        """The layers whose features write to layer `target`."""
        return self.shape.sources(target)

    def preactivations(self, layer: int, input_ND: Tensor) -> Tensor:
        """Encoder times input plus bias [..., F], for any leading axes."""
        return input_ND @ self.encoder_LFD[layer].T + self.encoder_bias_LF[layer]

    def encode(self, layer: int, input_ND: Tensor) -> Tensor:
        """Feature activations [..., F] of a layer."""
        threshold_F = None if self.threshold_LF is None else self.threshold_LF[layer]
        pre_NF = self.preactivations(layer, input_ND)
        return activate(pre_NF, self.shape.activation, threshold_F=threshold_F, k=self.shape.k)

    def decoder(self, source: int, target: int) -> Tensor:
        """What the features of layer `source` write to layer `target` [F, D], at activation one."""
        if target not in self.targets(source):
            raise GossamerError(f"Features of layer {source} of a {self.kind} transcoder do not write to {target}.")
        decoder_FTD: Tensor = self.get_buffer(f"decoder_{source}")
        return decoder_FTD[:, target - source]

    def reconstruct(self, features: Sequence[Tensor], target: int, input_ND: Tensor | None = None) -> Tensor:
        """What the features (one tensor [..., F] a layer, `features[l]` of layer l) write to a layer, biases included.

        A published transcoder with a skip connection also needs what the target's MLP reads.
        """
        result_ND = self.decoder_bias_LD[target]
        for source in self.sources(target):
            result_ND = result_ND + features[source] @ self.decoder(source, target)
        if self.skip_LDD is None:
            return result_ND
        if input_ND is None:
            raise GossamerError("These transcoders have a skip connection: reconstruct needs the MLP's input too.")
        return result_ND + input_ND @ self.skip_LDD[target].T

    def weights(self) -> Weights:
        """The tensors, in one piece."""
        decoders = [self.get_buffer(f"decoder_{source}") for source in range(self.n_layers)]
        return Weights(
            self.encoder_LFD, self.encoder_bias_LF, decoders, self.decoder_bias_LD, self.threshold_LF, self.skip_LDD
        )

    def require_model(self, model: LoadedModel) -> None:
        """Refuse a model these transcoders were not made for."""
        from gossamer.transcoders.belonging import require_model

        require_model(self, model)

    def save(self, folder: str | Path, *, dtype: str = "float32") -> Path:
        """Write `transcoders.json` and `transcoders.safetensors`; dtype `int8` is for shipping, with a scale a row."""
        from gossamer.transcoders.storage import save

        return save(self, folder, dtype=dtype)

    @classmethod
    def load(cls, folder: str | Path, *, model: LoadedModel | None = None) -> TranscoderSet:
        """Read what `save` wrote; with `model`, refuse transcoders of another one."""
        from gossamer.transcoders.storage import load_folder

        transcoders = load_folder(Path(folder))
        if model is not None:
            transcoders.require_model(model)
        return transcoders

    def describe(self) -> str:
        """One line: kind, sizes, activation, model."""
        return (
            f"{self.kind} transcoders of {self.provenance.get('model', 'an unnamed model')}: {self.n_layers} layers × "
            f"{self.n_features:,} features, {self.activation}"
        )


def _check(shape: TranscoderShape, weights: Weights) -> None:
    n_layers, n_features, width = shape.n_layers, shape.n_features, shape.width
    expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
        "encoder": (weights.encoder_LFD, (n_layers, n_features, width)),
        "encoder bias": (weights.encoder_bias_LF, (n_layers, n_features)),
        "decoder bias": (weights.decoder_bias_LD, (n_layers, width)),
        "threshold": (weights.threshold_LF, (n_layers, n_features)),
        "skip connection": (weights.skip_LDD, (n_layers, width, width)),
    }
    for source, decoder_FTD in enumerate(weights.decoder_FTD):
        written = (n_features, len(shape.targets(source)), width)
        expected[f"decoder of layer {source}"] = (decoder_FTD, written)
    for name, (tensor, size) in expected.items():
        if tensor is not None and tuple(tensor.shape) != size:
            raise GossamerError(f"The {name} has the shape {list(tensor.shape)}, but {list(size)} belongs here.")
    if len(weights.decoder_FTD) != n_layers:
        raise GossamerError(f"{n_layers} layers need as many decoders, not {len(weights.decoder_FTD)}.")
    if (weights.threshold_LF is None) == (shape.activation == "jumprelu"):
        raise GossamerError("A jumprelu transcoder has thresholds, and no other transcoder has any.")
