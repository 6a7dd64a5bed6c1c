"""Loading models with a word on standard error about what takes so long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from gossamer.cli.console import err

if TYPE_CHECKING:
    from gossamer.models import LoadedModel


AUTO = "auto"
DEVICE_HELP = "Where to compute: cpu, cuda, cuda:1; auto is cuda where there is one."


def load_one(name: str, *, device: str = "cpu", **more: Any) -> LoadedModel:
    """The model of that name; `more` is for `gossamer.load`."""
    with err.status(f"loading {escape(name)}"):
        from gossamer.models import load

        return load(name, device=chosen_device(device), **more)


def load_all(names: Sequence[str], *, device: str = "cpu") -> list[LoadedModel]:
    """The models of those names, in order."""
    return [load_one(name, device=device) for name in names]


def chosen_device(asked: str) -> str:
    """`auto` as what it means on this machine."""
    if asked != AUTO:
        return asked
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
