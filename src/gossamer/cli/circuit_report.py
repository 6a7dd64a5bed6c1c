"""What `gossamer circuits` prints and writes: tables, the definitions in use, files and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli.console import percent
from gossamer.cli.report import TableData

if TYPE_CHECKING:
    from gossamer.circuits.comparison import Comparison, Row
    from gossamer.circuits.effect import Estimate
    from gossamer.circuits.smallest import HeadCircuits

SHOWN_HEADS = 10


def save_comparison(found: Comparison, folder: Path) -> None:
    """The reloadable result, the same as JSON, the table as text, and a picture a task."""
    from gossamer.cli.figure import draw_all
    from gossamer.files import atomic_file, write_json

    folder.mkdir(parents=True, exist_ok=True)
    found.save(folder / "circuits.safetensors")
    write_json(folder / "circuits.json", found.to_dict())
    data = circuit_table(found.table())
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (data.header, ["---"] * len(data.header), *data.rows)]
    with atomic_file(folder / "table.md") as temporary:
        temporary.write_text("\n".join([*lines, "", *found.notes(), ""]), encoding="utf-8")
    draw_all(found, folder)


def circuit_table(rows: list[Row]) -> TableData:
    """One line for each level, unit and task."""
    written = [
        [percent(row.level, digits=0), row.unit, row.task, _size(row.dense), _size(row.sparse), _ratio(row)]
        for row in rows
    ]
    header = ["level", "unit", "task", "dense", "sparse", "ratio"]
    return TableData("Smallest circuits, with 95 % intervals over prompts", header, written, words=3)


def _size(found: Estimate | None) -> str:
    return "–" if found is None else f"{found.value:,.0f} [{found.low:,.0f}, {found.high:,.0f}]"


def _ratio(row: Row) -> str:
    found = row.ratio
    if found is None:
        return "–"
    return f"{found.value:.1f}× [{found.low:.1f}, {found.high:.1f}]" + (" (weak)" if row.is_weak else "")


def save_heads(name: str, circuits: HeadCircuits, folder: Path) -> None:
    """Of one task the reloadable result, the same as JSON, and a picture."""
    from gossamer.figures.curves import head_circuits
    from gossamer.figures.style import save_figure
    from gossamer.files import write_json

    folder.mkdir(parents=True, exist_ok=True)
    circuits.save(folder / f"{name}.safetensors")
    write_json(folder / f"{name}.json", circuits.to_dict())
    figure = head_circuits(circuits)
    for suffix in ("png", "svg"):
        save_figure(figure, folder / f"{name}.{suffix}")


def head_table(name: str, circuits: HeadCircuits) -> TableData:
    """One line for each level."""
    from gossamer.circuits.smallest import table

    rows = table(circuits)
    header = list(rows[0])
    written = [[percent(row["level"], digits=0), *(_size(row[unit]) for unit in header[1:])] for row in rows]
    return TableData(f"{name}: smallest circuits", header, written, words=1)


def head_lines(circuits: HeadCircuits) -> list[str]:
    """The leading heads with their effects, and what stands beside the curves."""
    leading = ", ".join(
        f"L{layer}H{head} {circuits.effects.interval(layer, head)}" for layer, head in circuits.order[:SHOWN_HEADS]
    )
    rules = [f"{curve.unit}, " + "; ".join(map(": ".join, curve.rule.items())) for curve in circuits.curves]
    return [
        "in brackets: 95 % intervals over prompts",
        f"{len(circuits.curve.baseline.clean_N)} prompts; {circuits.curve.baseline.describe()}",
        f"leading heads, effect: {leading}",
        *rules,
    ]
