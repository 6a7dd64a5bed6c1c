"""Frozen dataclasses to plain data and back, strictly: what is not known is refused, never ignored."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gossamer.errors import GossamerError, nearest

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Dataclasses as mappings, tuples as lists; everything else must be plain already."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): to_plain(item) for name, item in value.items()}
    assert value is None or isinstance(value, str | bool | int | float), f"{type(value).__name__} is not plain data"
    return value


def from_plain(kind: type[T], data: Any, *, where: str) -> T:
    """An instance of the dataclass `kind` from what `to_plain` made of one; `where` names the source in errors."""
    result: T = _read(kind, data, where)
    return result


def _read(kind: Any, data: Any, where: str) -> Any:
    if kind is Any:
        return data
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, data, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        (other,) = [argument for argument in arguments if argument is not type(None)]
        return _read(other, data, where)
    if origin is tuple:
        _require(isinstance(data, list), "a list", data, where)
        return tuple(_read(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(data))
    if origin is dict:
        _require(isinstance(data, dict), "a mapping", data, where)
        return {name: _read(arguments[1], item, f"{where}.{name}") for name, item in data.items()}
    accepted = (int, float) if kind is float else kind
    _require(isinstance(data, accepted) and (kind is bool or not isinstance(data, bool)), kind.__name__, data, where)
    return kind(data)


def _read_dataclass(kind: Any, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), "a mapping", data, where)
    fields = get_type_hints(kind)
    for name in data:
        if name not in fields:
            raise GossamerError(f"{where} has the unknown field {name!r}.{nearest(name, fields)}")
    for name in fields:
        if name not in data:
            raise GossamerError(f"{where} lacks the field {name!r}; write it again with this version of gossamer.")
    return kind(**{name: _read(fields[name], data[name], f"{where}.{name}") for name in fields})


def _require(fine: bool, wanted: str, data: Any, where: str) -> None:
    if not fine:
        raise GossamerError(f"{where} should be {wanted}, not {data!r:.60}; the file is damaged.")
