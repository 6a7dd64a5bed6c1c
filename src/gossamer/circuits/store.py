"""Results on disk: one safetensors file holds the arrays, and in its header the rest as JSON. Strict on the way back.

A result is a frozen dataclass of numbers, text, numpy arrays, tuples and mappings of those, and other such dataclasses,
with two class attributes FORMAT and VERSION.
"""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from gossamer.errors import GossamerError, nearest
from gossamer.files import atomic_file

T = TypeVar("T", bound="Stored")
Arrays = dict[str, np.ndarray]
HEADER = "gossamer"


class Stored:
    """Gives a dataclass `save` and `load`."""

    FORMAT: ClassVar[str]
    VERSION: ClassVar[int] = 1

    def save(self, path: str | Path) -> Path:
        """Write the result to one file, atomically."""
        arrays: Arrays = {}
        content = {"format": self.FORMAT, "version": self.VERSION, "data": _pack(self, "", arrays)}
        with atomic_file(path) as temporary:
            save_file(arrays, temporary, metadata={HEADER: json.dumps(content, ensure_ascii=False)})
        return Path(path)

    @classmethod
    def load(cls: type[T], path: str | Path) -> T:
        """Read what `save` wrote; another format, version or field is refused."""
        content, arrays = _read_file(Path(path))
        if content.get("format") != cls.FORMAT:
            raise GossamerError(f"{path} holds a {content.get('format')}, not a {cls.FORMAT}; load it as what it is.")
        if content.get("version") != cls.VERSION:
            raise GossamerError(
                f"{path} is version {content.get('version')} of a {cls.FORMAT}, this program reads {cls.VERSION};"
                " make it again with this version of gossamer."
            )
        result: T = _unpack(cls, content.get("data"), arrays, str(path))
        return result


def _read_file(path: Path) -> tuple[dict[str, Any], Arrays]:
    try:
        with safe_open(path, framework="numpy") as file:
            header = (file.metadata() or {}).get(HEADER)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (the file is no mapping)
    except (OSError, SafetensorError) as error:
        raise GossamerError(
            f"{path} could not be read as a result ({error}); check that the file is complete."
        ) from error
    if header is None:
        raise GossamerError(
            f"{path} is a safetensors file without a gossamer result in it; give one that gossamer wrote."
        )
    return _header(header, path), arrays


def _header(header: str, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(header)
    except ValueError as error:
        raise GossamerError(f"{path} is damaged: its header is not JSON ({error}); make the result again.") from error
    if not isinstance(content, dict):
        raise GossamerError(f"{path} is damaged: its header is not a mapping; make the result again.")
    return content


def _pack(value: Any, where: str, arrays: Arrays) -> Any:
    """Plain data; arrays go to `arrays` under their dotted names and leave that name behind."""
    if isinstance(value, np.ndarray):
        arrays[where] = np.ascontiguousarray(value)
        return where
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: _pack(part, f"{where}.{name}".lstrip("."), arrays) for name, part in parts.items()}
    if isinstance(value, dict):
        return {str(name): _pack(part, f"{where}.{name}", arrays) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_pack(part, f"{where}.{number}", arrays) for number, part in enumerate(value)]
    assert value is None or isinstance(value, str | bool | int | float), f"{where} is not plain data: {type(value)}"
    return value


def _unpack(kind: Any, data: Any, arrays: Arrays, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return _unpack(kind, data, arrays, where)
    if origin is np.ndarray:
        _require(isinstance(data, str) and data in arrays, "an array of the file", data, where)
        return arrays[data]
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _unpack_dataclass(kind, data, arrays, where)
    if origin is tuple:
        _require(isinstance(data, list), "a list", data, where)
        kinds = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else list(arguments)
        _require(len(kinds) == len(data), f"{len(kinds)} values", data, where)
        return tuple(
            _unpack(k, part, arrays, f"{where}[{i}]") for i, (k, part) in enumerate(zip(kinds, data, strict=True))
        )
    if origin is dict:
        _require(isinstance(data, dict), "a mapping", data, where)
        return {name: _unpack(arguments[1], part, arrays, f"{where}.{name}") for name, part in data.items()}
    if origin is not None:  # a Literal
        _require(data in arguments, f"one of {arguments}", data, where)
        return data
    accepted = (int, float) if kind is float else kind
    _require(isinstance(data, accepted) and (kind is bool or not isinstance(data, bool)), kind.__name__, data, where)
    return kind(data)


def _unpack_dataclass(kind: Any, data: Any, arrays: Arrays, where: str) -> Any:
    _require(isinstance(data, dict), "a mapping", data, where)
    hints = get_type_hints(kind)
    known = {field.name: hints[field.name] for field in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            raise GossamerError(f"{where} has the unknown field {name!r}.{nearest(name, known)}")
    for name in known:
        if name not in data:
            raise GossamerError(f"{where} lacks the field {name!r}; make it again with this version of gossamer.")
    parts = {name: _unpack(known[name], data[name], arrays, f"{where}.{name}") for name in known}
    try:
        return kind(**parts)
    except (AssertionError, ValueError, TypeError, IndexError) as error:  # what a dataclass says of its own parts
        raise GossamerError(f"{where} does not fit together ({error}); the file is damaged.") from error


def _require(fine: bool, wanted: str, data: Any, where: str) -> None:
    if not fine:
        raise GossamerError(f"{where} should be {wanted}, not {data!r:.60}; the file is damaged.")
