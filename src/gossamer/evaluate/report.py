"""The result of an evaluation, as plain data: JSON in, JSON out, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.evaluate.plain import from_plain, to_plain
from gossamer.files import read_json, write_json

FORMAT = "gossamer sparsity report"
VERSION = 1

PerHead = tuple[tuple[float | None, ...], ...]  # [layer][head]; None where the figure has no meaning


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class TextUsed:
    """What the figures were measured on."""

    name: str
    sequences: int
    length: int
    tokens: int
    fingerprint: str


@dataclass(frozen=True)
class Provenance:
    """What made this report: each model with its gate and the hash of its weights, the text, seed and version."""

    gossamer: str
    models: dict[str, dict[str, Any]]
    text: TextUsed
    seed: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class Density:
    """Open edges, counted over all layers and heads, against four yardsticks."""

    of_causal_pairs: float
    of_document_pairs: float
    per_query_and_head: float
    per_token: float
    open_edges: int


@dataclass(frozen=True)
class ModelScore:
    """One model on the text. `difference` is its loss minus the dense model's; `divergence` is KL(dense || model)."""

    role: str
    name: str
    loss: Estimate
    perplexity: float
    difference: Estimate
    divergence: Estimate
    gain_kept: Estimate | None
    density: Density | None


@dataclass(frozen=True)
class TaskScore:
    """One model on one task. `answer_loss` is minus the log of the probability of the right answers together."""

    task: str
    role: str
    prompts: int
    chance: float
    accuracy: Estimate
    answer_loss: float


@dataclass(frozen=True)
class RowUse:
    """What attention rows look like, averaged over queries, for all heads together or for each.

    First-token mass: weight on the first token of the query's document, before the gate (softmax) and after it (what
    is carried). Entropy, in nats: of the softmax, and of what is carried after scaling it to one, empty rows left out.
    """

    first_before: float
    first_after: float
    first_uniform: float
    entropy_before: float
    entropy_after: float | None
    entropy_uniform: float
    entropy_uniform_after: float | None
    carried: float
    empty_rows: float

    @property
    def first_excess(self) -> tuple[float, float]:
        """First-token mass before and after the gate, minus that of uniform attention."""
        return self.first_before - self.first_uniform, self.first_after - self.first_uniform

    @property
    def entropy_excess(self) -> tuple[float, float | None]:
        """Entropy before and after the gate, minus that of uniform attention over the same rows."""
        before = self.entropy_before - self.entropy_uniform
        if self.entropy_after is None or self.entropy_uniform_after is None:
            return before, None
        return before, self.entropy_after - self.entropy_uniform_after


@dataclass(frozen=True)
class HeadTable:
    """Figures per layer and head of one model."""

    role: str
    rows: RowUse
    open_edges: PerHead
    of_causal_pairs: PerHead
    first_before: PerHead
    first_after: PerHead
    entropy_before: PerHead
    entropy_after: PerHead
    carried: PerHead

    @property
    def dead_heads(self) -> tuple[tuple[int, int], ...]:
        """Heads (layer, head) without a single open edge on the text."""
        return tuple(
            (layer, head) for layer, row in enumerate(self.open_edges) for head, count in enumerate(row) if count == 0
        )


@dataclass(frozen=True)
class Shift:
    """Both models on text of another kind: losses, their paired difference, and the sparse model's density."""

    name: str
    what: str
    text: TextUsed
    dense_loss: float
    sparse_loss: float
    control_loss: float | None
    difference: Estimate
    divergence: float
    density: Density


@dataclass(frozen=True)
class BaselinePoint:
    """One setting of a baseline: its loss minus the dense model's on the same sequences."""

    setting: float
    of_causal_pairs: float
    per_token: float
    difference: float


@dataclass(frozen=True)
class Baseline:
    """A way to cut edges of the dense model without training.

    `at_sparse_loss` is the sparsest setting whose loss is at most the sparse model's, `at_slack` the same for the
    report's slack; None if no setting reaches that. `at_sparse_density` has at least the sparse model's density.
    """

    name: str
    what: str
    curve: tuple[BaselinePoint, ...]
    at_sparse_loss: BaselinePoint | None
    at_slack: BaselinePoint | None
    at_sparse_density: BaselinePoint


