"""Capturing maps: a model reads prompts, and every tile of attention gives up its open edges as it is computed.

Nothing of size query x key exists at any time, so memory grows with the open edges and long prompts are fine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.attention import tape
from gossamer.attention.call import Tile
from gossamer.corpus import Sequences
from gossamer.errors import GossamerError
from gossamer.maps.builder import MapBuilder
from gossamer.maps.store import AttentionMaps
from gossamer.models import LoadedModel
from gossamer.models.spelling import spelled, text_of

DENSE_FLOOR = 1e-3
MOST_TOKENS = 4096  # in one forward
Prompts = str | Sequence[str] | Sequence[Sequence[int]] | Tensor | Sequences


def capture(model: LoadedModel, prompts: Prompts, *, floor: float | None = None) -> AttentionMaps:
    """The maps of all heads of a model on prompts: texts, token ids, or `Sequences` of a corpus.

    `floor`: edges lighter than this are summed up by row instead of stored; 0 for gated models and 0.001 for dense ones
    unless given. Texts get the tokenizer's begin token in front, if it has one.
    """
    floor = (0.0 if model.is_sparse else DENSE_FLOOR) if floor is None else float(floor)
    if not 0 <= floor < 1:
        raise GossamerError(f"The floor is a weight from 0 to below 1, not {floor}.")
    rows, documents = _token_rows(model, prompts)
    _require_readable(model, rows)
    parts = model.anatomy
    builder = MapBuilder(
        model.name,
        [spelled(model.optional_tokenizer, ids) for ids in rows],
        rows,
        texts=[text_of(model.optional_tokenizer, ids) for ids in rows],
        n_layers=parts.n_layers,
        n_heads=parts.n_heads,
        gated=model.is_sparse,
        floor=floor,
        documents=documents,
        provenance={"model": model.provenance()},
    )
    was_training = model.hf.training
    model.hf.eval()
    try:
        with torch.no_grad():
            for batch in _batches(rows, documents):
                _capture_batch(model, builder, rows, documents, batch)
    finally:
        model.hf.train(was_training)
    return builder.finish()


def _token_rows(model: LoadedModel, prompts: Prompts) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of every prompt, and where documents begin in it."""
    if isinstance(prompts, Sequences):
        ids = prompts.ids_NT.tolist()
        if prompts.segments_NT is None:
            return ids, [[0] for _ in ids]
        if (prompts.segments_NT < 0).any():
            raise GossamerError("Maps are captured without padding; cut the padding off the sequences.")
        return ids, [[0, *(np.flatnonzero(np.diff(row)) + 1).tolist()] for row in prompts.segments_NT]
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist() if prompts.ndim == 2 else [prompts.tolist()]
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    rows = [model.encode(row).tolist() if isinstance(row, str) else [int(token) for token in row] for row in texts]
    return rows, [[0] for _ in rows]


def _require_readable(model: LoadedModel, rows: Sequence[Sequence[int]]) -> None:
    if not rows or not all(rows):
        raise GossamerError("There is nothing to capture: give at least one prompt, each with at least one token.")
    longest, limit = max(map(len, rows)), model.context_length
    if limit is not None and longest > limit:
        raise GossamerError(f"A prompt of {longest} tokens does not fit {model.name}'s context of {limit}; shorten it.")


