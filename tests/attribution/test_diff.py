"""Differences of graphs: every node and edge of either graph, once, with its status."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from edge_models import gated, tiny
from graphs import make_graph

from gossamer import GossamerError
from gossamer.attribution.diff import GraphDiff, diff_graphs
from gossamer.attribution.graph import AttributionGraph


def test_a_graph_does_not_differ_from_itself() -> None:
    graph, _ = make_graph()
    diff = diff_graphs(graph, graph)
    assert {node.status for node in diff.nodes} == {edge.status for edge in diff.edges} == {"kept"}
    assert len(diff.nodes) == len(graph.nodes) - 1
    assert len(diff.edges) == graph.n_edges
    assert all(node.first == node.second for node in diff.nodes)


def test_what_is_pruned_away_is_lost_and_comes_back_as_added() -> None:
    graph, _ = make_graph(part=0.95)
    smaller = graph.pruned(node_part=0.6, edge_part=0.8)
    lost = len(graph.nodes) - len(smaller.nodes)
    assert lost > 0
    there, back = diff_graphs(graph, smaller, names=("all", "few")), diff_graphs(smaller, graph)
    assert len(there.nodes_that_are("lost")) == len(back.nodes_that_are("added")) == lost
    assert not there.nodes_that_are("added")
    assert len(there.edges_that_are("kept")) == smaller.n_edges
    sizes = [edge.size for edge in there.edges_that_are("lost")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == graph.n_edges - smaller.n_edges
    assert there.describe().startswith(f"From all to few, by node: {len(smaller.nodes) - 1} nodes kept, {lost} nodes")


def test_by_place_influence_and_effects_are_sums(tmp_path) -> None:
    """A dense and a gated model with transcoders of their own."""
    dense, sparse = make_graph(tiny)[0], make_graph(gated, seed=4)[0]
    sparse = replace(sparse, provenance=sparse.provenance | {"transcoders": {"other": 1}})
    with pytest.raises(GossamerError, match="different transcoders"):
        diff_graphs(dense, sparse)
    diff = diff_graphs(dense, sparse, level="place")
    features = [node for node in diff.nodes if node.kind == "feature"]
    assert len({(node.layer, node.position) for node in features}) == len(features)
    for graph, side in ((dense, "first"), (sparse, "second")):
        total = sum(getattr(node, side) or 0.0 for node in diff.nodes)
        assert total == pytest.approx(graph.influence_N.sum())
        effects = sum(getattr(edge, side) or 0.0 for edge in diff.edges)
        assert effects == pytest.approx(np.delete(graph.effect_TS, graph.nodes.n_sources - 1, axis=1).sum())
    assert GraphDiff.load(diff.save(tmp_path / "diff.safetensors")) == diff


def test_graphs_from_disk_are_compared_like_those_at_hand(tmp_path) -> None:
    first = make_graph()[0]
    smaller = first.pruned(node_part=0.6, edge_part=0.8)
    loaded = [AttributionGraph.load(graph.save(tmp_path / f"{len(graph.nodes)}")) for graph in (first, smaller)]
    expected = diff_graphs(first, smaller)
    for one, other in (loaded, (first, loaded[1]), (loaded[0], smaller)):
        found = diff_graphs(one, other)
        assert (found.nodes, found.edges) == (expected.nodes, expected.edges)
    assert GraphDiff.load(diff_graphs(*loaded).save(tmp_path / "diff")).describe() == expected.describe()


def test_graphs_of_other_prompts_are_refused() -> None:
    graph, _ = make_graph()
    with pytest.raises(GossamerError, match="Only graphs of one prompt"):
        diff_graphs(graph, replace(graph, ids_Q=graph.ids_Q[::-1]))
    with pytest.raises(GossamerError, match="by node or by place"):
        diff_graphs(graph, graph, level="feature")
