"""CLT-Forge checkpoints: `clt_cfg.json` with `clt_weights.safetensors`, or with a `rank{r}_…` file for each shard.

Weights are for activations times a scale a layer, decoders lie in upper-triangular (source, target) order, there is a
decoder bias for each pair, thresholds are logarithms; reading undoes all of it. Features of rank 0 come first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.files import read_json
from gossamer.transcoders.belonging import BEFORE_THE_NORMS_WEIGHT, OUTPUT_SITE
from gossamer.transcoders.module import TranscoderSet, TranscoderShape, Weights

CONFIG, WEIGHTS = "clt_cfg.json", "clt_weights.safetensors"
FEATURE_AXES = {"W_enc": 2, "b_enc": 1, "W_dec": 1, "log_threshold": 1}


def is_clt_forge(folder: Path) -> bool:
    """Whether a folder has this layout."""
    return (folder / CONFIG).is_file()


def read_clt_forge(folder: Path) -> TranscoderSet:
    """Read a checkpoint, sharded or not."""
    config: dict[str, Any] = read_json(folder / CONFIG)
    if config.get("activation_fn", "jumprelu") != "jumprelu":
        raise GossamerError(f"This checkpoint's activation is {config['activation_fn']!r}; only jumprelu can be read.")
    tensors = _joined(folder)
    cross = bool(config.get("cross_layer_decoders", True))
    n_layers, width, n_features = tensors["W_enc"].shape
    shape = TranscoderShape("cross-layer" if cross else "per-layer", n_layers, n_features, width)
    scale_in_L, scale_out_L = (_scale(tensors, side, n_layers) for side in ("in", "out"))
    sources, targets = _pairs(n_layers, cross=cross)
    decoder_PFD = tensors["W_dec"] / scale_out_L[targets, None, None]
    bias_LD = torch.zeros(n_layers, width).index_add(0, targets, tensors["b_dec"]) / scale_out_L[:, None]
    weights = Weights(
        encoder_LFD=(tensors["W_enc"] * scale_in_L[:, None, None]).mT.contiguous(),
        encoder_bias_LF=tensors["b_enc"],
        decoder_FTD=[decoder_PFD[sources == layer].transpose(0, 1).contiguous() for layer in range(n_layers)],
        decoder_bias_LD=bias_LD,
        threshold_LF=tensors["log_threshold"].exp(),
    )
    return TranscoderSet(shape, weights, _provenance(config))


def _pairs(n_layers: int, *, cross: bool) -> tuple[Tensor, Tensor]:
    """Source and target of every decoder, in the order they are stored."""
    if not cross:
        return torch.arange(n_layers), torch.arange(n_layers)
    sources, targets = torch.triu_indices(n_layers, n_layers)
    return sources, targets


def _scale(tensors: dict[str, Tensor], side: str, n_layers: int) -> Tensor:
    return tensors.get(f"estimated_norm_scaling_factor_{side}", torch.ones(n_layers))


def _joined(folder: Path) -> dict[str, Tensor]:
    """The tensors in float32, shards put together along the features."""
    shards = [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else _shards(folder)
    if not shards:
        raise GossamerError(f"{folder} has a {CONFIG} but no {WEIGHTS}; copy the whole checkpoint.")
    parts = [{name: tensor.float() for name, tensor in load_file(path).items()} for path in shards]
    joined = parts[0]
    for name, axis in FEATURE_AXES.items():
        if any(name not in part for part in parts):
            raise GossamerError(
                f"{folder} holds no {name}, so it is not a CLT-Forge checkpoint of cross-layer weights."
            )
        joined[name] = torch.cat([part[name] for part in parts], axis)
    return joined


def _shards(folder: Path) -> list[Path]:
    """The files of all ranks, rank 0 first."""
    shards = list(folder.glob(f"rank*_{WEIGHTS}"))
    by_rank = {int(path.name.removeprefix("rank").split("_")[0]): path for path in shards}
    if set(by_rank) != set(range(len(by_rank))):
        raise GossamerError(f"{folder} misses a shard: it holds ranks {', '.join(map(str, sorted(by_rank)))}.")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _provenance(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": config.get("model_name"),
        "fingerprint": None,
        "input_site": BEFORE_THE_NORMS_WEIGHT,
        "output_site": OUTPUT_SITE,
        "skips_first_position": True,
        "layout": "CLT-Forge",
    }
