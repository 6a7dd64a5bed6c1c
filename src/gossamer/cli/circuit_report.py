"""What `gossamer circuits` prints and writes: tables, the definitions in use, files and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.cli.console import percent
from gossamer.cli.report import TableData
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.circuits.comparison import Comparison, Row
    from gossamer.circuits.effect import Estimate
    from gossamer.circuits.smallest import HeadCircuits

SHOWN_HEADS = 10


def require_folder(folder: Path) -> None:
    """Make the folder that results go to, before any work is done for them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GossamerError(
            f"{folder} cannot be a folder for results ({error.strerror}); give another --out."
        ) from None


def save_comparison(found: Comparison, folder: Path) -> None:
    """Everything about a comparison: its numbers, and a picture a task."""
    from gossamer.cli.figure import draw_all

    save_numbers(found, folder)
    draw_all(found, folder)


def save_numbers(found: Comparison, folder: Path) -> None:
    """The reloadable result, the same as JSON, and the table as text."""
    from gossamer.files import atomic_file, write_json

    found.save(folder / "circuits.safetensors")
    write_json(folder / "circuits.json", found.to_dict())
    data = circuit_table(found.table())
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (data.header, ["---"] * len(data.header), *data.rows)]
    with atomic_file(folder / "table.md") as temporary:
        temporary.write_text("\n".join([*lines, "", *found.notes(), ""]), encoding="utf-8")


def circuit_table(rows: list[Row]) -> TableData:
    """One line for each level, unit and task."""
    written = [
        [
            percent(row.level, digits=0),
            row.unit,
            f"{row.task} but {', '.join(row.missing)}" if row.missing else row.task,
            *(_size(getattr(row, role), with_none=role in row.with_none) for role in ("dense", "sparse")),
            _ratio(row),
        ]
        for row in rows
    ]
    header = ["level", "unit", "task", "dense", "sparse", "ratio"]
    return TableData("Smallest circuits, with 95 % intervals over prompts", header, written, words=3)


def _size(found: Estimate | None, *, with_none: bool = False) -> str:
    if found is None:
        return "reached with none" if with_none else "–"
    return f"{found.value:,.0f} [{found.low:,.0f}, {found.high:,.0f}]"


def _ratio(row: Row) -> str:
    found = row.ratio
    if found is None:
        return "–"
    return f"{found.value:.1f}× [{found.low:.1f}, {found.high:.1f}]" + (" (weak)" if row.is_weak else "")


def grid_of_pair(dense: str, sparse: str) -> str:
    """How the heads of these circuits are looked at; their patterns are not recorded here."""
    return f"head grid of these circuits: gossamer compare {dense} {sparse} --task TASK --out comparison"


def grid_of_one(model: str, circuits: HeadCircuits) -> str:
    """The same for one model, with its heads by name."""
    heads = circuits.circuit() or circuits.order[:SHOWN_HEADS]
    names = ",".join(f"L{layer}H{head}" for layer, head in heads)
    recorded = f"gossamer patterns {model} --text self --out patterns"
    return f"head grid of these heads: {recorded}, then gossamer figure head-grid patterns --heads {names}"


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
    flips, gates = circuits.effects.gate_flips
    rules = [f"{curve.unit}, " + "; ".join(map(": ".join, curve.rule.items())) for curve in circuits.curves]
    return [
        "in brackets: 95 % intervals over prompts",
        f"{len(circuits.curve.baseline.clean_N)} prompts; {circuits.curve.baseline.describe()}",
        f"leading heads, effect: {leading}",
        circuits.summary(),
        *([f"{flips:,} of {gates:,} gates flipped by rounding in restarted runs"] if gates else []),
        *rules,
    ]
