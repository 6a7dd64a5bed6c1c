"""What stands in the place of a model's key/value cache when its blocks are called one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

KeysAndValues = tuple[Tensor, Tensor]


class Prefix:
    """Keys and values of the positions before `start`: repeated for a batch, never grown. May be empty."""

    def __init__(self, cache: DynamicCache | None = None) -> None:
        self.layers = [] if cache is None else [(layer.keys, layer.values) for layer in cache.layers]

    def update(self, key_BHSE: Tensor, value_BHSE: Tensor, layer: int, *args: Any, **kwargs: Any) -> KeysAndValues:
        """Keys and values of all positions, for as many copies of the prompts as the batch holds."""
        if not self.layers:
            return key_BHSE, value_BHSE
        key_NHPE, value_NHPE = self.layers[layer]
        copies = len(key_BHSE) // len(key_NHPE)
        both = ((key_NHPE, key_BHSE), (value_NHPE, value_BHSE))
        key, value = (torch.cat([before.repeat(copies, 1, 1, 1), new], dim=2) for before, new in both)
        return key, value

    def as_cache(self) -> DynamicCache:
        """An ordinary cache that holds the prefix."""
        return DynamicCache(ddp_cache_data=self.layers) if self.layers else DynamicCache()


class Captured(Exception):  # noqa: N818 - no error: it ends a block's call once its keys and values are known
    """Raised by `Capture` to leave the block."""


class Capture:
    """Takes a block's keys and values of all positions and leaves the block, before it attends to anything."""

    def __init__(self, prefix: Prefix) -> None:
        self.prefix = prefix
        self.found: KeysAndValues | None = None

    def update(self, key_BHSE: Tensor, value_BHSE: Tensor, layer: int, *args: Any, **kwargs: Any) -> KeysAndValues:
        """Keep what the block computed, and leave it."""
        self.found = self.prefix.update(key_BHSE, value_BHSE, layer)
        raise Captured


class Known:
    """Serves keys and values that were captured, whatever the block has computed for its last position."""

    def __init__(self, found: KeysAndValues) -> None:
        self.found = found

    def update(self, key_BHSE: Tensor, value_BHSE: Tensor, layer: int, *args: Any, **kwargs: Any) -> KeysAndValues:
        """The captured keys and values."""
        return self.found


AnyCache = Prefix | Capture | Known
_CACHE = object()  # where a recorded call had its cache


def for_any_batch(value: Any) -> Any:
    """A call's argument for any batch: prompts of a group share masks and positions, so one row stands for all."""
    if isinstance(value, Tensor):
        return value[:1] if value.dim() > 1 else value
    if isinstance(value, tuple | list):
        return tuple(map(for_any_batch, value))
    if isinstance(value, Mapping):
        return {name: for_any_batch(part) for name, part in value.items()}
    return _CACHE if isinstance(value, DynamicCache) else value


def served(value: Any, cache: AnyCache, *, last_of: int | None = None) -> Any:
    """Recorded arguments with a cache put in; `last_of` cuts those over that many positions to the last one."""
    if isinstance(value, tuple):
        return tuple(served(part, cache, last_of=last_of) for part in value)
    if isinstance(value, dict):
        return {name: served(part, cache, last_of=last_of) for name, part in value.items()}
    if isinstance(value, Tensor) and last_of is not None:
        return _at_last_position(value, last_of)
    return cache if value is _CACHE else value


def _at_last_position(value: Tensor, n_positions: int) -> Tensor:
    """Masks [1, 1, Q, K], rotations [1, S, E], positions [1, S] or [S], for the last query only."""
    queries = {1: 0, 2: 1, 3: 1, 4: 2}[value.dim()]
    return value.narrow(queries, n_positions - 1, 1) if value.shape[queries] == n_positions else value