@dataclass(frozen=True)
class Baselines:
    """Baselines, and the sparse model on the very same sequences."""

    sequences: int
    slack: float
    sparse: BaselinePoint
    each: tuple[Baseline, ...]


@dataclass(frozen=True)
class Flips:
    """Edges that opened or shut when the same text was computed in another way."""

    name: str
    what: str
    pairs: int
    open_before: int
    opened: int
    shut: int
    largest_margin_flipped: float | None
    largest_logit_change: float
    divergence: float

    @property
    def flipped(self) -> int:
        """Edges that changed."""
        return self.opened + self.shut

    @property
    def of_pairs(self) -> float:
        """Changed edges among allowed pairs."""
        return self.flipped / self.pairs

    @property
    def of_open(self) -> float:
        """Changed edges for each edge that was open."""
        return self.flipped / max(self.open_before, 1)


@dataclass(frozen=True)
class MarginAudit:
    """How far gate logits are from zero, and what flips. Bin k of the histogram: edges[k] <= |g| < edges[k + 1]."""

    sequences: int
    edges: tuple[float, ...]
    open_counts: tuple[int, ...]
    shut_counts: tuple[int, ...]
    pairs: int
    flips: tuple[Flips, ...]

    def closer_than(self, margin: float) -> float:
        """Share of allowed pairs in the bins below `margin`."""
        near = [
            opened + shut
            for upper, opened, shut in zip(self.edges[1:], self.open_counts, self.shut_counts, strict=True)
            if upper <= margin * (1 + 1e-9)
        ]
        return sum(near) / self.pairs


@dataclass(frozen=True)
class SparsityReport:
    """Everything `evaluate` found out about a pair of models."""

    provenance: Provenance
    scores: tuple[ModelScore, ...]
    tasks: tuple[TaskScore, ...]
    heads: tuple[HeadTable, ...]
    shifts: tuple[Shift, ...]
    baselines: Baselines | None
    margins: MarginAudit | None
    skipped: tuple[str, ...]

    def score(self, role: str) -> ModelScore:
        """The score of `dense`, `sparse`, `control`, `without attention`, or another role of this report."""
        return _by_role(self.scores, role, "score")

    def head_table(self, role: str) -> HeadTable:
        """The per-head figures of `dense` or `sparse`."""
        return _by_role(self.heads, role, "head table")

    def has(self, role: str) -> bool:
        """Whether this report scores that role."""
        return any(score.role == role for score in self.scores)

    @property
    def density(self) -> Density:
        """The sparse model's density."""
        density = self.score("sparse").density
        assert density is not None
        return density

    @property
    def above_control(self) -> float | None:
        """The sparse model's loss minus the dense control's; None without a control."""
        if not self.has("control"):
            return None
        return self.score("sparse").loss.value - self.score("control").loss.value

    def task(self, task: str, role: str) -> TaskScore:
        """One model on one task."""
        for score in self.tasks:
            if (score.task, score.role) == (task, role):
                return score
        raise GossamerError(f"This report does not score {role!r} on the task {task!r}.")

    @property
    def task_names(self) -> tuple[str, ...]:
        """The tasks that were measured."""
        return tuple(dict.fromkeys(score.task for score in self.tasks))

    @property
    def roles(self) -> tuple[str, ...]:
        """The models that were scored, in order."""
        return tuple(score.role for score in self.scores)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": FORMAT, "version": VERSION, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "the report") -> SparsityReport:
        """Read `to_dict`'s form; an unknown field or version is refused."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise GossamerError(f"{where} is not a sparsity report; give the report.json that gossamer evaluate wrote.")
        if data.get("version") != VERSION:
            raise GossamerError(
                f"{where} is a report of version {data.get('version')!r} and only version {VERSION} is understood; "
                "evaluate again with this gossamer."
            )
        rest = {name: value for name, value in data.items() if name not in ("format", "version")}
        return from_plain(cls, rest, where=where)

    def save(self, path: str | Path) -> Path:
        """Write JSON, atomically."""
        write_json(path, self.to_dict())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> SparsityReport:
        """Read what `save` wrote."""
        return cls.from_dict(read_json(path), where=str(path))


def _by_role(entries: tuple[Any, ...], role: str, what: str) -> Any:
    for entry in entries:
        if entry.role == role:
            return entry
    known = ", ".join(entry.role for entry in entries)
    raise GossamerError(f"This report has no {what} for {role!r}, only for {known}.")
