"""Masks: which pairs are allowed, as a boolean tensor, or None where that is simply causal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from gossamer.errors import GossamerError


def build_mask(*, q_length: int, kv_length: int, allow_is_causal_skip: bool = True, **kwargs: Any) -> Tensor | None:
    """The mask transformers asks for: boolean [B,1,Q,K], True where a key may be seen.

    None stands for plain causal attention, and only where that has one meaning (as many keys as queries, or one query
    that sees all keys); in every other case the mask is spelled out.
    """
    kwargs.pop("allow_is_bidirectional_skip", None)
    one_meaning = q_length in (1, kv_length)
    return sdpa_mask(
        q_length=q_length, kv_length=kv_length, allow_is_causal_skip=allow_is_causal_skip and one_meaning, **kwargs
    )


def allowed_pairs(mask: Tensor | None, n_query: int, n_key: int) -> Tensor | None:
    """A mask as transformers hands it over, or as a caller gave it in four dimensions, as booleans."""
    if mask is None:
        if n_query not in (1, n_key):
            raise GossamerError(
                f"Attention from {n_query} queries to {n_key} keys came without a mask; pass an attention mask."
            )
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise GossamerError("Gossamer's attention needs a mask of four dimensions [batch, heads, queries, keys].")
    allowed = _as_bool(mask)[..., :n_key]
    if allowed.shape[-2:] != (n_query, n_key):
        raise GossamerError(
            f"The attention mask is for {allowed.shape[-2]} queries and {allowed.shape[-1]} keys, the attention has"
            f" {n_query} and {n_key}."
        )
    if n_query == n_key and bool(allowed.flatten(0, 1).any(0).triu(1).any()):
        raise GossamerError("The attention mask lets a token see later ones; only causal attention can be gated.")
    return allowed


def refuse_unseparated_documents(position_ids: Tensor | None) -> None:
    """Positions that restart say that documents are packed; without a mask they would read each other.

    transformers separates packed documents only if there is neither an attention mask nor a cache, and a model makes a
    cache unless it is told not to.
    """
    if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] < 2:
        return
    if bool((position_ids.diff(dim=1) < 0).any()):
        raise GossamerError(
            "The position_ids restart inside a row (packed documents) but no mask separates them; call the model"
            " with use_cache=False and no attention_mask, or pass a mask of four dimensions."
        )


def _as_bool(mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise GossamerError("A four-dimensional attention mask must be boolean, or float with 0 for allowed pairs.")
    allowed = mask == 0
    if not bool((allowed | (mask <= -1e4)).all()):
        raise GossamerError(
            "The attention mask adds a bias to the scores (values other than 0 and minus infinity), which gates do not"
            " know; use a mask that only allows or forbids."
        )
    return allowed
