"""From sequences to what a transformers model is called with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.corpus.sequences import Sequences


def model_inputs(text: Sequences, device: torch.device | str) -> dict[str, Any]:
    """Keyword arguments for a transformers model: documents do not see each other and count positions from 0."""
    inputs: dict[str, Any] = {"input_ids": on_device(text.ids_NT, device), "use_cache": False}
    if text.segments_NT is not None:
        segments_BQ = on_device(text.segments_NT, device)
        inputs["attention_mask"] = _document_mask(segments_BQ)
        inputs["position_ids"] = _positions(segments_BQ)
    return inputs


def on_device(array: Any, device: torch.device | str) -> Tensor:
    """An array of integers as a tensor."""
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)


def segment_starts(segments_BQ: Tensor) -> Tensor:
    """True where a document begins."""
    starts_BQ = torch.ones_like(segments_BQ, dtype=torch.bool)
    starts_BQ[:, 1:] = segments_BQ[:, 1:] != segments_BQ[:, :-1]
    return starts_BQ


def _document_mask(segments_BQ: Tensor) -> Tensor:
    """True where a query may attend; padding (segment < 0) sees itself alone."""
    length = segments_BQ.shape[1]
    causal_QK = torch.ones(length, length, dtype=torch.bool, device=segments_BQ.device).tril()
    same_BQK = segments_BQ[:, :, None] == segments_BQ[:, None, :]
    own_QK = torch.eye(length, dtype=torch.bool, device=segments_BQ.device)
    real_BQK = (segments_BQ >= 0)[:, :, None] | own_QK
    return (causal_QK & same_BQK & real_BQK)[:, None]


def _positions(segments_BQ: Tensor) -> Tensor:
    """Positions that start again at 0 with every segment."""
    index_Q = torch.arange(segments_BQ.shape[1], device=segments_BQ.device)
    starts_BQ = segment_starts(segments_BQ)
    first_BQ = torch.where(starts_BQ, index_Q, torch.zeros_like(index_Q)).cummax(dim=1).values
    return index_Q - first_BQ
