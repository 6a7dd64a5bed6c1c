"""Parquet files with a seal: one SHA-256 over every byte of the file, kept in the file's own metadata.

The digest is computed with sixty-four zeros in its place and then written there, so a sealed file is ordinary Parquet
for every other reader, and a flipped byte anywhere (data, statistics, metadata, the seal itself) is noticed by ours.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gossamer.errors import GossamerError
from gossamer.files import atomic_file

_SEAL = b"gossamer.seal"
_ABOUT = b"gossamer"
_EMPTY = b"0" * 64


def write_sealed(
    path: str | Path,
    columns: dict[str, Any],
    about: dict[str, Any],
    *,
    repeated: list[str],
    encodings: dict[str, str],
) -> str:
    """Write columns and the JSON-able `about`, atomically, and return the seal; `repeated` columns get a dictionary."""
    table = pa.table(columns)
    with atomic_file(path) as temporary:
        writer = pq.ParquetWriter(
            temporary,
            table.schema,
            compression="zstd",
            compression_level=6,
            use_dictionary=repeated,
            column_encoding=encodings,
            store_schema=False,
            write_statistics=[name for name in columns if name in repeated],
        )
        with writer:
            writer.write_table(table)
            writer.add_key_value_metadata({_ABOUT: json.dumps(about, ensure_ascii=False).encode(), _SEAL: _EMPTY})
        return _seal(temporary)


def _seal(path: Path) -> str:
    content = bytearray(path.read_bytes())
    start = _seal_position(content)
    assert start is not None
    assert content[start : start + len(_EMPTY)] == _EMPTY
    digest = hashlib.sha256(content).hexdigest()
    with path.open("r+b") as stream:
        stream.seek(start)
        stream.write(digest.encode())
    return digest


def read_sealed(path: str | Path, *, format_name: str, version: int) -> tuple[pa.Table, dict[str, Any], str]:
    """Columns, `about` and seal of a file this version wrote; anything else is refused."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise GossamerError(f"{path} could not be read ({error.strerror}); give the folder that was saved.") from error
    seal = _checked_seal(content, path)
    table = pq.read_table(pa.BufferReader(content))
    about = json.loads(table.schema.metadata[_ABOUT])
    if about.get("format") != format_name:
        raise GossamerError(f"{path} holds {about.get('format')!r}, not {format_name!r}; give the right file.")
    if about.get("version") != version:
        raise GossamerError(
            f"{path} was written in version {about.get('version')} of its format and this gossamer reads version"
            f" {version}; capture the maps again."
        )
    return table, about, seal


def _checked_seal(content: bytes, path: str | Path) -> str:
    start = _seal_position(content)
    if start is None:
        raise GossamerError(f"{path} is damaged or no file of gossamer's (it has no seal); capture the maps again.")
    seal = content[start : start + len(_EMPTY)]
    digest = hashlib.sha256(content[:start])
    digest.update(_EMPTY)
    digest.update(content[start + len(_EMPTY) :])
    if digest.hexdigest().encode() != seal:
        raise GossamerError(f"{path} is damaged: its checksum does not match; capture the maps again.")
    return seal.decode()


def _seal_position(content: bytes | bytearray) -> int | None:
    """Where the digest stands; the seal is the last entry of the metadata, and the footer is the end of the file."""
    key = content.rfind(_SEAL)
    start = content.find(b"\x40", key) + 1 if key >= 0 else 0  # the string's length, 64, precedes it
    return start if 0 < start <= len(content) - len(_EMPTY) else None
