"""Single attention edges (layer, head, query, key): what shutting one does, and how few suffice.

An edge of a prompt is an allowed pair whose gate is open; in a dense model every causal pair. To shut an edge means to
carry nothing over it: its softmax weight stays in the denominator, its value vector is not added.

    ablation    shut one edge of the clean run, compute everything behind it anew: exact, one row an edge. Where several
                edges carry the same thing, shutting one shows little
    gradient    weight times gradient of the metric in the clean run, gates constant: the first-order estimate of
                m(clean) - m(edge shut), for all edges in one backward pass
    integrated  the same gradient averaged while all weights grow together from zero to their clean values (patterns and
                gates frozen): it sees what is saturated in the clean run
    ranking     by the size of the score unless said otherwise: by the signed score the edges that hold the metric down
                come last, behind the thousands that do nothing, and the curve stays at a level only once all are in

The circuits that keep or cut the best of them are in `attention_curves`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gossamer.attention import tape
from gossamer.attention.edge_gradients import midpoints, record_patterns, weight_gradient
from gossamer.circuits.effect import Baseline, Floats, Ints
from gossamer.circuits.hooks import Run
from gossamer.circuits.patching import provenance
from gossamer.circuits.runs import Batch, Group, PairedRuns, Progress, select
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError, nearest
from gossamer.models import LoadedModel
from gossamer.tasks import Task

Scoring = Literal["ablation", "gradient", "integrated"]
STEPS = 5


@dataclass(frozen=True, eq=False)
class AttentionEdges(Stored):
    """Every open edge of every prompt: where it is, its weight, and its score (what losing it costs, in the metric)."""

    FORMAT: ClassVar[str] = "gossamer attention edges"

    scoring: Scoring
    prompt_E: Ints
    layer_E: Ints
    head_E: Ints
    query_E: Ints
    key_E: Ints
    weight_E: Floats
    score_E: Floats
    baseline: Baseline
    provenance: dict[str, Any]

    def __len__(self) -> int:
        return len(self.prompt_E)

    @property
    def per_prompt_N(self) -> Ints:
        """How many edges each prompt has."""
        return np.bincount(self.prompt_E, minlength=len(self.baseline.clean_N)).astype(np.int64)

    def ranks(self, *, by_magnitude: bool = True) -> Ints:
        """Each edge's place [E] within its prompt, 0 for the best; ties by (layer, head, query, key)."""
        score_E = np.abs(self.score_E) if by_magnitude else self.score_E
        order_E = np.lexsort((self.key_E, self.query_E, self.head_E, self.layer_E, -score_E, self.prompt_E))
        starts_N = np.concatenate([[0], np.cumsum(self.per_prompt_N)[:-1]])
        rank_E = np.empty(len(self), dtype=np.int64)
        rank_E[order_E] = np.arange(len(self)) - starts_N[self.prompt_E[order_E]]
        return rank_E


def attention_edges(
    model: LoadedModel,
    task: Task,
    *,
    scoring: Scoring = "integrated",
    batch: Batch = "auto",
    progress: Progress | None = None,
    runs: PairedRuns | None = None,
) -> AttentionEdges:
    """Every open edge of the task's clean prompts with its score; `runs` (whole) reuses runs recorded before."""
    known = get_args(Scoring)
    if scoring not in known:
        raise GossamerError(
            f"There is no scoring {scoring!r} of edges; choose one of {', '.join(known)}.{nearest(scoring, known)}"
        )
    runs = runs or PairedRuns(model, task, whole=True, batch=batch, progress=progress)
    assert runs.whole, "edges need the runs of whole prompts"
    parts = [_edges_of(runs, group, scoring) for group in runs.groups]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    if scoring == "ablation":
        columns["score_E"] = _ablate(runs, columns)
    columns.pop("group_E")
    return AttentionEdges(scoring=scoring, **columns, baseline=runs.baseline, provenance=provenance(model, task))


