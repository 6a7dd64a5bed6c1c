"""Loading models with a word on standard error about what takes so long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.markup import escape

from gossamer.cli.console import err

if TYPE_CHECKING:
    from gossamer.models import LoadedModel


def load_one(name: str) -> LoadedModel:
    """The model of that name."""
    with err.status(f"loading {escape(name)}"):
        from gossamer.models import load

        return load(name)


def load_all(names: Sequence[str]) -> list[LoadedModel]:
    """The models of those names, in order."""
    return [load_one(name) for name in names]
