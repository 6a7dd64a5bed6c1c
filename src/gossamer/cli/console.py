"""Where the command line writes: results to standard output, progress and complaints to standard error."""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from gossamer.cli.report import Section, TableData

INTERRUPTED = 130  # the exit code of a command that was stopped with Ctrl-C

WIDTH_ELSEWHERE = 120  # in a file or a pipe, where nobody says how wide a line may be


def _width(*, terminal: bool) -> int | None:
    return None if terminal or "COLUMNS" in os.environ else WIDTH_ELSEWHERE


out = Console(highlight=False, width=_width(terminal=sys.stdout.isatty()))
err = Console(stderr=True, highlight=False, width=_width(terminal=sys.stderr.isatty()))


def say(text: str) -> None:
    """One line of plain text on standard output."""
    out.print(escape(text))


def say_json(data: Any) -> None:
    """Machine-readable results: JSON alone on standard output."""
    out.out(json.dumps(data, indent=2, ensure_ascii=False), highlight=False)


def show_table(data: TableData) -> None:
    """A quiet table on standard output."""
    result = Table(title=escape(data.title), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column, name in enumerate(data.header):
        justify: Literal["left", "right"] = "left" if column < data.words else "right"
        result.add_column(escape(name), justify=justify, header_style="dim", no_wrap=column == 0)
    for row in data.rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    out.print(result)


def show_section(section: Section) -> None:
    """A section of a report, in the terminal."""
    for paragraph in section.paragraphs:
        say(paragraph)
    for data in section.tables:
        out.print()
        show_table(data)
    for sample in section.samples:
        out.print(f"\n[dim]{escape(sample.label)}[/]\n{escape(sample.text)}")
    out.print()


def percent(share: float, *, digits: int = 1) -> str:
    """0.9981 as `99.8 %`."""
    return f"{100 * share:.{digits}f} %"


def progress() -> Progress:
    """A bar on standard error that is gone when the work is done."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    )