def _batches(rows: Sequence[Sequence[int]], documents: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of prompts that can share a forward: of one length, packed ones together."""
    alike: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for number, row in enumerate(rows):
        alike[len(row), len(documents[number]) > 1].append(number)
    for (length, _), numbers in alike.items():
        size = max(1, MOST_TOKENS // length)
        yield from (numbers[first : first + size] for first in range(0, len(numbers), size))


def _capture_batch(
    model: LoadedModel,
    builder: MapBuilder,
    rows: Sequence[Sequence[int]],
    documents: Sequence[Sequence[int]],
    batch: Sequence[int],
) -> None:
    ids_BT = torch.tensor([rows[number] for number in batch], device=model.device)
    starts_BT = np.stack([_document_starts(documents[number], ids_BT.shape[1]) for number in batch])
    inputs: dict[str, Any] = {"input_ids": ids_BT, "use_cache": False}
    if starts_BT.any():
        starts = torch.from_numpy(starts_BT).to(model.device)
        inputs["position_ids"] = torch.arange(ids_BT.shape[1], device=model.device) - starts
        causal_QK = torch.ones(ids_BT.shape[1], ids_BT.shape[1], dtype=torch.bool, device=model.device).tril()
        inputs["attention_mask"] = (causal_QK & (starts[:, :, None] == starts[:, None, :]))[:, None]
    watcher = _Watcher(builder, batch, torch.from_numpy(starts_BT).to(model.device))
    with tape(model.hf, watch=watcher.see):
        _decoder(model)(**inputs)
    watcher.require_complete()


def _decoder(model: LoadedModel) -> torch.nn.Module:
    """The model without its vocabulary: logits of a long prompt are large and nobody asked for them."""
    decoder = getattr(model.hf, model.hf.base_model_prefix, None)
    return decoder if isinstance(decoder, torch.nn.Module) else model.hf


def _document_starts(documents: Sequence[int], length: int) -> np.ndarray:
    bounds = np.array([*documents, length])
    return np.repeat(bounds[:-1], np.diff(bounds))


class _Watcher:
    """Turns tiles of one batch into edges and row summaries."""

    def __init__(self, builder: MapBuilder, batch: Sequence[int], starts_BT: Tensor) -> None:
        self.builder, self.batch, self.starts_BT = builder, batch, starts_BT
        self.floor = builder.about["floor"]
        self.n_seen = 0

    def see(self, layer: int, tile: Tile, softmax_BHQK: Tensor, open_BHQK: Tensor) -> None:
        """One tile of one layer."""
        keep = open_BHQK.bool()
        below = n_below = None
        if self.floor:
            light = keep & (softmax_BHQK < self.floor)
            below, n_below = torch.where(light, softmax_BHQK, 0).sum(-1), light.sum(-1)
            keep &= ~light
        self._rows(layer, tile, softmax_BHQK, below, n_below)
        self._edges(layer, tile, softmax_BHQK, keep)

    def _rows(self, layer: int, tile: Tile, softmax: Tensor, below: Tensor | None, n_below: Tensor | None) -> None:
        starts_BQ = self.starts_BT[tile.batch, tile.query] - tile.key.start
        seen = (starts_BQ >= 0) & (starts_BQ < softmax.shape[-1])
        index = starts_BQ.clamp(0, softmax.shape[-1] - 1)[:, None, :, None].expand(*softmax.shape[:3], 1)
        first_BHQ = softmax.gather(-1, index)[..., 0] * seen[:, None]
        found = {"entropy": _row_entropy(softmax), "first": first_BHQ, "below": below, "n_below": n_below}
        self.n_seen += first_BHQ.numel()
        for name, value_BHQ in found.items():
            if value_BHQ is None:
                continue
            target = getattr(self.builder.rows, name)
            values = value_BHQ.cpu().numpy()
            for row, value_HQ in zip(range(tile.batch.start, tile.batch.stop), values, strict=True):
                start = self.builder.first_position[self.batch[row]] + tile.query.start
                target[layer, tile.head, start : start + value_HQ.shape[-1]] = value_HQ

    def _edges(self, layer: int, tile: Tile, weights: Tensor, keep: Tensor) -> None:
        flat = np.flatnonzero(keep.cpu().numpy())  # numpy counts several times faster than torch does
        weight = weights.flatten()[torch.from_numpy(flat).to(weights.device)].float().cpu().numpy()
        row, head, query, key = np.unravel_index(flat, keep.shape)
        bounds = np.searchsorted(row, np.arange(keep.shape[0] + 1))
        for number in range(keep.shape[0]):
            part = slice(bounds[number], bounds[number + 1])
            self.builder.add(
                self.batch[tile.batch.start + number],
                layer,
                head[part] + tile.head.start,
                query[part] + tile.query.start,
                key[part] + tile.key.start,
                weight[part],
            )

    def require_complete(self) -> None:
        """Every row of every head was seen."""
        about = self.builder.about
        assert self.n_seen == self.starts_BT.numel() * about["n_layers"] * about["n_heads"], "tiles are missing"


def _row_entropy(softmax_BHQK: Tensor) -> Tensor:
    """`-sum p log p` of each row; torch's own `entr` is exact at zero and four times slower."""
    logs = softmax_BHQK.clamp_min(torch.finfo(softmax_BHQK.dtype).tiny).log_()
    return -torch.einsum("bhqk,bhqk->bhq", softmax_BHQK, logs)
