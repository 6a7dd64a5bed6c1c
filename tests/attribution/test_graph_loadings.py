"""Loadings of attribution graphs: the effects of the graph, split, and hops that sum over all of its edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from edge_models import gated, tiny
from random_transcoders import random_transcoders

from gossamer import GossamerError
from gossamer.attribution.build import attribution_graph, most_influential
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.graph_loadings import graph_hops, graph_loadings, worth
from gossamer.attribution.hops import Hop
from gossamer.attribution.replacement import Replacement, replace_mlps
from gossamer.attribution.targets import Target

IDS = torch.tensor([3, 5, 9, 2, 7])
TARGET = Target("logit difference", 6, "six", (8,), ("eight",))
CASES = [
    ("gpt2", tiny, "cross-layer"),
    ("llama", gated, "per-layer"),
    ("llama", gated, "cross-layer"),
    ("gpt_neox", gated, "cross-layer"),
    ("olmo2", gated, "cross-layer"),
]


def made(family, make, kind) -> tuple[Replacement, AttributionGraph]:
    deep = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    model = make(family, **deep)
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, kind))
    return replacement, attribution_graph(replacement, targets=[6, 8])


@pytest.mark.parametrize(("family", "make", "kind"), CASES)
def test_every_effect_of_the_graph_is_split(family, make, kind) -> None:
    replacement, graph = made(family, make, kind)
    for one in (graph, graph.pruned(node_part=0.7, edge_part=0.9)):
        found = graph_loadings(replacement, one)
        assert len(found) == one.n_edges > 10
        np.testing.assert_allclose(found.edge_E, one.effect_TS[found.target_E, found.source_E], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.missing_E, 0, atol=1e-11)
        assert (found.key_E <= found.query_E).all()
        assert not found.others_E[found.key_E == found.query_E].any()
        assert not found.no_head_E[found.key_E < found.query_E].any()


@pytest.mark.parametrize(("family", "make", "kind"), CASES)
def test_hops_are_sums_of_loadings_times_worth(family, make, kind) -> None:
    replacement, graph = made(family, make, kind)
    edges, hops = graph_loadings(replacement, graph), graph_hops(replacement, graph, TARGET)
    worth_T = worth(graph, TARGET)
    for hop in (Hop(1, 4), Hop(0, 2), Hop(3, 3)):
        chosen = (edges.key_E == hop.key) & (edges.query_E == hop.query)
        expected_LH = (edges.heads_ELH[chosen] * worth_T[edges.target_E[chosen], None, None]).sum(0)
        np.testing.assert_allclose(hops.heads_LH(hop), expected_LH, rtol=1e-9, atol=1e-12)
        assert np.abs(expected_LH).max() > 1e-6


@pytest.mark.parametrize(("family", "make", "kind"), CASES)
def test_worth_is_the_change_of_the_number_by_a_change_of_the_value(family, make, kind) -> None:
    """By the graph's own total effects: a feature's activation follows its value one to one."""
    _, graph = made(family, make, kind)
    n_features = graph.nodes.n_features
    part_SX = np.full((graph.nodes.n_sources, n_features), np.nan)
    part_SX[np.arange(n_features), np.arange(n_features)] = 1 / graph.nodes.value_N[:n_features]
    part_SX[n_features:] = 0
    change_TX = graph.total_effects(part_SX)
    expected_X = change_TX[graph.logit_row(6)] - change_TX[graph.logit_row(8)]
    np.testing.assert_allclose(worth(graph, TARGET)[:n_features], expected_X, rtol=1e-9, atol=1e-12)


def test_a_graph_with_fewer_features_has_the_loadings_and_hops_of_the_replacement_model_it_was_made_of() -> None:
    whole, _ = made(*CASES[0])
    few = most_influential(whole, targets=[6, 8], max_features=4)
    assert (len(few.features), few.n_left_out) == (4, len(whole.features) - 4)
    graph = attribution_graph(few, targets=[6, 8])
    same = attribution_graph(whole, targets=[6, 8], max_features=4)
    np.testing.assert_array_equal(graph.effect_TS, same.effect_TS)
    assert graph.n_active_features == same.n_active_features == len(whole.features)
    np.testing.assert_allclose(graph_loadings(few, graph).missing_E, 0, atol=1e-12)
    with pytest.raises(GossamerError, match="not those of this replacement model"):
        graph_loadings(whole, graph)
    with pytest.raises(GossamerError, match="not those of this replacement model"):
        graph_hops(whole, graph, TARGET)


def test_what_does_not_belong_together_is_refused() -> None:
    replacement, graph = made(*CASES[1])
    fewer = replacement.keeping(torch.arange(len(replacement.features)) > 0)
    with pytest.raises(GossamerError, match="is not active at position"):
        graph_loadings(fewer, graph)
    with pytest.raises(GossamerError, match="not those of this replacement model"):
        graph_loadings(replacement, replace(graph, effect_TS=2 * graph.effect_TS))
    with pytest.raises(GossamerError, match="not a probability"):
        graph_hops(replacement, graph, Target("probability", 6, "six"))
