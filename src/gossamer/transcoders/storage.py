"""Our own folder of transcoders.

    transcoders.json            format, shape, provenance, storage
    transcoders.safetensors     encoder, encoder_bias, threshold, decoder_bias, skip, decoder.0, decoder.1, ...

In `int8` storage encoder and decoders are int8 with a float32 scale a row (`NAME.scale`); the rest stays float32.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.files import atomic_folder, read_json, write_json
from gossamer.transcoders.module import TranscoderSet, TranscoderShape, Weights
from gossamer.transcoders.quantise import SCALE_SUFFIX, dequantise, quantise

FORMAT = 1
DESCRIPTION, TENSORS = "transcoders.json", "transcoders.safetensors"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
STORAGES = ("int8", *DTYPES)


def save(transcoders: TranscoderSet, folder: str | Path, *, dtype: str = "float32") -> Path:
    """Write the folder, whole or not at all."""
    if dtype not in STORAGES:
        raise GossamerError(f"Transcoders are stored as {', '.join(STORAGES)}, not as {dtype!r}.")
    folder = Path(folder)
    description = {
        "format": FORMAT,
        "storage": dtype,
        "shape": asdict(transcoders.shape),
        "provenance": transcoders.provenance,
    }
    with atomic_folder(folder) as temporary:
        write_json(temporary / DESCRIPTION, description)
        save_file(_stored(_named(transcoders.weights()), dtype), temporary / TENSORS)
    return folder


def load_folder(folder: Path) -> TranscoderSet:
    """Read the folder; int8 and half precision become float32."""
    description = read_json(folder / DESCRIPTION)
    if description.get("format") != FORMAT:
        raise GossamerError(
            f"{folder} holds transcoders of format {description.get('format')}, and this version reads {FORMAT}."
        )
    try:
        tensors = load_file(folder / TENSORS)
        shape = TranscoderShape(**description["shape"])
        return TranscoderSet(shape, _weights(_restored(tensors), shape.n_layers), description["provenance"])
    except (OSError, SafetensorError, KeyError, TypeError) as error:
        raise GossamerError(
            f"{folder} could not be read as transcoders ({error}); check that it is complete."
        ) from error


def _named(weights: Weights) -> dict[str, Tensor]:
    tensors = {
        "encoder": weights.encoder_LFD,
        "encoder_bias": weights.encoder_bias_LF,
        "threshold": weights.threshold_LF,
        "decoder_bias": weights.decoder_bias_LD,
        "skip": weights.skip_LDD,
    } | {f"decoder.{source}": decoder_FTD for source, decoder_FTD in enumerate(weights.decoder_FTD)}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}


def _weights(tensors: dict[str, Tensor], n_layers: int) -> Weights:
    return Weights(
        encoder_LFD=tensors["encoder"],
        encoder_bias_LF=tensors["encoder_bias"],
        decoder_FTD=[tensors[f"decoder.{source}"] for source in range(n_layers)],
        decoder_bias_LD=tensors["decoder_bias"],
        threshold_LF=tensors.get("threshold"),
        skip_LDD=tensors.get("skip"),
    )


def _stored(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    if dtype != "int8":
        return {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(("encoder_bias", "threshold", "decoder_bias")):
            stored[name] = tensor.float()
        else:
            stored[name], stored[name + SCALE_SUFFIX] = quantise(tensor)
    return stored


def _restored(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    restored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            restored[name] = dequantise(tensor, tensors[name + SCALE_SUFFIX])
        elif not name.endswith(SCALE_SUFFIX):
            restored[name] = tensor if tensor.dtype == torch.float64 else tensor.float()
    return restored
