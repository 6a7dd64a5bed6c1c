"""Activations kept on disk: worth it where the model is dear beside its transcoders.

    cache.json      what the cache is of, how much fits, how many sequences and positions are in it
    inputs.npy      [positions, L, D] in float16, memory-mapped
    outputs.npy     [positions, L, D] in float16, memory-mapped

Filling stops at the bound or at the
end of the text, and goes on where it was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gossamer.corpus.order import step_rows
from gossamer.corpus.sequences import Sequences
from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json
from gossamer.models import LoadedModel
from gossamer.transcoders.activations import SEQUENCES_FOR_SCALES
from gossamer.transcoders.belonging import belonging_to
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.sites import counted_positions, mlp_activity

FORMAT = 1
SIDES = ("inputs", "outputs")
GIB = 2**30

Tell = Callable[[int, int], None]  # sequences done, and in all


@dataclass(frozen=True)
class Cache:
    """Where activations may be kept, and how many gibibytes they may take."""

    folder: Path
    gib: float = 4.0

    def activations(self, model: LoadedModel, text: Sequences, config: TranscoderConfig) -> CachedActivations:
        """The cache as a source, filled first; a step has as many positions as one without a cache."""
        fill_cache(self.folder, model, text, gib=self.gib)
        per_step = config.batch * (text.length - 1)
        return CachedActivations(self.folder, positions_per_step=per_step, seed=config.seed, device=model.device)


class CachedActivations:
    """Batches of positions drawn from a filled cache, in an order that is a function of the seed and the step."""

    def __init__(self, folder: Path, *, positions_per_step: int, seed: int, device: torch.device | str) -> None:
        state = read_json(folder / "cache.json")
        self.n_positions = int(state["positions"])
        self.positions_per_step, self.seed, self.device = positions_per_step, seed, device
        self._maps = [np.load(folder / f"{side}.npy", mmap_mode="r") for side in SIDES]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The step's positions: epochs one after the other, each in an order of its own."""
        rows = step_rows(step, seed=self.seed, n_sequences=self.n_positions, per_step=self.positions_per_step)
        return self._read(np.sort(rows))

    def sample(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The positions at the beginning of the cache."""
        for start in range(0, min(self.n_positions, SEQUENCES_FOR_SCALES * 128), self.positions_per_step):
            yield self._read(np.arange(start, min(start + self.positions_per_step, self.n_positions)))

    def _read(self, rows: NDArray[np.integer]) -> tuple[Tensor, Tensor]:
        tensors = [torch.from_numpy(np.asarray(stored[rows], dtype=np.float32)) for stored in self._maps]
        inputs_LND, outputs_LND = (tensor.transpose(0, 1).contiguous().to(self.device) for tensor in tensors)
        return inputs_LND, outputs_LND


def fill_cache(
    folder: str | Path, model: LoadedModel, text: Sequences, *, gib: float, batch: int = 8, tell: Tell | None = None
) -> Path:
    """Run the model over the text until the text or `gib` gibibytes are used up, going on after an interruption."""
    folder, parts = Path(folder), model.anatomy
    bytes_per_position = 2 * len(SIDES) * parts.n_layers * parts.d_model
    capacity = min(int(gib * GIB / bytes_per_position), int(counted_positions(text).sum()))
    if capacity < 1:
        raise GossamerError(f"{gib:g} GiB hold no activations of {model.name}; allow more, or give a longer text.")
    state = _begin(folder, model, text, (capacity, parts.n_layers, parts.d_model))
    maps = [np.load(folder / f"{side}.npy", mmap_mode="r+") for side in SIDES]
    while state["positions"] < capacity:
        first = state["sequences"]
        activity = mlp_activity(model, text.rows(slice(first, first + batch)))
        state["positions"] = _write(maps, activity, state["positions"], capacity)
        state["sequences"] = min(first + batch, len(text))
        write_json(folder / "cache.json", state)
        if tell is not None:
            tell(state["positions"], capacity)
    return folder


def _begin(folder: Path, model: LoadedModel, text: Sequences, shape: tuple[int, int, int]) -> dict[str, Any]:
    of = {"format": FORMAT, "model": belonging_to(model), "text": text.fingerprint(), "shape": list(shape)}
    path = folder / "cache.json"
    if path.exists():
        state: dict[str, Any] = read_json(path)
        if {name: state.get(name) for name in of} != of:
            raise GossamerError(f"{folder} caches other activations; give a new folder, or remove this one.")
        return state
    folder.mkdir(parents=True, exist_ok=True)
    for side in SIDES:
        stored = np.lib.format.open_memmap(folder / f"{side}.npy", mode="w+", dtype=np.float16, shape=shape)
        stored.flush()
    state = of | {"sequences": 0, "positions": 0}
    write_json(path, state)
    return state


def _write(maps: list[Any], activity: tuple[Tensor, Tensor], start: int, capacity: int) -> int:
    """Write a batch behind what is there, as far as it fits; return where it ends."""
    end = start
    for stored, seen_LND in zip(maps, activity, strict=True):
        seen_NLD = seen_LND.transpose(0, 1)[: capacity - start].cpu().float().numpy()
        if np.abs(seen_NLD).max(initial=0) > np.finfo(np.float16).max:
            raise GossamerError("An activation is too large for the cache's half precision; train without a cache.")
        end = start + len(seen_NLD)
        stored[start:end] = seen_NLD
        stored.flush()
    return end
