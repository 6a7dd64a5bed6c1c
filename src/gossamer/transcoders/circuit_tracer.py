"""Folders in circuit-tracer's layouts: cross-layer transcoders, and sets of per-layer ones.

    config.yaml                     model_kind, model_name, feature_input_hook, feature_output_hook, activation, k
    W_enc_{l}.safetensors           cross-layer: W_enc_{l} [F, D], b_enc_{l} [F], b_dec_{l} [D], threshold_{l} [F]
    W_dec_{l}.safetensors           cross-layer: W_dec_{l} [F, L - l, D]
    layer_{l}.safetensors           per-layer: W_enc, W_dec [F, D], b_enc, b_dec, activation_function.threshold, W_skip

Of the places where published transcoders read a model, those are understood that are the MLP's input: `mlp.hook_in`,
and `ln2.hook_normalized` where the norm has no weight behind that hook (`belonging.require_model` says so). Of a
topk layer circuit-tracer keeps the k largest pre-activations of either sign; here negative ones are off, which differs
only at a position where fewer than k features are above 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.files import atomic_folder
from gossamer.transcoders.belonging import BEFORE_THE_NORMS_WEIGHT, INPUT_SITE, OUTPUT_SITE
from gossamer.transcoders.module import Activation, Kind, TranscoderSet, TranscoderShape, Weights

CONFIG = "config.yaml"
KINDS: dict[str, Kind] = {"cross_layer_transcoder": "cross-layer", "transcoder_set": "per-layer"}
INPUT_SITES = {
    "mlp.hook_in": INPUT_SITE,
    "ln2.hook_normalized": BEFORE_THE_NORMS_WEIGHT,
}
OUTPUT_HOOK = "hook_mlp_out"
THRESHOLD = "activation_function.threshold"


def is_circuit_tracer(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return (folder / CONFIG).is_file()


def read_circuit_tracer(folder: Path) -> TranscoderSet:
    """Read a folder in either layout."""
    config = _config(folder)
    kind = KINDS[config["model_kind"]]
    layers = _cross_layers(folder) if kind == "cross-layer" else _single_layers(folder)
    if not layers:
        raise GossamerError(f"{folder} has a {CONFIG} but no weights beside it; download the whole folder.")
    activation, k = _activation(config, layers[0])
    n_features, width = layers[0]["W_enc"].shape
    shape = TranscoderShape(kind, len(layers), n_features, width, activation, k)
    weights = Weights(
        encoder_LFD=_stacked(layers, "W_enc"),
        encoder_bias_LF=_stacked(layers, "b_enc"),
        decoder_FTD=[layer["W_dec"].float() for layer in layers],
        decoder_bias_LD=_stacked(layers, "b_dec"),
        threshold_LF=_stacked(layers, THRESHOLD) if activation == "jumprelu" else None,
        skip_LDD=_stacked(layers, "W_skip") if "W_skip" in layers[0] else None,
    )
    return TranscoderSet(shape, weights, _provenance(config))


def write_circuit_tracer(transcoders: TranscoderSet, folder: str | Path) -> Path:
    """Write the layout of the set's kind, in float32."""
    if transcoders.kind == "cross-layer" and (transcoders.skip_LDD is not None or transcoders.activation == "topk"):
        raise GossamerError("circuit-tracer's cross-layer layout has neither skip connections nor topk activations.")
    folder = Path(folder)
    write = _write_cross_layer if transcoders.kind == "cross-layer" else _write_single_layer
    with atomic_folder(folder) as temporary:
        for layer in range(transcoders.n_layers):
            write(transcoders, layer, temporary)
        (temporary / CONFIG).write_text(yaml.safe_dump(_described(transcoders), sort_keys=False), encoding="utf-8")
    return folder


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise GossamerError(f"{folder / CONFIG} could not be read as YAML; check that it is complete.") from error
    if not isinstance(config, dict) or config.get("model_kind") not in KINDS:
        raise GossamerError(f"{folder / CONFIG} names no model_kind out of {', '.join(KINDS)}.")
    if config.get("feature_input_hook") not in INPUT_SITES:
        raise GossamerError(
            f"These transcoders read {config.get('feature_input_hook')!r}; gossamer reads those whose input is what "
            f"the MLP reads ({', '.join(INPUT_SITES)})."
        )
    if config.get("feature_output_hook", OUTPUT_HOOK) != OUTPUT_HOOK:
        raise GossamerError(
            f"These transcoders write {config['feature_output_hook']!r}; gossamer reads those of {OUTPUT_HOOK}."
        )
    return config


