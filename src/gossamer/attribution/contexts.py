"""Where in a text the features of a cluster are most active together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gossamer.attribution.clusters import Cluster, Clusters, Context
from gossamer.attribution.replacement import Replacement
from gossamer.attribution.targets import spelled
from gossamer.corpus.inputs import model_inputs
from gossamer.corpus.sequences import Sequences
from gossamer.transcoders.sites import counted_positions, watched


def with_contexts(
    clusters: Clusters, replacement: Replacement, text: Sequences, *, n: int = 3, before: int = 12
) -> Clusters:
    """The same with the places of a text where each cluster's features are most active together, one a sequence."""
    activity_CNT = _activity(clusters.clusters, replacement, text)
    model = replacement.frozen.model
    found = []
    for cluster, activity_NT in zip(clusters.clusters, activity_CNT, strict=True):
        best_N, at_N = activity_NT.max(1)
        contexts = []
        for row in best_N.topk(min(n, len(best_N))).indices.tolist():
            if best_N[row] > 0:
                end = int(at_N[row]) + 1
                pieces = [spelled(model, token) for token in text.ids_NT[row, max(0, end - before) : end].tolist()]
                contexts.append(Context("".join(pieces), float(best_N[row])))
        found.append(replace(cluster, contexts=tuple(contexts)))
    return replace(clusters, clusters=tuple(found))


@torch.no_grad()
def _activity(clusters: Sequence[Cluster], replacement: Replacement, text: Sequences) -> Tensor:
    """The summed activation [C,N,T] of each cluster's features over a text, first positions of documents left out."""
    model, transcoders = replacement.frozen.model, replacement.transcoders
    activity_CNT = torch.zeros(len(clusters), *text.ids_NT.shape, dtype=model.dtype, device=model.device)
    with watched(model) as activity:
        model.hf.base_model(**model_inputs(text, model.device))
    for layer, input_NTD in enumerate(activity.inputs):
        active_NTF = transcoders.encode(layer, input_NTD)
        for index, cluster in enumerate(clusters):
            numbers = [number for at, _, number in cluster.features if at == layer]
            activity_CNT[index] += active_NTF[..., numbers].sum(-1)
    return activity_CNT * counted_positions(text).to(model.device)
