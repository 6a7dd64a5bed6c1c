"""The taxonomy against labels given by eye beforehand: `python benchmarks/labels_by_eye.py`.

    python benchmarks/labels_by_eye.py                   # agreement, and every disagreement
    python benchmarks/labels_by_eye.py --sheets sheets   # draws the sheets too, that labels are written from

Prompts, heads' seeds, labels and how they came about are in tests/patterns/labelled_by_eye.json. Three counts: the
label is the same (both parts of a hybrid); it is the label or the other candidate noted where the eye hesitated; the
pattern that the eye saw first is among the parts of the label.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gossamer as gs
from gossamer.figures.head_grid import head_grid
from gossamer.figures.style import save_figure
from gossamer.maps import AttentionMaps, parse_head
from gossamer.maps.capture import capture
from gossamer.patterns.taxonomy import PatternReport, classify

LABELS = Path(__file__).parents[1] / "tests" / "patterns" / "labelled_by_eye.json"
A_SHEET = 8


@dataclass(frozen=True)
class Judged:
    """One head: what the eye saw, what else it considered, and what the taxonomy says."""

    head: str
    seen: tuple[str, ...]
    considered: tuple[str, ...]
    found: tuple[str, ...]

    @property
    def same(self) -> bool:
        return set(self.seen) == set(self.found)

    @property
    def same_or_considered(self) -> bool:
        return self.same or set(self.considered) == set(self.found)

    @property
    def first_is_part(self) -> bool:
        return self.seen[0] in self.found

    def __str__(self) -> str:
        considered = f" (or {' + '.join(self.considered)})" if self.considered else ""
        return f"{self.head:>7}  eye: {' + '.join(self.seen)}{considered}  taxonomy: {' + '.join(self.found)}"


def judge(labels: dict[str, Any], report: PatternReport) -> list[Judged]:
    """Every labelled head of one model on one set's prompts."""
    judged = []
    for name, label in labels.items():
        layer, head = parse_head(name)
        found = report.parts[layer][head] or (report.label(layer, head),)
        judged.append(Judged(name, tuple(label["parts"]), tuple(label.get("unsure", ())), found))
    return judged


def draw_sheets(name: str, maps: AttentionMaps, heads: list[tuple[int, int]], folder: Path) -> None:
    """Eight heads a sheet: above on running text, below on the text that repeats."""
    for first in range(0, len(heads), A_SHEET):
        chosen = heads[first : first + A_SHEET]
        panels = [maps.select([prompt]) for prompt in (0, 1)]
        figure = head_grid(panels, heads=[chosen] * 2, titles=["running text", "repeating text"], columns=4)
        figure.set_dpi(260)
        save_figure(figure, folder / f"{name.replace('/', '-')}-{first // A_SHEET}.png")


def say(name: str, judged: list[Judged]) -> None:
    """The three counts, as one line of a table."""
    counts = [sum(getattr(one, what) for one in judged) for what in ("same", "same_or_considered", "first_is_part")]
    print(f"| {name} | {len(judged)} | " + " | ".join(f"{count / len(judged):.0%}" for count in counts) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sheets", type=Path, help="draw the sheets into this folder too")
    parser.add_argument("--set", help="only this set of labels: first or second")
    wanted = parser.parse_args()
    sets = json.loads(LABELS.read_text(encoding="utf-8"))["sets"]
    print("| set, model | heads | same label | same or considered | first pattern is part of it |\n|" + " --- |" * 5)
    others = []
    for part, models in sets.items():
        if wanted.set not in (None, part):
            continue
        judged_here: list[Judged] = []
        for name, about in models.items():
            maps = capture(gs.load(name), about["prompts"])
            if wanted.sheets:
                draw_sheets(f"{part}-{name}", maps, [parse_head(head) for head in about["labels"]], wanted.sheets)
            judged = judge(about["labels"], classify(maps))
            say(f"{part}, {name}", judged)
            judged_here += judged
            others += [f"{part}, {name}", *(str(one) for one in judged if not one.same)]
        say(f"{part}, all", judged_here)
    print("\nOther labels:", *others, sep="\n")


if __name__ == "__main__":
    main()
