"""A report is a list of sections; it is shown in the terminal and written as one self-contained page.

The page asks nothing of the network: pictures are embedded, styles are inline, every text is escaped.
"""

from __future__ import annotations

import base64
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from gossamer import __version__
from gossamer.files import atomic_file, write_json

_STYLE = """
:root { color-scheme: light; --ink: #1d2733; --faint: #e4e8ec; --deep: #0b4f6c; --quiet: #5d6b7a; }
* { box-sizing: border-box; }
body { font: 16px/1.55 system-ui, sans-serif; color: var(--ink); background: #fff; max-width: 60rem; margin: 0 auto;
  padding: 2.5rem 1.25rem 5rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; letter-spacing: -.01em; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--faint); }
p { max-width: 46rem; margin: .5rem 0; }
nav { margin: 1.25rem 0; display: flex; flex-wrap: wrap; gap: .35rem 1.1rem; }
a { color: var(--deep); }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding-bottom: .35rem; }
th, td { padding: .28rem .9rem .28rem 0; text-align: right; border-bottom: 1px solid var(--faint);
  white-space: nowrap; vertical-align: top; }
.word { text-align: left; }
td.word + td.word { white-space: normal; }
th { color: var(--quiet); font-weight: 500; }
pre { background: #f5f7f8; border-left: 3px solid var(--deep); padding: .7rem .9rem; white-space: pre-wrap;
  overflow-wrap: anywhere; font: .87rem/1.5 ui-monospace, monospace; }
figure { margin: 1.25rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption, footer, .label { color: var(--quiet); font-size: .88rem; }
footer { margin-top: 4rem; border-top: 1px solid var(--faint); padding-top: 1rem; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class TableData:
    """A table as plain data: the first `words` columns hold words, the others numbers already written out."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    words: int = 1


@dataclass(frozen=True)
class Picture:
    """A PNG file and what there is to see in it."""

    path: Path
    caption: str


@dataclass(frozen=True)
class Sample:
    """Text as a model wrote it, under a label."""

    label: str
    text: str


@dataclass(frozen=True)
class Section:
    """One part of a report; `numbers` is what a program would want of it."""

    title: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[TableData] = ()
    pictures: Sequence[Picture] = ()
    samples: Sequence[Sample] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Named sections under a title; `data` is the file beside the page that holds its numbers."""

    title: str
    introduction: str
    sections: Mapping[str, Section]
    data: str = "numbers.json"

    def write(self, folder: str | Path, numbers: Any = None) -> Path:
        """Write the data (the sections' numbers unless given), pictures and, last, `index.html`; return its path."""
        folder = Path(folder)
        for section in self.sections.values():
            for picture in section.pictures:
                _copy(picture.path, folder / picture.path.name)
        write_json(folder / self.data, self.numbers() if numbers is None else numbers)
        page = folder / "index.html"
        with atomic_file(page) as temporary:
            temporary.write_text(self.html(), encoding="utf-8")
        return page

    def numbers(self) -> dict[str, Any]:
        """Every section's numbers under its name, and what made them."""
        made_with = {"gossamer": __version__, "python": platform.python_version()}
        return made_with | {name: dict(section.numbers) for name, section in self.sections.items()}

    def html(self) -> str:
        """The page, complete in itself."""
        links = "".join(f'<a href="#{escape(name)}">{escape(part.title)}</a>' for name, part in self.sections.items())
        parts = "".join(_section(name, part) for name, part in self.sections.items())
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
            f"<header><h1>{escape(self.title)}</h1><p>{escape(self.introduction)}</p></header>\n"
            f'<nav aria-label="Contents">{links}</nav>\n<main>{parts}</main>\n'
            f"<footer>Gossamer {escape(__version__)}. {escape(self.data)} holds the numbers of this page.</footer>\n"
            "</body>\n</html>\n"
        )


def _section(name: str, section: Section) -> str:
    parts = [f"<p>{escape(paragraph)}</p>" for paragraph in section.paragraphs]
    parts += [_table(data) for data in section.tables]
    parts += [_figure(picture) for picture in section.pictures]
    parts += [f'<p class="label">{escape(text.label)}</p><pre>{escape(text.text)}</pre>' for text in section.samples]
    return f'\n<section id="{escape(name)}">\n<h2>{escape(section.title)}</h2>\n' + "\n".join(parts) + "\n</section>"


def _table(data: TableData) -> str:
    def row(cells: Sequence[object], tag: str) -> str:
        kinds = ("word" if column < data.words else "number" for column in range(len(cells)))
        written = (
            f'<{tag} class="{kind}">{escape(str(cell))}</{tag}>' for kind, cell in zip(kinds, cells, strict=True)
        )
        return f"<tr>{''.join(written)}</tr>"

    return (
        f'<div class="wide"><table><caption>{escape(data.title)}</caption>'
        f"<thead>{row(data.header, 'th')}</thead><tbody>{''.join(row(cells, 'td') for cells in data.rows)}</tbody>"
        "</table></div>"
    )


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    caption = escape(picture.caption)
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )


def _copy(source: Path, target: Path) -> None:
    if source.resolve() != target.resolve():
        with atomic_file(target) as temporary:
            temporary.write_bytes(source.read_bytes())
