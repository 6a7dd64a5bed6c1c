"""The result of a comparison: what both models need for a task, and what their heads look like while they do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gossamer.attribution.task_heads import TaskHeads
from gossamer.circuits.compare import Comparison as CircuitComparison
from gossamer.circuits.smallest import HeadCircuits
from gossamer.errors import GossamerError
from gossamer.files import atomic_folder, read_json, write_json
from gossamer.maps import AttentionMaps
from gossamer.patterns.change import PairStatistics
from gossamer.patterns.relations import Relations
from gossamer.patterns.taxonomy import PatternReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT, VERSION = "gossamer comparison", 1
ABOUT, CIRCUITS, ATTRIBUTION = "comparison.json", "circuits.safetensors", "attribution.safetensors"
ROLES = ("dense", "sparse")
Head = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two models: its maps on the prompts, its heads' labels, its heads ranked for the task."""

    maps: AttentionMaps
    report: PatternReport
    heads: HeadCircuits

    @property
    def model(self) -> str:
        """The model's name."""
        return self.maps.model

    def save(self, folder: Path) -> None:
        """Write into a folder."""
        self.maps.save(folder / "maps")
        self.report.save(folder / "patterns.json")
        self.heads.save(folder / "heads.safetensors")

    @classmethod
    def load(cls, folder: Path) -> Side:
        """Read what `save` wrote."""
        return cls(
            AttentionMaps.load(folder / "maps"),
            PatternReport.load(folder / "patterns.json"),
            HeadCircuits.load(folder / "heads.safetensors"),
        )


@dataclass(frozen=True, eq=False)
class Comparison:
    """A dense and a sparse model on one task.

    `circuits` holds edges too, unless only heads were asked for. `attribution` says which heads carry the answer; where
    it was left out or impossible, `not_attributed` says why.
    """

    task: str
    description: str
    prompts: str  # where the maps' prompts come from
    level: float
    dense: Side
    sparse: Side
    statistics: PairStatistics
    relations: Relations  # all heads of both models, the dense ones first
    circuits: CircuitComparison | None = None
    attribution: TaskHeads | None = None
    not_attributed: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sides(self) -> dict[str, Side]:
        """Both models by role."""
        return {"dense": self.dense, "sparse": self.sparse}

    @property
    def names(self) -> list[str]:
        """The dense model's name and the sparse one's, told apart even where both are the same."""
        names = [side.model for side in self.sides.values()]
        return names if names[0] != names[1] else [f"{name} ({role})" for name, role in zip(names, ROLES, strict=True)]

    def circuit(self, role: str, level: float | None = None) -> list[Head]:
        """The heads that a model needs, most important first; empty if the level is never reached."""
        return list(self.sides[role].heads.circuit(self.level if level is None else level))

    def head_grid(self, **options: Any) -> Figure:
        """The picture of the circuits' heads, dense above and sparse below; see `figures.head_grid` for options."""
        from gossamer.compare.pictures import circuit_grid

        return circuit_grid(self, **options)

    def save(self, folder: str | Path) -> Path:
        """Write a folder: each result in a file of its own, maps as Parquet."""
        with atomic_folder(folder) as temporary:
            for role, side in self.sides.items():
                side.save(temporary / role)
            self.statistics.save(temporary / "statistics.json")
            self.relations.save(temporary / "relations.safetensors")
            if self.circuits is not None:
                self.circuits.save(temporary / CIRCUITS)
            if self.attribution is not None:
                self.attribution.save(temporary / ATTRIBUTION)
            write_json(temporary / ABOUT, self._about())
        return Path(folder)

    def _about(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in _PLAIN}
        parts = {"has_circuits": self.circuits is not None, "has_attribution": self.attribution is not None}
        return {"format": FORMAT, "version": VERSION} | parts | plain

    @classmethod
    def load(cls, folder: str | Path) -> Comparison:
        """Read what `save` wrote; another version, or a file that does not belong to it, is refused."""
        folder = Path(folder)
        about = read_json(folder / ABOUT)
        if about.get("format") != FORMAT or about.get("version") != VERSION:
            found = f"{about.get('format')!r} version {about.get('version')!r}"
            raise GossamerError(f"{folder} holds {found}, not {FORMAT!r} version {VERSION}; compare the models again.")
        return cls(
            **{name: about[name] for name in _PLAIN},
            dense=Side.load(folder / "dense"),
            sparse=Side.load(folder / "sparse"),
            statistics=PairStatistics.load(folder / "statistics.json"),
            relations=Relations.load(folder / "relations.safetensors"),
            circuits=CircuitComparison.load(folder / CIRCUITS) if about["has_circuits"] else None,
            attribution=TaskHeads.load(folder / ATTRIBUTION) if about["has_attribution"] else None,
        )


_PLAIN = ("task", "description", "prompts", "level", "not_attributed", "provenance")
