from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from gossamer.cli.report import Picture, Report, Sample, Section, TableData
from gossamer.figures.style import save_figure

NASTY = '<script>alert("x")</script> & </pre>'


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    return save_figure(Figure(figsize=(1, 1)), tmp_path / "source" / "square.png")


class Page(HTMLParser):
    """Collects tags, link targets and visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data


def nasty_report(picture: Path) -> Report:
    section = Section(
        title=NASTY,
        paragraphs=[NASTY],
        tables=[TableData(NASTY, [NASTY, "n"], [[NASTY, 1]])],
        pictures=[Picture(picture, NASTY)],
        samples=[Sample(NASTY, NASTY)],
        numbers={"share": 0.25, "name": NASTY},
    )
    return Report(NASTY, NASTY, {"first": section})


def test_every_text_is_escaped(picture: Path) -> None:
    page = Page(nasty_report(picture).html())
    assert "script" not in page.tags
    # page title, heading, introduction, contents, section, paragraph, caption, th, td, figcaption, label, sample
    assert page.text.count(NASTY) == 12


def test_the_page_needs_nothing_from_outside(picture: Path) -> None:
    page = Page(nasty_report(picture).html())
    assert page.addresses
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.addresses)


def test_a_written_report_is_complete(picture: Path, tmp_path: Path) -> None:
    page = nasty_report(picture).write(tmp_path / "report")
    assert sorted(path.name for path in page.parent.iterdir()) == ["index.html", "numbers.json", "square.png"]
    assert (page.parent / "square.png").read_bytes() == picture.read_bytes()
    assert json.loads((page.parent / "numbers.json").read_text("utf-8"))["first"] == {"share": 0.25, "name": NASTY}


def test_without_its_pictures_there_is_no_page(tmp_path: Path) -> None:
    report = Report("t", "i", {"first": Section("s", pictures=[Picture(tmp_path / "absent.png", "")])})
    with pytest.raises(FileNotFoundError):
        report.write(tmp_path / "report")
    assert not (tmp_path / "report" / "index.html").exists()
