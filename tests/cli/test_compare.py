"""`gossamer patterns`, `compare` and `figure` on a tiny random pair: what they write, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gossamer.cli.comparison_sections import PARTS
from gossamer.compare import Comparison
from gossamer.compare.pictures import OF_A_PAIR, OF_ONE_MODEL
from gossamer.patterns.reading import ModelPatterns

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest
NASTY = "When $x^{$ <script>alert(1)</script>\n\tמי 🦎 & went"


class Page(HTMLParser):
    """Tags and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, pair: tuple[str, str]) -> Path:
    from gossamer.cli.app import run

    folder = tmp_path_factory.mktemp("compare") / "out"
    prompts = ["--prompt", NASTY, "--prompt", "Tom"]
    arguments = ["compare", *pair, "--task", "ioi", "--quick", "--n", "4", "--force", *prompts, "--out", str(folder)]
    assert run(arguments) == 0
    return folder


def test_compare_writes_result_pictures_and_a_page(compared: Path) -> None:
    pair = Comparison.load(compared / "result")
    assert (pair.task, pair.dense.maps.n_prompts) == ("ioi", 2)
    drawn = {path.stem for path in compared.glob("*.svg")}
    assert drawn == {path.stem for path in compared.glob("*.png")} == set(OF_A_PAIR) - {"circuits", "attention-edges"}
    page = Page((compared / "index.html").read_text("utf-8"))
    assert page.tags.count("section") == len(PARTS)
    assert page.tags.count("img") == len(drawn)
    assert "script" not in page.tags
    for statement in pair.statistics.statements:
        assert statement.why in page.text
    numbers = json.loads((compared / "numbers.json").read_text("utf-8"))
    assert numbers["patterns"]["sparse"] == pair.sparse.report.counts()
    assert [one["answer"] for one in numbers["statistics"]["statements"]] == [
        one.answer for one in pair.statistics.statements
    ]


def test_compare_prints_every_part(pair: tuple[str, str], gossamer: Call) -> None:
    tasks = ["--task", "ioi", "--quick", "--n", 4, "--force"]
    shown = gossamer("compare", *pair, *tasks)
    assert shown.code == 0, shown.err
    for title in ("What the task needs", "Attention maps", "Patterns", "What changed", "Which heads do the same"):
        assert title in shown.out
    assert "the sink is gone" in shown.out
    data = json.loads(gossamer("compare", *pair, *tasks, "--json").out)
    assert set(data) == set(PARTS)


def test_compare_with_edges_and_a_text(pair: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    text = ["--text", "language", "--sequences", 3, "--length", 24]
    done = gossamer("compare", *pair, "--task", "ioi", "--n", 4, "--force", *text, "--out", tmp_path)
    assert done.code == 0, done.err
    assert {path.stem for path in tmp_path.glob("*.png")} == set(OF_A_PAIR)
    assert Comparison.load(tmp_path / "result").dense.maps.lengths == (24, 24, 24)
    assert "attention edges a prompt" in done.out


def test_figures_are_drawn_again_from_the_folder(compared: Path, tmp_path: Path, gossamer: Call) -> None:
    listed = gossamer("figure", "list", compared)
    assert listed.out.split() == [name for name in OF_A_PAIR if name not in ("circuits", "attention-edges")]
    for number, name in enumerate(listed.out.split()):
        suffix = (".svg", ".pdf", ".png")[number % 3]
        done = gossamer("figure", name, compared, "--out", tmp_path / f"{name}{suffix}")
        assert done.code == 0, done.err
        assert (tmp_path / f"{name}{suffix}").stat().st_size > 1000
    chosen = tmp_path / "chosen.svg"
    done = gossamer("figure", "head-grid", compared / "result", "--heads", "L1H1", "--edge", "3,1", "--out", chosen)
    assert done.code == 0, done.err
    drawn = chosen.read_text("utf-8")
    assert "L1H1" in drawn
    assert "L0H0" not in drawn
    assert "#c8102e" in drawn  # the red square
    assert "$x^{$ &lt;script" in drawn


def test_patterns_of_one_model(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    done = gossamer("patterns", pair[1], "--prompt", NASTY, "--prompt", "Anna and Tom", "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    found = ModelPatterns.load(tmp_path / "result")
    assert [head["label"] for head in data["heads"]] == [label for row in found.report.labels for label in row]
    assert data["labels"] == found.report.counts()
    assert {path.stem for path in tmp_path.glob("*.png")} <= set(OF_ONE_MODEL)
    page = Page((tmp_path / "index.html").read_text("utf-8"))
    assert "script" not in page.tags
    assert gossamer("figure", "gallery", tmp_path, "--out", tmp_path / "again.pdf").code == 0
    shown = gossamer("patterns", pair[0], "--text", "language", "--sequences", 2, "--length", 16)
    assert "Heads by pattern" in shown.out
    assert "2 prompts of 16 tokens" in " ".join(shown.out.split())


def test_figures_of_an_evaluation(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    small = ["--sequences", 2, "--prompts", 4, "--length", 32, "--quick"]
    assert gossamer("evaluate", *pair, *small, "--out", tmp_path).code == 0
    assert "density-map" in gossamer("figure", "list", tmp_path).out
    assert gossamer("figure", "density-map", tmp_path, "--out", tmp_path / "map.svg").code == 0
    wrong = gossamer("figure", "density-mp", tmp_path)
    assert "Did you mean 'density-map'" in " ".join(wrong.err.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["head-gird"], "Did you mean 'head-grid'"),
        (["head-grid", "--heads", "L9H9"], "There is no head L9H9"),
        (["head-grid", "--heads", "nine"], "is not a head"),
        (["head-grid", "--prompt", 9], "There is no prompt 9"),
        (["head-grid", "--edge", "3"], "write QUERY,KEY"),
        (["head-grid", "--edge", "1,3"], "not in a prompt"),
        (["head-grid", "--out", "grid.jpg"], "not .jpg"),
        (["scatter-matrix", "--measure", "pearsn"], "Did you mean 'pearson'"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(
    arguments: list[object],
    complaint: str,
    compared: Path,
    gossamer: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = gossamer("figure", arguments[0], compared, *arguments[1:])
    assert refused.code == 2
    assert complaint in " ".join(refused.err.split())
    assert not list(tmp_path.iterdir())


def test_other_mistakes(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    for arguments, complaint in (
        (["figure", "head-grid", tmp_path], "holds no result"),
        (["patterns", pair[0]], "Say what the model should read"),
        (["patterns", pair[0], "--prompt", "a", "--text", "language"], "not both"),
        (["patterns", pair[0], "--prompt", "a", "--floor", 2], "The floor is a weight"),
        (["compare", pair[1], pair[0], "--force"], "dense model first"),
        (["compare", *pair, "--task", "cpy"], "Did you mean 'copy'"),
        (["compare", *pair, "--task", "copy", "--quick"], "cannot do copy"),
        (["compare", *pair, "--level", 2], "The level is a share"),
    ):
        refused = gossamer(*arguments)
        assert refused.code == 2, refused.err
        assert complaint in " ".join(refused.err.split())
