"""A task's prompts, one by one: how many heads of the dense and of the sparse model carry the answer's hop?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from gossamer.attribution.hops import SHARE, Hop
from gossamer.attribution.pair import AttributedPair, TranscoderPair, attribute
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.tasks import Task

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class PromptHeads:
    """One prompt: its hop, and for each measure the heads of the dense and of the sparse model.

    `error_shares` are those of the graphs, by model; empty without transcoders.
    """

    prompt: str
    answer: str
    hop: Hop
    key_token: str
    dense_hop: Hop
    dense: dict[str, int]
    sparse: dict[str, int]
    signed_shares: dict[str, tuple[float, float]]
    error_shares: dict[str, float]


@dataclass(frozen=True, eq=False)
class TaskHeads(Stored):
    """Heads for a share of the answer's hop over the prompts of a task; `skipped` says which were left out, and why.

    `example` is the first prompt's attribution in full.
    """

    FORMAT: ClassVar[str] = "gossamer heads of hops"

    task: str
    share: float
    rows: tuple[PromptHeads, ...]
    skipped: tuple[str, ...]
    example: AttributedPair
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def measures(self) -> list[str]:
        """What was measured on every prompt."""
        return list(self.rows[0].dense)

    def medians(self, measure: str) -> tuple[float, float, float]:
        """Heads of the dense model, of the sparse one, and the prompts' ratios dense to sparse: medians.

        A prompt on which no head of the sparse model carries anything has no ratio.
        """
        dense_N = np.array([row.dense[measure] for row in self.rows])
        sparse_N = np.array([row.sparse[measure] for row in self.rows])
        some_N = sparse_N > 0
        ratio = float(np.median(dense_N[some_N] / sparse_N[some_N])) if some_N.any() else float("nan")
        return float(np.median(dense_N)), float(np.median(sparse_N)), ratio

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        medians = {
            name: dict(zip(("dense", "sparse", "ratio"), self.medians(name), strict=True)) for name in self.measures
        }
        rows = [
            {
                "prompt": row.prompt,
                "answer": row.answer,
                "hop": [row.hop.key, row.hop.query],
                "key token": row.key_token,
                "dense model's hop": [row.dense_hop.key, row.dense_hop.query],
                "dense": row.dense,
                "sparse": row.sparse,
                "signed shares": row.signed_shares,
                "error nodes' shares": row.error_shares,
            }
            for row in self.rows
        ]
        return {"task": self.task, "share": self.share, "medians": medians, "prompts": rows, "skipped": self.skipped}


def attribute_task(
    dense: LoadedModel,
    sparse: LoadedModel,
    task: Task,
    *,
    n: int | None = None,
    share: float = SHARE,
    transcoders: TranscoderPair | None = None,
    tell: Tell | None = None,
) -> TaskHeads:
    """The heads of both models on the answer's hop of every prompt of a task, or of its first `n`."""
    examples = task.pairs[:n]
    rows, skipped, first = [], [], None
    for number, example in enumerate(examples):
        try:
            pair = attribute(dense, sparse, example.clean, example.answers[0], share=share, transcoders=transcoders)
            rows.append(_row(pair))
            first = first or pair
        except GossamerError as unsuitable:
            skipped.append(f"{example.clean!r}: {unsuitable}")
        if tell is not None:
            tell(number + 1, len(examples))
    if first is None:
        raise GossamerError(
            f"None of the {len(examples)} prompts of {task.name} can be attributed; the first: {skipped[0]}"
        )
    about = {"dense": dense.provenance(), "sparse": sparse.provenance(), "seed": task.seed, "prompts": len(examples)}
    return TaskHeads(task.name, share, tuple(rows), tuple(skipped), first, about)


def _row(pair: AttributedPair) -> PromptHeads:
    tokens = pair.sparse.tokens
    found = {name: (pair.carriers("dense", name), pair.carriers("sparse", name)) for name in pair.measures}
    return PromptHeads(
        tokens.prompt.text,
        tokens.target.text,
        pair.hop,
        tokens.prompt.tokens[pair.hop.key],
        pair.dense.tokens.answer_hop,
        {name: len(dense) for name, (dense, _) in found.items()},
        {name: len(sparse) for name, (_, sparse) in found.items()},
        {name: (dense.signed_share, sparse.signed_share) for name, (dense, sparse) in found.items()},
        {
            one.tokens.model: one.features.graph.scores.error_share
            for one in (pair.dense, pair.sparse)
            if one.features is not None
        },
    )
