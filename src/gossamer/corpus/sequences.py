"""Sequences of tokens, packed from documents: what everything trains and measures on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gossamer.errors import GossamerError
from gossamer.files import atomic_file

Integers = NDArray[np.integer]


@dataclass(frozen=True)
class Sequences:
    """N sequences of T tokens; tokens of one segment do not attend to another's. No segments: one document each."""

    ids_NT: Integers
    segments_NT: Integers | None = None

    def __post_init__(self) -> None:
        if self.ids_NT.ndim != 2:
            raise GossamerError(f"Token ids come as an array [sequences, tokens], not of shape {self.ids_NT.shape}.")
        if self.segments_NT is not None and self.segments_NT.shape != self.ids_NT.shape:
            raise GossamerError(
                f"The segment ids' shape {self.segments_NT.shape} differs from the tokens' {self.ids_NT.shape}."
            )

    def __len__(self) -> int:
        return int(self.ids_NT.shape[0])

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return int(self.ids_NT.shape[1])

    def rows(self, index: Integers | slice) -> Sequences:
        """Some of the sequences."""
        return Sequences(self.ids_NT[index], None if self.segments_NT is None else self.segments_NT[index])

    def targets(self) -> Integers:
        """What position t should predict; -100 (ignored) at the end and where the next token is another document's."""
        targets_NT = np.full(self.ids_NT.shape, -100, dtype=np.int64)
        targets_NT[:, :-1] = self.ids_NT[:, 1:]
        if self.segments_NT is not None:
            same = (self.segments_NT[:, 1:] == self.segments_NT[:, :-1]) & (self.segments_NT[:, 1:] >= 0)
            targets_NT[:, :-1][~same] = -100
        return targets_NT

    def fingerprint(self) -> str:
        """A hash of the tokens and segments."""
        digest = hashlib.sha256(repr(self.ids_NT.shape).encode())
        for array in (self.ids_NT, self.segments_NT):
            if array is not None:
                digest.update(np.ascontiguousarray(array, dtype=np.int32).tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write as safetensors, atomically."""
        tensors = {"ids": np.ascontiguousarray(self.ids_NT, dtype=np.int32)}
        if self.segments_NT is not None:
            tensors["segments"] = np.ascontiguousarray(self.segments_NT, dtype=np.int32)
        with atomic_file(path) as temporary:
            save_file(tensors, temporary)

    @classmethod
    def load(cls, path: str | Path) -> Sequences:
        """Read what `save` wrote."""
        try:
            tensors = load_file(path)
            return cls(tensors["ids"], tensors.get("segments"))
        except (SafetensorError, OSError, KeyError) as error:
            raise GossamerError(
                f"{path} is not a whole file of token sequences ({error}); copy it or make it again."
            ) from error


def pack(documents: Iterable[list[int]], length: int, *, bos: int | None, limit: int | None = None) -> Sequences:
    """Fill sequences of `length` tokens with documents one after the other, each a segment of its own.

    Every piece of a document begins with the BOS token, if there is one. Tokens that do not fill a last sequence are
    dropped; with `limit`, reading stops after that many sequences.
    """
    prefix = [] if bos is None else [bos]
    rows: list[list[int]] = []
    segments: list[list[int]] = []
    row: list[int] = []
    segment: list[int] = []
    for document in documents:
        start = 0
        while start < len(document):
            room = length - len(row) - len(prefix)
            piece = prefix + document[start : start + room]
            number = segment[-1] + 1 if segment else 0
            row, segment = row + piece, segment + [number] * len(piece)
            start += room
            if len(row) == length:
                rows.append(row)
                segments.append(segment)
                row, segment = [], []
                if len(rows) == limit:
                    return _sequences(rows, segments)
    return _sequences(rows, segments) if rows else Sequences(np.empty((0, length), dtype=np.int64))


def _sequences(rows: list[list[int]], segments: list[list[int]]) -> Sequences:
    segments_NT = np.array(segments)
    return Sequences(np.array(rows), segments_NT if segments_NT.any() else None)
