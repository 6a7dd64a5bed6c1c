"""The arrows between rooms point one way, and importing the package is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import gossamer

PACKAGE = Path(gossamer.__file__).parent

# Leaves that every room may use.
FOUNDATION = {"errors", "files", "callable_room"}
# What each room may import, besides the foundation and itself (architecture: "down this table uses up").
ALLOWED: dict[str, set[str]] = {
    "attention": set(),
    "models": {"attention"},
    "tasks": {"models"},
    "corpus": {"models", "tasks"},
    "sparsify": {"attention", "models", "tasks", "corpus"},
    "evaluate": {"attention", "models", "tasks", "corpus", "sparsify"},
    "maps": {"attention", "models", "corpus"},
    "patterns": {"maps"},
    "circuits": {"attention", "models", "tasks"},
    "transcoders": {"models", "corpus"},
    "attribution": {"attention", "models", "tasks", "corpus", "maps", "circuits", "transcoders"},
    "figures": {"evaluate"},  # for types only: figures take results
}
# Allowed inside a function, and for its types, only: results draw their own pictures; figures uses no room, so nothing
# goes round.
ON_DEMAND: dict[str, set[str]] = {"sparsify": {"figures"}, "attribution": {"figures"}}
# Rooms that take results and never make them: for type checking they may name any room.
TAKES_RESULTS = {"figures", "explorer"}
ALLOWED["compare"] = set(ALLOWED)
ALLOWED["explorer"] = set(ALLOWED)
ALLOWED["cli"] = set(ALLOWED)

When = Literal["at once", "on demand", "types"]
Import = tuple[str, When]  # dotted name, and when it is loaded: with the module, in a function, or never


def imports_of(module: Path) -> Iterator[Import]:
    """Every import of a module, relative ones resolved."""
    package = ("gossamer", *module.relative_to(PACKAGE).parent.parts)

    def visit(node: ast.AST, when: When) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            stem = ".".join(part for part in (base, node.module or "") if part)
            yield from ((f"{stem}.{alias.name}", when) for alias in node.names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            when = "on demand"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when = "types"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(module.read_text(encoding="utf-8")), "at once")


def modules(room: str = "") -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def rooms() -> list[str]:
    return sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


def rooms_used_by(room: str) -> dict[str, str]:
    """The other rooms that a room imports, each with one module that does so."""
    used = {}
    for module in modules(room):
        for name, when in imports_of(module):
            parts = name.split(".")
            on_demand = when != "at once" and parts[1:2] and parts[1] in ON_DEMAND.get(room, ())
            if on_demand or (when == "types" and room in TAKES_RESULTS):
                continue
            if parts[0] == "gossamer" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir():
                used[parts[1]] = str(module.relative_to(PACKAGE))
    used.pop(room, None)
    return used


def test_every_room_is_in_the_table() -> None:
    assert set(rooms()) <= set(ALLOWED)


@pytest.mark.parametrize("room", rooms())
def test_rooms_import_upwards_only(room: str) -> None:
    wrong = {used: where for used, where in rooms_used_by(room).items() if used not in ALLOWED[room]}
    assert not wrong, f"{room} must not use {wrong}"


def test_the_foundation_uses_no_room() -> None:
    for name in FOUNDATION:
        imported = [name for name, _ in imports_of(PACKAGE / f"{name}.py")]
        assert not [name for name in imported if name.startswith("gossamer.") and name.split(".")[1] not in FOUNDATION]


def test_the_check_sees_a_wrong_arrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the test: imports inside functions and relative ones count too."""
    (tmp_path / "attention").mkdir()
    (tmp_path / "sparsify").mkdir()
    (tmp_path / "attention" / "gates.py").write_text("def f():\n    from ..sparsify import trainer\n", encoding="utf-8")
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert rooms_used_by("attention") == {"sparsify": "attention/gates.py"}


@pytest.mark.parametrize("room", [room for room in ("figures", "explorer", "patterns") if room in rooms()])
def test_rooms_that_never_import_torch(room: str) -> None:
    heavy = {"torch", "transformers", "accelerate"}
    for module in modules(room):
        assert not [name for name, _ in imports_of(module) if name.split(".")[0] in heavy], module


@pytest.mark.parametrize("room", ["cli"])
def test_rooms_that_load_torch_only_on_demand(room: str) -> None:
    heavy = {"torch", "transformers", "accelerate", "matplotlib", "datasets"}
    for module in modules(room):
        assert not [name for name, when in imports_of(module) if when == "at once" and name.split(".")[0] in heavy], (
            module
        )


def test_nothing_in_the_library_prints() -> None:
    """Ruff says so too; this also catches a `# noqa`."""
    for module in modules():
        calls = [node.func for node in ast.walk(ast.parse(module.read_text("utf-8"))) if isinstance(node, ast.Call)]
        assert not [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"], module


def test_no_module_executes_pickles() -> None:
    for module in modules():
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            assert called not in {"pickle.load", "pickle.loads", "pickle.Unpickler", "joblib.load"}, module
            if called == "torch.load":
                assert "weights_only=True" in ast.unparse(node), module


def loaded_after(statement: str) -> set[str]:
    """The top-level modules in memory after a statement in a fresh interpreter."""
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join(name for name in sys.modules if '.' not in name))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement", ["import gossamer", "import gossamer.cli", "from gossamer.cli.app import build; build()"]
)
def test_importing_is_light(statement: str) -> None:
    loaded = loaded_after(statement)
    assert "gossamer" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "matplotlib", "datasets"}


def test_importing_figures_does_not_load_torch() -> None:
    loaded = loaded_after("import gossamer.figures.style")
    assert "matplotlib" in loaded
    assert "torch" not in loaded
