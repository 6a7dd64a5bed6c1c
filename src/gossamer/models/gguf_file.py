"""The GGUF container: header, metadata and tensors, read straight off the bytes (everything little-endian).

"GGUF", version u32, number of tensors u64, number of metadata entries u64
metadata: key, type u32, value                 strings and arrays carry their length as u64
tensors:  name, rank u32, sizes u64 (fastest first), type u32, offset u64 from the aligned end of this list
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.errors import GossamerError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_RANK = 4


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufFile:
    """Metadata by key, and tensors dequantised to float32 one at a time."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as stream:
                self._bytes = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            self._position = 0
            self._read_header()
        except (OSError, ValueError, struct.error, KeyError) as error:
            raise GossamerError(
                f"{self.path} is not a whole GGUF file ({error or type(error).__name__}); copy or download it again."
            ) from error

    def _read_header(self) -> None:
        magic, version, n_tensors, n_fields = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        self.fields = {self._string(): self._value(self._unpack("I")[0]) for _ in range(n_fields)}
        self._entries = [self._tensor_entry() for _ in range(n_tensors)]
        alignment = int(self.fields.get("general.alignment", 32))
        self._data_start = -(-self._position // alignment) * alignment
        for entry in self._entries:
            if self._data_start + entry.offset + self._n_bytes(entry) > len(self._bytes):
                raise ValueError(f"it ends before its tensor {entry.name!r}")

    @property
    def architecture(self) -> str:
        """The model family that the file names."""
        return str(self.fields.get("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata under `key`, or `default`."""
        return self.fields.get(key, default)

    def size(self, key: str, default: Any = None) -> Any:
        """The metadata under `<architecture>.<key>`; without a default it must be there."""
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise GossamerError(f"{self.path} does not give {self.architecture}.{key}; convert the model again.")
        return value

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by name, in float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        for entry in self._entries:
            start = self._data_start + entry.offset
            raw = np.frombuffer(self._bytes, np.uint8, self._n_bytes(entry), start)
            kind = GGMLQuantizationType(entry.kind)
            if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
                values = raw.view(np.float32 if kind == GGMLQuantizationType.F32 else np.float16).astype(np.float32)
            else:
                values = dequantize(raw.reshape(*entry.shape[:-1], -1), kind)
            yield entry.name, torch.from_numpy(values.reshape(entry.shape))

    def _n_bytes(self, entry: TensorEntry) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
        return int(np.prod(entry.shape)) // block * size

    def _tensor_entry(self) -> TensorEntry:
        name = self._string()
        (rank,) = self._unpack("I")
        if rank > _MAX_RANK:
            raise ValueError(f"its tensor {name!r} has {rank} dimensions")
        sizes = self._unpack(f"{rank}Q")
        kind, offset = self._unpack("IQ")
        return TensorEntry(name, tuple(reversed(sizes)), kind, offset)

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._unpack(_SCALARS[kind])[0]
        inner, length = self._unpack("IQ")
        if length > len(self._bytes):
            raise ValueError("it ends inside a list")
        if inner in _SCALARS:
            return list(self._unpack(f"{length}{_SCALARS[inner]}"))
        return [self._value(inner) for _ in range(length)]

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        start, self._position = self._position, self._position + length
        if self._position > len(self._bytes):
            raise ValueError("it ends inside a text")
        return self._bytes[start : self._position].decode("utf-8")

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._bytes, self._position)
        self._position += struct.calcsize("<" + layout)
        return values
