"""A check at load: the attention function is really called in every layer, and what it returns reaches the logits."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from gossamer.attention import ForceOpen, ForceShut, tape
from gossamer.errors import GossamerError
from gossamer.models.anatomy import Anatomy

_PROBE_LENGTH = 4


@torch.no_grad()
def check_seam(hf: PreTrainedModel, parts: Anatomy) -> None:
    """Run four tokens with every edge open and with every edge shut; equal logits mean the seam is not in use."""
    device = next(hf.parameters()).device
    length = min(_PROBE_LENGTH, getattr(hf.config, "max_position_embeddings", None) or _PROBE_LENGTH)
    ids_BT = torch.arange(length, device=device)[None] % int(hf.config.vocab_size)
    every_edge = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    logits = []
    for force in (ForceOpen, ForceShut):
        with tape(hf, replace=[force(layer, every_edge) for layer in range(parts.n_layers)]):
            mask_BT = torch.ones_like(ids_BT)  # said aloud, since a token of the probe may be the padding token
            logits.append(hf(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits)
    if torch.equal(logits[0], logits[1]):
        raise GossamerError(
            f"Replacing the attention of this {parts.family} model leaves its output unchanged, so gates would do "
            "nothing; its attention is computed somewhere else, or writes only zeros."
        )
