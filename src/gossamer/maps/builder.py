"""Putting maps together: from pieces of heads as they are computed, or from whole matrices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gossamer.errors import GossamerError
from gossamer.maps.store import AttentionMaps, Rows, smallest_index

Array = NDArray[Any]
Piece = tuple[Array, Array, Array, Array]  # head, query, key, weight


class MapBuilder:
    """Takes edges in any order of pieces (each piece sorted by head, query, key) and makes maps of them."""

    def __init__(
        self,
        model: str,
        tokens: Sequence[Sequence[str]],
        ids: Sequence[Sequence[int]],
        *,
        n_layers: int,
        n_heads: int,
        gated: bool,
        floor: float,
        texts: Sequence[str] | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        self.about: dict[str, Any] = {
            "model": model,
            "tokens": tuple(map(tuple, tokens)),
            "ids": tuple(tuple(map(int, row)) for row in ids),
            "texts": () if texts is None or list(texts) == list(map("".join, tokens)) else tuple(texts),
            "documents": tuple(map(tuple, documents or [(0,)] * len(tokens))),
            "n_layers": n_layers,
            "n_heads": n_heads,
            "gated": gated,
            "floor": floor,
            "provenance": dict(provenance or {}),
        }
        lengths = [len(row) for row in tokens]
        self.first_position = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.index_type = smallest_index(max(lengths, default=0))
        shape = (n_layers, n_heads, sum(lengths))
        self.rows = Rows(
            np.zeros(shape, np.float16),
            np.zeros(shape, np.float16),
            np.zeros(shape, np.float32),
            np.zeros(shape, np.uint32),
        )
        self._pieces: dict[tuple[int, int], list[Piece]] = defaultdict(list)

    def add(self, prompt: int, layer: int, head: Array, query: Array, key: Array, weight: Array) -> None:
        """Edges of one layer on one prompt."""
        if len(weight):
            piece = (
                head.astype(np.uint16),
                query.astype(self.index_type),
                key.astype(self.index_type),
                weight.astype(np.float32),
            )
            self._pieces[prompt, layer].append(piece)

    def finish(self) -> AttentionMaps:
        """The maps; the pieces are given up on the way, so that memory is not needed twice."""
        n_layers, n_heads = self.about["n_layers"], self.about["n_heads"]
        counts, columns = [], []
        for prompt in range(len(self.about["tokens"])):
            for layer in range(n_layers):
                pieces = self._pieces.pop((prompt, layer), [])
                if not pieces:
                    counts.append(np.zeros(n_heads, dtype=np.int64))
                    continue
                head, query, key, weight = (np.concatenate(column) for column in zip(*pieces, strict=True))
                order = np.argsort(head, kind="stable")
                counts.append(np.bincount(head, minlength=n_heads))
                columns.append((query[order], key[order], weight[order]))
        empty = (np.zeros(0, self.index_type), np.zeros(0, self.index_type), np.zeros(0, np.float32))
        query, key, weight = (np.concatenate(column) for column in zip(empty, *columns, strict=True))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(counts))]).astype(np.int64)
        return AttentionMaps(offsets=offsets, query=query, key=key, weight=weight, rows=self.rows, **self.about)


def from_matrices(
    weights: Sequence[Array],
    *,
    ids: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[str]] | None = None,
    softmax: Sequence[Array] | None = None,
    texts: Sequence[str] | None = None,
    documents: Sequence[Sequence[int]] | None = None,
    model: str = "matrices",
    gated: bool = False,
    floor: float = 0.0,
    provenance: Mapping[str, Any] | None = None,
) -> AttentionMaps:
    """Maps of weight matrices you already have, one array [L, H, T, T] a prompt.

    An edge is an entry above zero; those below `floor` are summed up instead of stored. `softmax` is what the weights
    were before the gate, and the weights themselves if it is left out. Weights are finite, not below zero, and zero
    where the key comes after the query.
    """
    if not len(weights):
        raise GossamerError("There are no matrices to make maps of; give one array [L, H, T, T] for each prompt.")
    for prompt, matrices in enumerate([*weights, *(() if softmax is None else softmax)]):
        _require_attention(matrices, prompt % len(weights))
    n_layers, n_heads = weights[0].shape[:2]
    names = tokens
    if names is None:
        names = [[str(token) for token in row] for row in ids]
        texts = [" ".join(row) for row in names] if texts is None else texts
    builder = MapBuilder(
        model,
        names,
        ids,
        n_layers=n_layers,
        n_heads=n_heads,
        gated=gated,
        floor=floor,
        texts=texts,
        documents=documents,
        provenance=provenance,
    )
    for prompt, weights_LHQK in enumerate(weights):
        before_LHQK = weights_LHQK if softmax is None else softmax[prompt]
        at = slice(builder.first_position[prompt], builder.first_position[prompt + 1])
        starts_Q = _starts(builder.about["documents"][prompt], weights_LHQK.shape[-1])
        queries = np.arange(weights_LHQK.shape[-1])
        light = (weights_LHQK > 0) & (weights_LHQK < floor)
        builder.rows.entropy[:, :, at] = row_entropy(before_LHQK)
        builder.rows.first[:, :, at] = before_LHQK[:, :, queries, starts_Q]
        builder.rows.below[:, :, at] = np.where(light, weights_LHQK, 0).sum(-1)
        builder.rows.n_below[:, :, at] = light.sum(-1)
        for layer in range(n_layers):
            head, query, key = np.nonzero((weights_LHQK[layer] > 0) & ~light[layer])
            builder.add(prompt, layer, head, query, key, weights_LHQK[layer, head, query, key])
    return builder.finish()


def _require_attention(weights_LHQK: Array, prompt: int) -> None:
    """Refuse what is no causal attention."""
    if weights_LHQK.ndim != 4 or weights_LHQK.shape[-1] != weights_LHQK.shape[-2]:
        raise GossamerError(f"The matrices of prompt {prompt} are {weights_LHQK.shape}; give an array [L, H, T, T].")
    if not np.isfinite(weights_LHQK).all():
        raise GossamerError(f"The matrices of prompt {prompt} hold numbers that are not finite; cut or repair them.")
    if (weights_LHQK < 0).any():
        raise GossamerError(
            f"The matrices of prompt {prompt} hold weights below zero; give attention weights, not scores."
        )
    if any(np.triu(weights_HQK, 1).any() for weights_HQK in weights_LHQK):
        raise GossamerError(
            f"The matrices of prompt {prompt} have weights on keys after their query; give causal attention, queries as"
            " rows."
        )


def row_entropy(rows: Array) -> Array:
    """`-sum p log p` over the last axis, in nats."""
    return -(rows * np.log(np.where(rows > 0, rows, 1))).sum(-1)


def _starts(documents: Sequence[int], length: int) -> Array:
    bounds = np.array([*documents, length])
    return np.repeat(bounds[:-1], np.diff(bounds))
