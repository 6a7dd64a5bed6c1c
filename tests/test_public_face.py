from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import gossamer as gs
from gossamer.callable_room import make_callable


def test_every_public_name_exists() -> None:
    for name in gs.__all__:
        assert getattr(gs, name) is not None, name


def test_dir_lists_the_public_names() -> None:
    assert dir(gs) == sorted(gs.__all__)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'sparsify'"):
        _ = gs.sparsfy


def test_verbs_that_are_also_rooms_can_be_called_and_imported_from() -> None:
    from gossamer.sparsify import sparsify

    assert isinstance(gs.sparsify, ModuleType)
    assert callable(gs.sparsify)
    assert gs.sparsify.__wrapped__ is sparsify


def test_a_callable_room_passes_arguments_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    room = ModuleType("room")
    room.verb = lambda *args, **kwargs: (args, kwargs)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "room", room)
    make_callable("room", "verb")
    assert room(1, x=2) == ((1,), {"x": 2})  # type: ignore[operator]


def test_one_version_everywhere() -> None:
    project = Path(gs.__file__).parents[2]
    citation = (project / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (project / "CHANGELOG.md").read_text(encoding="utf-8")
    assert importlib.metadata.version("gossamer") == gs.__version__
    assert f"version: {gs.__version__}" in citation
    assert f"## {gs.__version__}" in changelog
    assert "dynamic" in tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
