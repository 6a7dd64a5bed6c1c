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
from gossamer.files import atomic_folder, sha256
from gossamer.maps import AttentionMaps
from gossamer.patterns.change import PairStatistics
from gossamer.patterns.plain import load_plain, save_plain
from gossamer.patterns.relations import Relations
from gossamer.patterns.taxonomy import PatternReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KIND = "comparison"
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


@dataclass(frozen=True)
class _About:
    """What `comparison.json` holds; the other results are files of their own, each with its digest here."""

    task: str
    description: str
    prompts: str
    level: float
    not_attributed: str
    provenance: Mapping[str, Any]
    has_circuits: bool
    has_attribution: bool
    digests: Mapping[str, str]


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
            save_plain(self._about(_digests(temporary)), temporary / ABOUT, kind=KIND)
        return Path(folder)

    def _about(self, digests: Mapping[str, str]) -> _About:
        return _About(
            **{name: getattr(self, name) for name in _PLAIN},
            has_circuits=self.circuits is not None,
            has_attribution=self.attribution is not None,
            digests=digests,
        )

    @classmethod
    def load(cls, folder: str | Path) -> Comparison:
        """Read what `save` wrote; another version, or a file that has changed since, is refused."""
        folder = Path(folder)
        about = load_plain(_About, folder / ABOUT, kind=KIND)
        _require_unchanged(folder, about.digests)
        return cls(
            **{name: getattr(about, name) for name in _PLAIN},
            dense=Side.load(folder / "dense"),
            sparse=Side.load(folder / "sparse"),
            statistics=PairStatistics.load(folder / "statistics.json"),
            relations=Relations.load(folder / "relations.safetensors"),
            circuits=CircuitComparison.load(folder / CIRCUITS) if about.has_circuits else None,
            attribution=TaskHeads.load(folder / ATTRIBUTION) if about.has_attribution else None,
        )


_PLAIN = ("task", "description", "prompts", "level", "not_attributed", "provenance")


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its path there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): sha256(path) for path in paths}


def _require_unchanged(folder: Path, digests: Mapping[str, str]) -> None:
    for name, digest in digests.items():
        if not (folder / name).is_file():
            raise GossamerError(f"{folder / name} is missing; compare the models again.")
        if sha256(folder / name) != digest:
            raise GossamerError(f"{folder / name} is not as it was saved; compare the models again.")
