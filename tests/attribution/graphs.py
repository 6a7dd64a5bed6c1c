"""Graphs of tiny random models, for tests of what is made of graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from edge_models import gated
from random_transcoders import random_transcoders

from gossamer import LoadedModel
from gossamer.attribution.build import attribution_graph
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.replacement import Replacement, replace_mlps

IDS = torch.tensor([3, 5, 9, 2, 7, 1, 4])


def make_graph(
    make: Callable[..., LoadedModel] = gated, *, part: float = 0.9, seed: int = 3
) -> tuple[AttributionGraph, Replacement]:
    """A pruned graph of a three-layer model with cross-layer transcoders."""
    model = make("gpt2", n_layer=3)
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, "cross-layer", n_features=20, seed=seed))
    return attribution_graph(replacement).pruned(node_part=part), replacement
