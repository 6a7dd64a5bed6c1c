"""Everything that is read off the maps of one model, together: labels, statistics, relations; saved as one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gossamer.files import atomic_folder
from gossamer.maps import AttentionMaps
from gossamer.patterns.relations import Relations, relate
from gossamer.patterns.statistics import HeadStatistics, measure
from gossamer.patterns.taxonomy import PatternReport, Thresholds, classify

MAPS, REPORT, STATISTICS, RELATIONS = "maps", "patterns.json", "statistics.json", "relations.safetensors"


@dataclass(frozen=True, eq=False)
class ModelPatterns:
    """One model on some prompts."""

    maps: AttentionMaps
    report: PatternReport
    statistics: HeadStatistics
    relations: Relations

    @property
    def model(self) -> str:
        """The model's name."""
        return self.maps.model

    def clearest(self) -> list[tuple[int, int]]:
        """The clearest head of every class that occurs; heads without an open edge are left out."""
        heads = [self.report.heads_of(label)[0] for label in self.report.counts()]
        return [head for head in heads if not self.statistics.dead[head]]

    def save(self, folder: str | Path) -> Path:
        """Write a folder: the maps, and each result in a file of its own."""
        with atomic_folder(folder) as temporary:
            self.maps.save(temporary / MAPS)
            self.report.save(temporary / REPORT)
            self.statistics.save(temporary / STATISTICS)
            self.relations.save(temporary / RELATIONS)
        return Path(folder)

    @classmethod
    def load(cls, folder: str | Path) -> ModelPatterns:
        """Read what `save` wrote."""
        folder = Path(folder)
        return cls(
            maps=AttentionMaps.load(folder / MAPS),
            report=PatternReport.load(folder / REPORT),
            statistics=HeadStatistics.load(folder / STATISTICS),
            relations=Relations.load(folder / RELATIONS),
        )


def read_patterns(
    maps: AttentionMaps, *, thresholds: Thresholds | None = None, position_removed: bool = False
) -> ModelPatterns:
    """Labels, statistics and relations of all heads of one model."""
    return ModelPatterns(
        maps=maps,
        report=classify(maps, thresholds),
        statistics=measure(maps),
        relations=relate(maps, position_removed=position_removed),
    )
