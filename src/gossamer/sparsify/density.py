"""Density, four ways, always together: the published figure depends on the sequence length and on packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gossamer.sparsify.data import Sequences


@dataclass(frozen=True)
class Density:
    """Open edges, counted over all layers and heads, against four yardsticks."""

    open_edges: int
    causal_pairs: int
    document_pairs: int
    tokens: int
    n_layers: int
    n_heads: int

    @property
    def of_causal_pairs(self) -> float:
        """Open edges among all causal pairs of the sequences: the published figure."""
        return self.open_edges / self.causal_pairs

    @property
    def of_document_pairs(self) -> float:
        """Open edges among the causal pairs inside one document."""
        return self.open_edges / self.document_pairs

    @property
    def per_query_and_head(self) -> float:
        """Open edges of a query in a head."""
        return self.open_edges / (self.tokens * self.n_layers * self.n_heads)

    @property
    def per_token(self) -> float:
        """Open edges of a token over the whole model."""
        return self.open_edges / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """The four figures and the count."""
        return {
            "open_of_causal_pairs": self.of_causal_pairs,
            "open_of_document_pairs": self.of_document_pairs,
            "open_per_query_and_head": self.per_query_and_head,
            "open_per_token": self.per_token,
            "open_edges": self.open_edges,
            "tokens": self.tokens,
        }


def count_pairs(text: Sequences) -> tuple[int, int]:
    """Causal pairs of the sequences, and those inside one document, for a single head."""
    n_sequences, length = text.ids_NT.shape
    causal = n_sequences * length * (length + 1) // 2
    if text.segments_NT is None:
        return causal, causal
    inside = 0
    for segments_T in text.segments_NT:
        _, sizes = np.unique(segments_T[segments_T >= 0], return_counts=True)
        inside += int((sizes.astype(np.int64) * (sizes + 1) // 2).sum())
    return causal, inside


def density_of(text: Sequences, *, open_edges: int, n_layers: int, n_heads: int) -> Density:
    """The density of `open_edges` edges on `text`."""
    heads = n_layers * n_heads
    causal, inside = count_pairs(text)
    tokens = int(text.ids_NT.size) if text.segments_NT is None else int((text.segments_NT >= 0).sum())
    return Density(open_edges, causal * heads, inside * heads, tokens, n_layers, n_heads)
