"""A comparison as sections of a report.

Whoever adds a result to `Comparison` adds a function here and a line to `TITLES` and `PARTS`: the command, the page and
the demonstration show what is in these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from gossamer.cli.attribution_tables import heads_table, hop_in_words, task_table
from gossamer.cli.circuit_report import circuit_table
from gossamer.cli.console import percent
from gossamer.cli.pattern_sections import MEASURES, RELATED, Pictures, capture_note, counted, nearest_table, shown
from gossamer.cli.report import Section, TableData

if TYPE_CHECKING:
    from gossamer.circuits.effect import Estimate
    from gossamer.compare import Comparison
    from gossamer.patterns.change import Change

TITLES = {
    "circuits": "What the task needs",
    "attribution": "Which heads carry the answer",
    "maps": "Attention maps",
    "patterns": "Patterns",
    "statistics": "What changed",
    "relations": "Which heads do the same",
}
LEVELS = (0.5, 0.8, 0.9, 0.95)
LISTED, NAMED = 12, 6


def sections(pair: Comparison, pictures: Pictures | None = None) -> dict[str, Section]:
    """Every part of a comparison; with pictures, if they were drawn."""
    return {name: part(pair, pictures or {}) for name, part in PARTS.items()}


def _circuits(pair: Comparison, pictures: Pictures) -> Section:
    baselines = [f"{side.model}: {side.heads.curve.baseline.describe()}." for side in pair.sides.values()]
    whole = pair.circuits is not None
    tables = [_head_sizes(pair), _head_names(pair)]
    if pair.circuits is not None:
        tables.append(circuit_table(pair.circuits.table()))
    return Section(
        title=TITLES["circuits"],
        paragraphs=[
            f"The task is {pair.task}: {pair.description}. A circuit is kept and everything outside it is replaced at "
            "once by what it is on a corrupt prompt; the head grid shows the smallest circuits that explain "
            f"{pair.level:.0%}.",
            *(pair.circuits.notes() if pair.circuits is not None else baselines),
        ],
        tables=tables,
        pictures=shown(pictures, "head-grid", *(("circuits", "attention-edges") if whole else ()), *_HEAD_CURVES),
        numbers={role: {"heads": _names(pair.circuit(role))} for role in pair.sides},
    )


_HEAD_CURVES = ("heads-dense", "heads-sparse")


def _head_sizes(pair: Comparison) -> TableData:
    from gossamer.circuits.effect import size_ratio

    rows = []
    for level in LEVELS:
        curves = [side.heads.curve for side in pair.sides.values()]
        sizes = [_estimate(curve.smallest_estimate(level)) for curve in curves]
        rows.append([percent(level, digits=0), *sizes, _estimate(size_ratio(curves[0], curves[1], level), digits=1)])
    names = pair.names
    total = pair.dense.heads.curve.total
    return TableData(f"Heads needed, of {total}, with 95 % intervals", ["explained", *names, "ratio"], rows)


def _estimate(found: Estimate | None, *, digits: int = 0) -> str:
    if found is None:
        return "–"
    return f"{found.value:,.{digits}f} [{found.low:,.{digits}f}, {found.high:,.{digits}f}]"


def _head_names(pair: Comparison) -> TableData:
    rows = []
    for model, role in zip(pair.names, pair.sides, strict=True):
        names = _names(pair.circuit(role))
        listed = ", ".join(names[:LISTED]) + (f", … ({len(names)} in all)" if len(names) > LISTED else "")
        rows.append([model, listed or "the level is not reached"])
    return TableData("The heads, most important first", ["model", "heads"], rows, words=2)


def _names(heads: list[tuple[int, int]]) -> list[str]:
    from gossamer.maps import head_name

    return [head_name(*head) for head in heads]


def _attribution(pair: Comparison, pictures: Pictures) -> Section:
    found = pair.attribution
    if found is None:
        return Section(
            title=TITLES["attribution"],
            paragraphs=[f"Answers were not attributed: {pair.not_attributed}"],
            numbers={"left out": pair.not_attributed},
        )
    return Section(
        title=TITLES["attribution"],
        paragraphs=[*hop_in_words(found.example), *(f"Left out: {why}" for why in found.skipped)],
        tables=[heads_table(found.example), task_table(found)],
        pictures=shown(pictures, "attribution"),
        numbers=found.to_dict(),
    )


def _maps(pair: Comparison, pictures: Pictures) -> Section:
    return Section(
        title=TITLES["maps"],
        paragraphs=[f"Of {pair.prompts}.", *(capture_note(side.maps) for side in pair.sides.values())],
        pictures=shown(pictures, "before-after", "density-dense", "density-sparse", "every-head"),
        numbers={role: {"density": side.maps.density()} for role, side in pair.sides.items()},
    )


def _patterns(pair: Comparison, pictures: Pictures) -> Section:
    counts = [side.report.counts() for side in pair.sides.values()]
    labels = list(dict.fromkeys(label for found in counts for label in found))
    rows = [[label, *(str(found.get(label, 0)) for found in counts)] for label in labels]
    return Section(
        title=TITLES["patterns"],
        paragraphs=["Every head's label, by the same definitions and thresholds in both models."],
        tables=[TableData("Heads by pattern", ["pattern", *pair.names], rows)],
        pictures=shown(pictures, "transitions", "gallery-dense", "gallery-sparse"),
        numbers={role: side.report.counts() for role, side in pair.sides.items()},
    )


def _statistics(pair: Comparison, pictures: Pictures) -> Section:
    from gossamer.patterns.plain import plain

    found = pair.statistics
    statements = [[one.statement, one.answer, one.why] for one in found.statements]
    changes = [_change(words, found.change(name)) for name, words in MEASURES.items()]
    header = ["", "dense", "sparse", "change, 95 % interval", "heads changed"]
    return Section(
        title=TITLES["statistics"],
        paragraphs=[
            "A head counts as changed if its p is below 0.05 after correction for all heads; the unit is the prompt."
        ],
        tables=[
            TableData("Statements", ["statement", "answer", "because"], statements, words=3),
            TableData("Means over heads, prompts and tokens", header, changes),
        ],
        pictures=shown(pictures, "statistics"),
        numbers={"statements": plain(found.statements)},
    )


def _change(words: str, change: Change) -> list[str]:
    changed = f"{int(change.significant.sum())} of {change.p.size}" if change.can_tell else "too few prompts to tell"
    interval = "–" if math.isnan(change.all_low) else f"[{change.all_low:+.3g}, {change.all_high:+.3g}]"
    means = ("–" if math.isnan(mean) else f"{mean:.3g}" for mean in (change.all_dense, change.all_sparse))
    return [words, *means, interval, changed]


def _relations(pair: Comparison, pictures: Pictures) -> Section:
    import numpy as np

    from gossamer.compare.pictures import alive_first

    own = pair.relations.dense_to_sparse()
    known = own[~np.isnan(own)]
    kept = (
        f"{np.median(known):.2f} (median over {counted(len(known), 'head')})"
        if len(known)
        else "undefined for every head"
    )
    circuit = pair.circuit("sparse") or alive_first(pair)
    tables = [nearest_table(pair.relations.of_model(role), _names(circuit[:NAMED])) for role in (0, 1)]
    return Section(
        title=TITLES["relations"],
        paragraphs=[
            RELATED,
            f"A dense head against its own sparse self: {kept}. For {counted(len(own) - len(known), 'head')} there is"
            " nothing to compare: no edge, or the same weight on every edge.",
        ],
        tables=tables,
        pictures=shown(pictures, "scatter-matrix"),
        numbers={"dense against sparse, median": float(np.median(known)) if len(known) else None},
    )


PARTS: Mapping[str, Callable[[Comparison, Pictures], Section]] = {
    "circuits": _circuits,
    "attribution": _attribution,
    "maps": _maps,
    "patterns": _patterns,
    "statistics": _statistics,
    "relations": _relations,
}
