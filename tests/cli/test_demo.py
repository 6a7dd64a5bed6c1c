from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.cli import demo as demo_command
from gossamer.cli.demo import STEPS
from gossamer.cli.report import Section
from gossamer.models.load import BUNDLED, is_at_hand

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest


@pytest.fixture(scope="module")
def small() -> list[object]:
    return ["--prompts", 2, "--steps", 2]


def test_demo_runs_every_step_and_writes_a_page(
    pair: tuple[str, str], small: list[object], tmp_path: Path, gossamer: Call
) -> None:
    done = gossamer("demo", "--dense", pair[0], "--sparse", pair[1], "--out", tmp_path / "demo", *small)
    assert done.code == 0, done.err
    page = (tmp_path / "demo" / "index.html").read_text("utf-8")
    numbers = json.loads((tmp_path / "demo" / "numbers.json").read_text("utf-8"))
    for step in STEPS:
        assert step.title in done.out
        assert f'<section id="{step.name}">' in page
        assert numbers[step.name], f"{step.name} has no numbers"
    receipt = numbers["sparsify"]["receipt"]
    assert receipt["steps"] == 2
    assert f"{receipt['end']['loss']:.4f}" in page
    assert page.count("data:image/png;base64,") >= 3


def test_a_failing_step_leaves_no_page(
    pair: tuple[str, str], small: list[object], tmp_path: Path, gossamer: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.cli import demo
    from gossamer.errors import GossamerError

    def fails(_: object) -> Section:
        raise GossamerError("this step failed.")

    monkeypatch.setattr(demo, "STEPS", (demo.Step("bad", "Bad", fails),))
    done = gossamer("demo", "--dense", pair[0], "--sparse", pair[1], "--out", tmp_path / "demo", *small)
    assert done.code == 2
    assert not (tmp_path / "demo").exists()


def test_demo_is_about_the_bundled_pair_unless_told_otherwise() -> None:
    defaults = {name: option.default for name, option in inspect.signature(demo_command.command).parameters.items()}
    assert (defaults["dense"], defaults["sparse"]) == BUNDLED
    assert all(is_at_hand(name) for name in BUNDLED)
