"""Circuits of single attention edges: each prompt's best n kept and all others shut, or the other way round.

    keep    each prompt keeps its own n best edges, ALL others are forced shut, also those that a gate would now open;
            the metric is averaged over prompts before the ratio
    cut     each prompt's n best edges are shut, the others stay

Sizes are searched as everywhere (`search`), so "smallest n from which the curve stays at a level" is exact up to the
spacing of the sizes that were run there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from gossamer.attention import ForceShut, tape
from gossamer.circuits.attention_edges import STEPS, AttentionEdges, Scoring
from gossamer.circuits.effect import LEVELS, Floats, Ints, ShutCurve
from gossamer.circuits.runs import Batch, Group, PairedRuns, Progress
from gossamer.circuits.search import SEARCH, searched
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.tasks import Task

Mode = Literal["keep", "cut"]
UNIT = "attention edges a prompt"


def edge_curve(
    model: LoadedModel,
    task: Task,
    edges: AttentionEdges,
    *,
    mode: Mode = "keep",
    by_magnitude: bool = True,
    sizes: Sequence[int] | None = None,
    levels: Sequence[float] = LEVELS,
    batch: Batch = "auto",
    progress: Progress | None = None,
    runs: PairedRuns | None = None,
) -> ShutCurve:
    """The metric with each prompt's n best edges kept and all others forced shut (or, to `cut`, the other way round).

    Without `sizes`, a grid that is refined around each of `levels`. `progress` is told (sizes run, sizes planned).
    """
    runs = runs or PairedRuns(model, task, whole=True, batch=batch)
    assert runs.whole, "edges need the runs of whole prompts"
    if edges.provenance.get("task", {}).get("fingerprint") != task.fingerprint:
        raise GossamerError(
            f"These edges were scored on other prompts than those of {task.name}; score them on the task they are used"
            " for."
        )
    rank_E = edges.ranks(by_magnitude=by_magnitude)
    ranks_G = [_rank_tensor(runs, group, edges, rank_E) for group in runs.groups]
    total = int(edges.per_prompt_N.max())

    def run(wanted: Sequence[int]) -> Floats:
        metric_SN = np.zeros((len(wanted), len(task)))
        for group, rank in zip(runs.groups, ranks_G, strict=True):
            metric_SN[:, list(group.tokens.rows)] = _with_edges(runs, group, rank, wanted, mode)
        return metric_SN

    if sizes is not None:
        sizes_S = np.array(sorted({0, *sizes, total}), dtype=np.int64)
        metric_SN = run(sizes_S.tolist())
    else:
        sizes_S, metric_SN = searched(run, total, runs.baseline, levels if mode == "keep" else (), progress)
    return ShutCurve(
        unit=UNIT,
        total=total,
        sizes_S=sizes_S,
        metric_SN=metric_SN,
        baseline=runs.baseline,
        rule=_rule(edges.scoring, mode, by_magnitude=by_magnitude, chosen=sizes is not None),
    )


def _rule(scoring: Scoring, mode: Mode, *, by_magnitude: bool, chosen: bool) -> dict[str, str]:
    words = {
        "ablation": "exact effect of shutting the edge alone",
        "gradient": "weight times gradient in the clean run, gates constant (first order)",
        "integrated": f"weight times gradient, averaged over {STEPS} shares of all weights, patterns frozen",
    }
    return {
        "ranking": f"{'size of: ' if by_magnitude else ''}{words[scoring]}; each prompt's own edges, largest first",
        "left out": "forced shut, nothing in their place" if mode == "keep" else "the n best, forced shut",
        "MLPs": "free: computed from what they are given",
        "search": "sizes as chosen" if chosen else SEARCH,
    }


def _rank_tensor(runs: PairedRuns, group: Group, edges: AttentionEdges, rank_E: Ints) -> Tensor:
    """Each pair's rank [L, N, H, Q, K] within its prompt; out of reach for pairs that are no edges."""
    n_tokens = group.tokens.clean_BT.shape[1]
    shape = (runs.parts.n_layers, len(group.tokens), runs.parts.n_heads, n_tokens, n_tokens)
    ranks = torch.full(shape, torch.iinfo(torch.int32).max, dtype=torch.int32)
    place = {prompt: index for index, prompt in enumerate(group.tokens.rows)}
    mine = np.isin(edges.prompt_E, list(place))
    row_E = np.array([place[int(prompt)] for prompt in edges.prompt_E[mine]], dtype=np.int64)
    at = (edges.layer_E[mine], row_E, edges.head_E[mine], edges.query_E[mine], edges.key_E[mine])
    ranks[tuple(torch.from_numpy(index) for index in at)] = torch.from_numpy(rank_E[mine].astype(np.int32))
    return ranks.to(runs.model.device)


@torch.no_grad()
def _with_edges(runs: PairedRuns, group: Group, ranks: Tensor, sizes: Sequence[int], mode: Mode) -> Floats:
    """The metric [S, N] of a group with the edges below each size kept (or cut)."""
    rows = runs.rows_per_forward(group.tokens.clean_BT.shape[1], group.start, masked=True)
    step = max(1, rows // len(group.tokens))
    found = []
    for first in range(0, len(sizes), step):
        size_R = torch.tensor(sizes[first : first + step], dtype=torch.int32, device=ranks.device)
        inside = ranks[:, None] < size_R[:, None, None, None, None]
        shut = (~inside if mode == "keep" else inside).flatten(1, 2)
        masks = [ForceShut(layer, shut[layer]) for layer in range(runs.parts.n_layers)]
        with tape(runs.model.hf, replace=masks):
            found.append(runs.restart(group, group.clean, 0, len(size_R), None).numpy())
    return np.concatenate(found)
