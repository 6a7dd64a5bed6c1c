"""All-pairs relations of 270 heads on 512 tokens, dense and sparse: `python benchmarks/relations.py`."""

from __future__ import annotations

import time

import numpy as np

from gossamer.maps import AttentionMaps, from_matrices
from gossamer.patterns.relations import relate

LAYERS, HEADS, T = 30, 9, 512


def made(density: float) -> AttentionMaps:
    """Random attention of which a share is open."""
    rng = np.random.default_rng(0)
    weights = np.tril(rng.standard_exponential((LAYERS, HEADS, T, T), dtype=np.float32))
    weights /= weights.sum(-1, keepdims=True)
    weights *= rng.random(weights.shape, dtype=np.float32) < density
    return from_matrices([weights], ids=[rng.integers(0, 1000, T).tolist()], gated=density < 1)


def main() -> None:
    for density in (1.0, 0.005):
        maps = made(density)
        for position_removed in (False, True):
            start = time.perf_counter()
            relate(maps, position_removed=position_removed)
            took = time.perf_counter() - start
            name = "position removed" if position_removed else "plain"
            print(f"{LAYERS * HEADS} heads, T={T}, {density:.1%} of edges open, {name}: {took:.1f} s (target 20 s)")


if __name__ == "__main__":
    main()
