"""Which model a set of transcoders belongs to, and which places of it they read and write."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from gossamer.errors import GossamerError
from gossamer.models import LoadedModel

if TYPE_CHECKING:
    from gossamer.transcoders.module import TranscoderSet

INPUT_SITE = "mlp input"
OUTPUT_SITE = "mlp write"
SITES = {"input_site": INPUT_SITE, "output_site": OUTPUT_SITE}
BEFORE_THE_NORMS_WEIGHT = "normalised residual"  # an RMS norm's output before its weight, as some formats have it


def model_fingerprint(model: LoadedModel) -> str:
    """A hash of the weights as bfloat16, so that the same model in another precision is still the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.hf.state_dict().items()):
        if tensor.is_floating_point():
            digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
            rounded = tensor.detach().to(torch.float32).to(torch.bfloat16).cpu().contiguous()
            digest.update(rounded.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def belonging_to(model: LoadedModel) -> dict[str, Any]:
    """The part of the provenance that `require_model` reads."""
    return {
        "model": model.name,
        "family": model.anatomy.family,
        "fingerprint": model_fingerprint(model),
        **SITES,
        "skips_first_position": True,
    }


def require_model(transcoders: TranscoderSet, model: LoadedModel) -> None:
    """Refuse a model of other sizes, other weights, or whose MLPs these transcoders do not read."""
    parts, of = model.anatomy, transcoders.provenance
    theirs, ours = (transcoders.n_layers, transcoders.width), (parts.n_layers, parts.d_model)
    if theirs != ours:
        raise GossamerError(
            f"These transcoders are for {theirs[0]} layers of width {theirs[1]}, but {model.name} has {ours[0]} layers "
            f"of width {ours[1]}."
        )
    fingerprint = of.get("fingerprint")
    if fingerprint is not None and fingerprint != model_fingerprint(model):
        raise GossamerError(
            f"These transcoders were made for {of.get('model', 'another model')}, whose weights differ from those of "
            f"{model.name}; load the model they belong to, or train transcoders for this one."
        )
    if of.get("input_site") == BEFORE_THE_NORMS_WEIGHT and not _norm_has_bias(model):
        raise GossamerError(
            f"These transcoders read the normalised residual stream before the norm's weight is applied, which the MLP "
            f"of a {parts.family} model does not read; use transcoders that read the MLP's input."
        )


def _norm_has_bias(model: LoadedModel) -> bool:
    """A layer norm (hooks of other libraries sit behind its weight) and not an RMS norm (they sit before it)."""
    return all(norm is not None and getattr(norm, "bias", None) is not None for norm in model.anatomy.mlp_norms)
