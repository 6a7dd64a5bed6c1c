"""Do a graph's predictions come true? Ablate its clusters in the model, one at a time, over the prompts of tasks.

For each prompt: the graph, pruned, its clusters, the most influential of them. Each is taken away in the model itself,
which gives the measured change of the logit difference, right answers less wrong ones, and is predicted in two ways:

    graph        attention, norms and features' on and off as they were, as in the graph (`predicted_change`)
    replacement  features in the place of MLPs, attention, gates and norms computed anew (`recomputed_change`)

Pairs of (predicted, measured) are pooled over prompts; intervals are 95 % bootstraps over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gossamer.attribution.build import attribution_graph
from gossamer.attribution.clusters import find_clusters
from gossamer.attribution.correlation import spearman
from gossamer.attribution.frozen import freeze
from gossamer.attribution.interventions import (
    ScaleFeatures,
    measured_change,
    predicted_change,
    recomputed_change,
)
from gossamer.attribution.replacement import replace_mlps
from gossamer.circuits.effect import Estimate, Floats, Ints, estimate, resampling_counts
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.tasks import Task
from gossamer.transcoders.module import TranscoderSet

CLUSTERS_PER_PROMPT = 8
FEATURES_PER_GRAPH = 2_000  # in which clusters are looked for; predictions are made with all features
NEGLIGIBLE = 0.01  # of the prompt's own logit difference: smaller predictions have no sign to speak of
Prediction = Literal["graph", "replacement"]
PREDICTIONS: tuple[Prediction, ...] = ("graph", "replacement")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Ablated:
    """A cluster of a prompt, and what its absence does to the prompt's logit difference, `metric` when untouched."""

    task: str
    prompt: str
    label: str
    metric: float
    graph: float
    replacement: float
    measured: float


@dataclass(frozen=True)
class Agreement(Stored):
    """Every ablated cluster of every prompt."""

    FORMAT: ClassVar[str] = "intervention agreement"

    rows: tuple[Ablated, ...]
    provenance: dict[str, Any]

    def predicted_N(self, by: Prediction) -> Floats:
        """The changes predicted by the graph, or by the replacement model."""
        return np.array([row.graph if by == "graph" else row.replacement for row in self.rows])

    @cached_property
    def measured_N(self) -> Floats:
        """The measured changes."""
        return np.array([row.measured for row in self.rows])

    def spearman(self, by: Prediction = "graph") -> Estimate:
        """Rank correlation of predicted and measured changes, all pooled."""
        predicted_N = self.predicted_N(by)
        return self._estimate(lambda rows: spearman(predicted_N[rows], self.measured_N[rows]))

    def counted_N(self, by: Prediction = "graph", negligible: float = NEGLIGIBLE) -> NDArray[np.bool_]:
        """Which predictions are not negligible beside the prompt's own metric."""
        return np.abs(self.predicted_N(by)) >= negligible * np.abs([row.metric for row in self.rows])

    def same_sign(self, by: Prediction = "graph", negligible: float = NEGLIGIBLE) -> Estimate:
        """How often the sign is right, where the prediction is not negligible."""
        counted_N = self.counted_N(by, negligible)
        same_N = np.sign(self.predicted_N(by)) == np.sign(self.measured_N)

        def share(rows: Ints) -> float:
            counted = rows[counted_N[rows]]
            return float(same_N[counted].mean()) if len(counted) else float("nan")

        return self._estimate(share)

    def of_task(self, name: str) -> Agreement:
        """The rows of one task."""
        return Agreement(tuple(row for row in self.rows if row.task == name), self.provenance)

    def _estimate(self, figure: Callable[[Ints], float]) -> Estimate:
        of_prompt: dict[tuple[str, str], list[int]] = {}
        for index, row in enumerate(self.rows):
            of_prompt.setdefault((row.task, row.prompt), []).append(index)
        found = [np.array(indices) for indices in of_prompt.values()]
        samples = []
        for counts in resampling_counts(len(found)).astype(np.int64):
            samples.append(figure(np.concatenate([np.tile(rows, n) for rows, n in zip(found, counts, strict=True)])))
        return estimate(figure(np.arange(len(self.rows))), np.array(samples))


def ablate_clusters(
    model: LoadedModel,
    transcoders: TranscoderSet,
    tasks: Sequence[Task],
    *,
    per_prompt: int = CLUSTERS_PER_PROMPT,
    progress: Progress | None = None,
) -> Agreement:
    """Ablate the most influential clusters of every prompt of these tasks; see the module."""
    transcoders.require_model(model)
    asked = [(task, question) for task in tasks for question in _questions(task)]
    if not asked:
        raise GossamerError("There is no prompt to test predictions on; give at least one task.")
    rows = []
    for number, (task, question) in enumerate(asked):
        replacement = replace_mlps(freeze(model, question.ids_Q), transcoders)
        graph = attribution_graph(replacement, max_features=FEATURES_PER_GRAPH).pruned()
        metric = question.difference(replacement.frozen.logits_V)
        for cluster in find_clusters(graph, replacement).by_share()[:per_prompt]:
            away = ScaleFeatures(cluster.features)
            changes = [change(replacement, away) for change in (predicted_change, recomputed_change, measured_change)]
            differences = [question.difference(change_V) for change_V in changes]
            rows.append(Ablated(task.name, graph.prompt, cluster.label, metric, *differences))
        if progress is not None:
            progress(number + 1, len(asked))
    provenance = {"model": model.provenance(), "transcoders": dict(transcoders.provenance), "per_prompt": per_prompt}
    return Agreement(tuple(rows), provenance)


@dataclass(frozen=True, eq=False)
class _Question:
    """A prompt with its right and wrong next tokens."""

    ids_Q: Tensor
    right: Tensor
    wrong: Tensor

    def difference(self, logits_V: Tensor) -> float:
        """The mean logit of the right tokens less that of the wrong ones."""
        return float(logits_V[self.right].mean() - logits_V[self.wrong].mean())


def _questions(task: Task) -> list[_Question]:
    return [
        _Question(ids_Q, right[right >= 0], wrong[wrong >= 0])
        for batch in task.tokens
        for ids_Q, right, wrong in zip(batch.clean_BT, batch.answers_BA, batch.wrong_BW, strict=True)
    ]
