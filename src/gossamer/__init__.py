"""Gossamer: which attention edges does a language model need, and what do they do?

    import gossamer as gs

    dense = gs.load("bundled/dense")
    sparse = gs.sparsify(dense, text="self", slack=0.01, out="runs/mine")

Names are looked up on first use, so `import gossamer` costs nothing: torch is loaded when a model is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import attention, attribution, circuits, corpus, figures, maps, models, patterns, tasks, transcoders
    from .attention import GateConfig, sampled_gates
    from .attention.tape import tape
    from .compare import compare
    from .errors import GossamerError
    from .evaluate import SparsityReport, evaluate
    from .models import LoadedModel, gate
    from .models.load import load
    from .sparsify import SparsifyConfig, resume, sparsify

__version__ = "0.1.0"

_ROOMS = (
    "attention",
    "attribution",
    "circuits",
    "compare",
    "corpus",
    "evaluate",
    "figures",
    "maps",
    "models",
    "patterns",
    "sparsify",
    "tasks",
    "transcoders",
)
_HOME = {
    "GateConfig": "gossamer.attention",
    "GossamerError": "gossamer.errors",
    "LoadedModel": "gossamer.models",
    "SparsifyConfig": "gossamer.sparsify",
    "SparsityReport": "gossamer.evaluate",
    "gate": "gossamer.models",
    "load": "gossamer.models",
    "resume": "gossamer.sparsify",
    "sampled_gates": "gossamer.attention",
    "tape": "gossamer.attention",
}

__all__ = [
    "GateConfig",
    "GossamerError",
    "LoadedModel",
    "SparsifyConfig",
    "SparsityReport",
    "__version__",
    "attention",
    "attribution",
    "circuits",
    "compare",
    "corpus",
    "evaluate",
    "figures",
    "gate",
    "load",
    "maps",
    "models",
    "patterns",
    "resume",
    "sampled_gates",
    "sparsify",
    "tape",
    "tasks",
    "transcoders",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"gossamer.{name}")
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    from gossamer.errors import nearest

    raise AttributeError(f"module 'gossamer' has no attribute {name!r}.{nearest(name, __all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
