"""What is read off one model's maps, as sections of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gossamer.cli.console import percent
from gossamer.cli.report import Picture, Section, TableData

if TYPE_CHECKING:
    from gossamer.maps import AttentionMaps
    from gossamer.patterns.reading import ModelPatterns
    from gossamer.patterns.relations import Relations

Pictures = Mapping[str, Picture]
EXAMPLES, NEAREST, LEAST_EDGES = 5, 3, 10
RELATED = (
    "Pearson correlation of weights over the edges that at least one of the two heads has, whose number stands in"
    f" brackets; fewer than {LEAST_EDGES} are not shown."
)
MEASURES = {
    "first_excess_before": "first-token mass above even attention, before the gate",
    "first_excess": "the same, carried",
    "carried": "mass a row carries",
    "entropy": "row entropy, nats",
    "effective_keys_before": "effective number of keys, before the gate",
    "effective_keys": "effective number of keys",
    "peak": "largest weight of a row",
    "intensity": "mean weight of an open edge",
    "diagonal": "share at distance 0 or 1",
    "wash": "overlap with even attention",
    "distance": "mean distance, tokens",
    "open_per_query": "open edges a query",
}


def sections(found: ModelPatterns, pictures: Pictures | None = None) -> dict[str, Section]:
    """Maps, patterns, relations; with pictures, if they were drawn."""
    from gossamer.maps import head_name

    pictures = pictures or {}
    return {
        "maps": Section(
            title="Attention maps",
            paragraphs=[capture_note(found.maps)],
            tables=[_measures(found)],
            pictures=shown(pictures, "head-grid", "density"),
            numbers={"density": found.maps.density(), "mass below the floor": found.maps.mass_below_floor()},
        ),
        "patterns": Section(
            title="Patterns",
            paragraphs=["Scores are shares of carried mass above what even attention would give, from 0 to 1."],
            tables=[_labels(found)],
            pictures=shown(pictures, "gallery"),
            numbers={"labels": found.report.counts()},
        ),
        "relations": Section(
            title="Which heads do the same",
            paragraphs=[RELATED],
            tables=[nearest_table(found.relations, [head_name(*head) for head in found.clearest()])],
            pictures=shown(pictures, "scatter-matrix"),
        ),
    }


def counted(n: int, what: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def shown(pictures: Pictures, *names: str) -> list[Picture]:
    """Those of the pictures that exist."""
    return [pictures[name] for name in names if name in pictures]


def capture_note(maps: AttentionMaps) -> str:
    """How much was captured, and what the floor left out."""
    lengths = sorted(set(maps.lengths))
    tokens = counted(lengths[0], "token") if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    note = (
        f"{maps.model}: {counted(maps.n_prompts, 'prompt')} of {tokens}, "
        f"{counted(len(maps.heads), 'head')}, {counted(maps.n_edges, 'edge')} kept; "
        f"{percent(maps.density(), digits=2)} of allowed pairs are open"
    )
    if not maps.floor:
        return note + "."
    return (
        note + f", {percent(maps.mass_below_floor(), digits=2)} of all mass lies on edges lighter than {maps.floor:g}."
    )


def _measures(found: ModelPatterns) -> TableData:
    import numpy as np

    rows = []
    for name, words in MEASURES.items():
        mean_LH = found.statistics.mean(name)
        known = mean_LH[~np.isnan(mean_LH)]
        ends = (known.mean(), known.min(), known.max()) if len(known) else ()
        rows.append([words, *(f"{value:.3g}" for value in ends)] if len(known) else [words, "–", "–", "–"])
    return TableData("Means over prompts and tokens", ["", "all heads", "lowest head", "highest head"], rows)


def _labels(found: ModelPatterns) -> TableData:
    rows = []
    for label, number in found.report.counts().items():
        heads = found.report.heads_of(label)[:EXAMPLES]
        examples = ", ".join(found.report.describe(*head) for head in heads)
        rows.append([label, examples + (", …" if number > len(heads) else ""), str(number)])
    return TableData("Heads by pattern, clearest first", ["pattern", "heads", "number"], rows, words=2)


def nearest_table(relations: Relations, names: Sequence[str], *, model: int = 0) -> TableData:
    """For some heads of a model, the heads most like each, and on how many edges that rests."""
    rows = []
    for name in names:
        head = relations.index(name, model)
        near = [
            f"{relations.names[other]} {value:.2f} ({counted(n_edges, 'edge')})"
            for other, value in relations.nearest_heads(head, n=len(relations.names))
            if (n_edges := relations.n_compared(head, other)) >= LEAST_EDGES
        ]
        rows.append([name, ", ".join(near[:NEAREST]) or "none"])
    return TableData(f"Nearest heads in {relations.models[model]}", ["head", "most like it"], rows, words=2)
