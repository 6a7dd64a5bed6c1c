"""What one layer's attention is asked to do, in one value that the reference and the fast path share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.attention.sampling import LayerNoise


@dataclass(frozen=True)
class GateTerms:
    """A gate's logit: `g = (log softmax(s) if relative else s) + offset_h + query_term_i + key_term_j`."""

    offset_H: Tensor
    relative: bool = False
    query_term_BQ: Tensor | None = None
    key_term_BHK: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """Queries, keys and values of one layer (heads already repeated) and everything that shapes their attention.

    `allowed_BHQK` is boolean and broadcasts over batch and heads; None means causal, or everything for one query.
    """

    query_BHQE: Tensor
    key_BHKE: Tensor
    value_BHKE: Tensor
    scaling: float
    allowed_BHQK: Tensor | None = None
    gate: GateTerms | None = None
    noise: LayerNoise | None = None
    softcap: float | None = None
    sink_H: Tensor | None = None
    dropout: float = 0.0
    watch: Watcher | None = None

    def explicit_allowed(self) -> Tensor:
        """The allowed pairs as a boolean tensor, also when they are simply causal."""
        if self.allowed_BHQK is not None:
            return self.allowed_BHQK
        n_query, n_key = self.query_BHQE.shape[2], self.key_BHKE.shape[2]
        assert n_query in (1, n_key), "only a mask can say which keys these queries may see"
        ones = torch.ones(n_query, n_key, dtype=torch.bool, device=self.query_BHQE.device)
        return ones.tril(n_key - n_query)[None, None]

    def count_allowed(self) -> Tensor | int:
        """Allowed pairs over batch and heads."""
        batch, heads, n_query, _ = self.query_BHQE.shape
        if self.allowed_BHQK is None:
            n_key = self.key_BHKE.shape[2]
            return batch * heads * (n_query * (n_query + 1) // 2 + n_query * (n_key - n_query))
        repeats = batch * heads // (self.allowed_BHQK.shape[0] * self.allowed_BHQK.shape[1])
        return torch.count_nonzero(self.allowed_BHQK) * repeats


@dataclass(frozen=True)
class Tile:
    """A box of (batch, head, query, key): small enough for the cache, and the unit in which noise is drawn."""

    index: int
    batch: slice
    head: slice
    query: slice
    key: slice

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order batch, head, query, key."""
        batch, head, query, key = (s.stop - s.start for s in (self.batch, self.head, self.query, self.key))
        return batch, head, query, key


# Sees each tile of a forward: its box, the softmax [B,H,Q,K] in it and the open edges, as numbers above zero; without a
# gate every allowed pair is open, however light. Keys outside the tile are not allowed. The tensors are scratch memory:
# copy what is to be kept.
Watcher = Callable[[Tile, Tensor, Tensor], None]

TILE_ELEMENTS = 256 * 1024
TILE_ELEMENTS_ON_GPU = 64 * 1024 * 1024  # starting a kernel costs more there than a cache that overflows


def tiles_of(call: AttentionCall) -> Iterator[Tile]:
    """Cut a call into tiles; keys that no query of a tile may see are left out. A function of shapes, mask, device."""
    batch, heads = call.query_BHQE.shape[:2]
    index = 0
    ranges = list(_key_ranges(call))
    widest = max((queries.stop - queries.start) * (keys.stop - keys.start) for queries, keys in ranges)
    most = TILE_ELEMENTS if call.query_BHQE.device.type == "cpu" else TILE_ELEMENTS_ON_GPU
    rows = max(1, most // max(1, widest))
    head_step = min(heads, rows)
    batch_step = max(1, rows // heads) if head_step == heads else 1
    for b in range(0, batch, batch_step):
        for h in range(0, heads, head_step):
            batch_slice, head_slice = slice(b, min(b + batch_step, batch)), slice(h, min(h + head_step, heads))
            for queries, keys in ranges:
                yield Tile(index, batch_slice, head_slice, queries, keys)
                index += 1


def _key_ranges(call: AttentionCall) -> Iterator[tuple[slice, slice]]:
    n_query, n_key = call.query_BHQE.shape[2], call.key_BHKE.shape[2]
    step = _queries_per_tile(call)
    seen_QK = None if call.allowed_BHQK is None else call.allowed_BHQK.flatten(0, 1).any(0)
    for start in range(0, n_query, step):
        stop = min(start + step, n_query)
        if seen_QK is None:
            yield slice(start, stop), slice(0, n_key - n_query + stop)
            continue
        seen = seen_QK[start:stop].any(0).nonzero()
        yield slice(start, stop), slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(0, 0)


def _queries_per_tile(call: AttentionCall) -> int:
    n_query = call.query_BHQE.shape[2]
    if call.query_BHQE.device.type != "cpu":
        return min(max(n_query, 1), 1024)
    return 32 if n_query <= 128 else 64