def _edges_of(runs: PairedRuns, group: Group, scoring: Scoring) -> dict[str, np.ndarray]:
    def metric() -> Tensor:
        return runs.restart(group, group.clean, 0, 1, None).sum()

    patterns = record_patterns(runs.model.hf, metric)
    weights_LNHQK, open_LNHQK = patterns.weights_LBHQK, patterns.open_LBHQK
    if scoring == "ablation":
        scores_LNHQK = torch.zeros_like(weights_LNHQK)
    else:
        shares = midpoints(STEPS) if scoring == "integrated" else []
        scores_LNHQK = weights_LNHQK * weight_gradient(runs.model.hf, metric, weights_LNHQK, shares)
    layer_E, row_E, head_E, query_E, key_E = (index.cpu().numpy() for index in open_LNHQK.nonzero(as_tuple=True))
    number = next(index for index, other in enumerate(runs.groups) if other is group)
    return {
        "prompt_E": np.array(group.tokens.rows, dtype=np.int64)[row_E],
        "layer_E": layer_E,
        "head_E": head_E,
        "query_E": query_E,
        "key_E": key_E,
        "weight_E": weights_LNHQK[open_LNHQK].double().cpu().numpy(),
        "score_E": scores_LNHQK[open_LNHQK].double().cpu().numpy(),
        "group_E": np.full(len(layer_E), number),
    }


class _ShutOne:
    """R scenarios of one prompt, each of which takes one edge's contribution out of its head's output in one layer."""

    def __init__(self, layer: int, query_R: Tensor, head_R: Tensor, carried_RE: Tensor) -> None:
        self.layer, self.query_R, self.head_R, self.carried_RE = layer, query_R, head_R, carried_RE

    def touches(self, layer: int) -> bool:
        """Only the edges' own layer."""
        return layer == self.layer

    def heads(self, layer: int, heads_RNSHE: Tensor) -> Tensor:
        """Head outputs without the edge."""
        edited = heads_RNSHE.clone()
        edited[torch.arange(len(edited), device=edited.device), 0, self.query_R, self.head_R] -= self.carried_RE
        return edited

    def mlp(self, layer: int, written_RNSD: Tensor) -> Tensor:
        """MLPs are not touched."""
        return written_RNSD


@torch.no_grad()
def _ablate(runs: PairedRuns, edges: dict[str, np.ndarray]) -> Floats:
    """What shutting each edge alone takes off its prompt's metric."""
    lost_E = np.zeros(len(edges["prompt_E"]))
    done = 0
    for number, group in enumerate(runs.groups):
        with tape(runs.model.hf, record=("v",)) as heard:
            runs.restart(group, group.clean, 0, 1, None)
        step = runs.rows_per_forward(group.tokens.clean_BT.shape[1], group.start)
        for index, prompt in enumerate(group.tokens.rows):
            alone = _alone(group, index)
            for layer in range(runs.parts.n_layers):
                chosen = (edges["group_E"] == number) & (edges["prompt_E"] == prompt) & (edges["layer_E"] == layer)
                all_E = np.flatnonzero(chosen)
                for some_E in (all_E[first : first + step] for first in range(0, len(all_E), step)):
                    edit = _shut_one(edges, some_E, layer, heard["v", layer][index])
                    metric_R = runs.restart(alone, alone.clean, layer, len(some_E), edit)[:, 0]
                    lost_E[some_E] = alone.clean.metric_N.numpy() - metric_R.numpy()
                    done += len(some_E)
                    if runs.progress is not None:
                        runs.progress(done, len(lost_E))
    return lost_E


def _shut_one(edges: dict[str, np.ndarray], some_E: np.ndarray, layer: int, value_HKE: Tensor) -> _ShutOne:
    device = value_HKE.device
    query_R, head_R, key_R = (
        torch.from_numpy(edges[name][some_E]).to(device) for name in ("query_E", "head_E", "key_E")
    )
    weight_R = torch.from_numpy(edges["weight_E"][some_E]).to(value_HKE)
    return _ShutOne(layer, query_R, head_R, weight_R[:, None] * value_HKE[head_R, key_R])


def _alone(group: Group, index: int) -> Group:
    """A group of one of its prompts."""

    def run(whole: Run) -> Run:
        return replace(
            whole,
            hidden_LNSD=[hidden[index : index + 1] for hidden in whole.hidden_LNSD],
            metric_N=whole.metric_N[index : index + 1],
        )

    assert group.start == 0
    return Group(select(group.tokens, [index]), group.start, group.prefix, run(group.clean), run(group.corrupt))
