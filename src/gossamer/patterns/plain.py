"""Results as files: a kind, a version, the dataclass's fields.

As JSON arrays are lists and undefined numbers null; a path that ends in `.safetensors` keeps whole arrays as such, and
the rest as JSON in the file's header.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gossamer.errors import GossamerError, nearest
from gossamer.files import atomic_file, read_json, write_json

VERSION = 1
ARRAYS, HEADER = ".safetensors", "gossamer"
T = TypeVar("T")


def save_plain(result: Any, path: str | Path, *, kind: str) -> Path:
    """Write a frozen dataclass of plain data."""
    about = {"format": f"gossamer {kind}", "version": VERSION}
    if Path(path).suffix != ARRAYS:
        write_json(path, about | plain(result))
        return Path(path)
    parts = {part.name: getattr(result, part.name) for part in dataclasses.fields(result)}
    arrays = {name: np.ascontiguousarray(value) for name, value in parts.items() if isinstance(value, np.ndarray)}
    about |= {name: plain(value) for name, value in parts.items() if name not in arrays}
    with atomic_file(path) as temporary:
        save_file(arrays, temporary, metadata={HEADER: json.dumps(about, ensure_ascii=False)})
    return Path(path)


def plain(value: Any) -> Any:
    """Dataclasses as mappings, arrays and tuples as lists, NaN as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {part.name: plain(getattr(value, part.name)) for part in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and math.isnan(value) else value


def load_plain(kind_of: type[T], path: str | Path, *, kind: str) -> T:
    """Read what `save_plain` wrote; another kind, version or field is refused."""
    data = read_json(path) if Path(path).suffix != ARRAYS else _read_arrays(path)
    if not isinstance(data, dict) or data.get("format") != f"gossamer {kind}":
        raise GossamerError(f"{path} is not a gossamer {kind}; give a file that gossamer wrote as one.")
    if data.get("version") != VERSION:
        raise GossamerError(f"{path} has version {data.get('version')!r}, not {VERSION}; make it again.")
    del data["format"], data["version"]
    result: T = build(kind_of, data, str(path))
    return result


def _read_arrays(path: str | Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            about = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            return about | {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise GossamerError(f"{path} could not be read ({error}); check that the file is complete.") from error


def build(kind_of: Any, data: Any, where: str) -> Any:
    """A dataclass from its mapping."""
    known = get_type_hints(kind_of)
    _require(isinstance(data, Mapping), where)
    for name in data:
        if name not in known:
            raise GossamerError(f"{where} has the unknown field {name!r}.{nearest(name, known)}")
    if missing := [name for name in known if name not in data]:
        raise GossamerError(f"{where} lacks the field {missing[0]!r}; make it again.")
    return kind_of(**{name: _read(known[name], data[name], f"{where}: {name}") for name in known})


def _read(kind_of: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind_of) and isinstance(kind_of, type):
        return build(kind_of, value, where)
    arguments, origin = get_args(kind_of), get_origin(kind_of) or kind_of
    if value is None and kind_of is float:
        return math.nan
    if origin in _STORED_AS:
        _require(isinstance(value, _STORED_AS[origin]) and (kind_of is bool or not isinstance(value, bool)), where)
    if "ndarray" in str(kind_of):
        return (
            {name: _array(item, where) for name, item in value.items()} if origin is Mapping else _array(value, where)
        )
    if origin is tuple and isinstance(arguments[0], type) and dataclasses.is_dataclass(arguments[0]):
        return tuple(build(arguments[0], item, where) for item in value)
    return _tuples(value)


_STORED_AS: dict[Any, Any] = {str: str, bool: bool, int: int, float: (int, float), Mapping: dict, tuple: list}


def _require(good: bool, where: str) -> None:
    if not good:
        raise GossamerError(f"{where} is damaged: that is no value for it; make it again.")


def _array(value: Any, where: str) -> Any:
    """Numbers, or truths; None among them is NaN."""
    _require(isinstance(value, list | np.ndarray), where)
    try:
        found = np.array(value)
        found = found.astype(float) if found.dtype == object else found
    except (ValueError, TypeError):  # rows of different lengths, or something that is no number
        found = np.array("")
    _require(found.dtype.kind in "biuf", where)
    return found


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