def _cross_layers(folder: Path) -> list[dict[str, Tensor]]:
    layers = []
    for layer in range(len(list(folder.glob("W_enc_*.safetensors")))):
        found: dict[str, Tensor] = {}
        for part in ("W_enc", "W_dec"):
            found |= _tensors(folder / f"{part}_{layer}.safetensors")
        tensors = {name.removesuffix(f"_{layer}"): tensor for name, tensor in found.items()}
        if "threshold" in tensors:
            tensors[THRESHOLD] = tensors.pop("threshold")
        layers.append(tensors)
    return layers


def _single_layers(folder: Path) -> list[dict[str, Tensor]]:
    count = len(list(folder.glob("layer_*.safetensors")))
    layers = [_tensors(folder / f"layer_{layer}.safetensors") for layer in range(count)]
    return [tensors | {"W_dec": tensors["W_dec"][:, None]} for tensors in layers]


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise GossamerError(f"{path} is missing; transcoders need the weights of every layer.")
    return load_file(path)


def _activation(config: dict[str, Any], first: dict[str, Tensor]) -> tuple[Activation, int | None]:
    if config.get("activation") == "topk":
        k = config.get("k", first.get("k"))
        if k is None:
            raise GossamerError("These topk transcoders do not say how many features they keep: add k to config.yaml.")
        return "topk", int(k)
    return ("jumprelu" if THRESHOLD in first else "relu"), None


def _stacked(layers: list[dict[str, Tensor]], name: str) -> Tensor:
    missing = [layer for layer, tensors in enumerate(layers) if name not in tensors]
    if missing:
        raise GossamerError(f"The transcoder of layer {missing[0]} has no {name}, which those of other layers have.")
    return torch.stack([tensors[name].float() for tensors in layers])


def _provenance(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": config.get("model_name"),
        "fingerprint": config.get("gossamer_fingerprint"),
        "input_site": INPUT_SITES[config["feature_input_hook"]],
        "output_site": OUTPUT_SITE,
        "skips_first_position": True,
        "layout": "circuit-tracer",
    }


def _described(transcoders: TranscoderSet) -> dict[str, Any]:
    of = transcoders.provenance
    kind = next(name for name, ours in KINDS.items() if ours == transcoders.kind)
    hook = next(name for name, site in INPUT_SITES.items() if site == of.get("input_site", INPUT_SITE))
    config = {
        "model_name": of.get("model"),
        "model_kind": kind,
        "feature_input_hook": hook,
        "feature_output_hook": OUTPUT_HOOK,
        "activation": {"jumprelu": "jump_relu"}.get(transcoders.activation, transcoders.activation),
        "k": transcoders.k,
        "gossamer_fingerprint": of.get("fingerprint"),
    }
    return {name: value for name, value in config.items() if value is not None}


def _encoder(transcoders: TranscoderSet, layer: int) -> dict[str, Tensor]:
    return {
        "W_enc": transcoders.encoder_LFD[layer],
        "b_enc": transcoders.encoder_bias_LF[layer],
        "b_dec": transcoders.decoder_bias_LD[layer],
    }


def _write_cross_layer(transcoders: TranscoderSet, layer: int, folder: Path) -> None:
    encoder = _encoder(transcoders, layer)
    if transcoders.threshold_LF is not None:
        encoder["threshold"] = transcoders.threshold_LF[layer]
    decoder_FTD = transcoders.weights().decoder_FTD[layer]
    _save({f"{name}_{layer}": tensor for name, tensor in encoder.items()}, folder / f"W_enc_{layer}.safetensors")
    _save({f"W_dec_{layer}": decoder_FTD}, folder / f"W_dec_{layer}.safetensors")


def _write_single_layer(transcoders: TranscoderSet, layer: int, folder: Path) -> None:
    tensors = _encoder(transcoders, layer) | {"W_dec": transcoders.decoder(layer, layer)}
    if transcoders.threshold_LF is not None:
        tensors[THRESHOLD] = transcoders.threshold_LF[layer]
    if transcoders.skip_LDD is not None:
        tensors["W_skip"] = transcoders.skip_LDD[layer]
    _save(tensors, folder / f"layer_{layer}.safetensors")


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}, path)
