"""The README's Python runs, and its commands exist with the options it gives them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from gossamer.cli.app import COMMANDS, build
from gossamer.models import FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall((ROOT / page).read_text(encoding="utf-8")) if kind == language]


def command_lines(page: str) -> list[str]:
    joined = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [line.split("#")[0].strip() for line in joined.splitlines() if line.strip() and not line.startswith("#")]


def parse(line: str) -> Any:
    """Let the command line parse an invocation without running it; a wrong option raises."""
    _, name, *arguments = shlex.split(line)
    group: Any = get_command(build())
    return group.commands[name].make_context(name, arguments)


def test_the_readme_has_python_and_commands() -> None:
    assert blocks("README.md", "python")
    assert any(line.startswith("gossamer ") for line in command_lines("README.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    for number, code in enumerate(blocks(page, "python"), start=1):
        exec(compile(code, f"{page}, block {number}", "exec"), namespace)


@pytest.mark.parametrize("line", [line for page in PAGES for line in command_lines(page)])
def test_commands_exist(line: str) -> None:
    if line.startswith("make "):
        assert re.search(rf"^{line.split()[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE), line
    elif line.startswith("gossamer "):
        assert parse(line).params
    else:
        assert line.startswith(("pip install", "git clone", "cd ")), f"a command this test cannot check: {line}"


def test_the_check_refuses_unknown_options() -> None:
    with pytest.raises(Exception, match="--no-such-option"):
        parse("gossamer models --no-such-option")


def test_every_command_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [name for name in COMMANDS if f"gossamer {name}" not in text]


def test_pictures_of_the_readme_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert pictures
    assert not [picture for picture in pictures if not (ROOT / picture).is_file()]


def test_the_readme_names_every_family() -> None:
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("**Fourteen families**")[1].splitlines()[0]
    spelled = {"Qwen": 2, "SmolLM3": 1, "OLMo 1 to 3": 3, "Gemma 1 to 3": 3}
    spelled |= dict.fromkeys(("GPT-2", "GPT-NeoX", "Llama", "Mistral", "Phi-3"), 1)
    assert all(name in table for name in spelled)
    assert sum(spelled.values()) == len(FAMILIES) == 14


PLACEHOLDER = re.compile(r"@@\w+@@")


def test_nothing_is_left_to_be_filled_in() -> None:
    """What is still to be measured is written as `@@NAME@@`, anywhere in a line."""
    pages = [*(ROOT / page for page in PAGES), *ROOT.glob("recipes/*/README.md"), *ROOT.glob("src/**/README.md")]
    left = [
        f"{page.relative_to(ROOT)}: {found}"
        for page in pages
        for found in PLACEHOLDER.findall(page.read_text(encoding="utf-8"))
    ]
    assert not left
