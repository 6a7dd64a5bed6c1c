"""The JSON that other viewers open: every key they require, in the types they require, and our heads beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from graphs import make_graph

from gossamer import GossamerError
from gossamer.attribution.clusters import find_clusters
from gossamer.attribution.export import circuit_tracer_json, write_circuit_tracer
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.graph_loadings import graph_loadings
from gossamer.attribution.replacement import Replacement

Made = tuple[AttributionGraph, Replacement]
METADATA = {"slug": str, "scan": str, "transcoder_list": list, "prompt_tokens": list, "prompt": str}
Q_PARAMS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {
    "node_id": str,
    "feature": int,
    "layer": str,
    "ctx_idx": int,
    "feature_type": str,
    "jsNodeId": str,
    "clerp": str,
    "run_idx": int,
    "reverse_ctx_idx": int,
}
TYPES = {"cross layer transcoder", "mlp reconstruction error", "embedding", "logit"}


@pytest.fixture(scope="module")
def made() -> Made:
    return make_graph()


def require(part: dict[str, Any], types: dict[str, type]) -> None:
    for name, kind in types.items():
        assert type(part[name]) is kind, name


def test_the_graph_has_what_its_viewers_require(made: Made) -> None:
    graph, replacement = made
    data = json.loads(
        json.dumps(
            circuit_tracer_json(graph, slug="one", scan="tiny-model", clusters=find_clusters(graph, replacement)),
            allow_nan=False,
        )
    )
    assert set(data) == {"metadata", "qParams", "nodes", "links"}
    require(data["metadata"], METADATA)
    require(data["qParams"], Q_PARAMS)
    ids = {node["node_id"] for node in data["nodes"]}
    assert len(ids) == len(data["nodes"]) == len(graph.nodes) - 1  # all but the bias
    for node in data["nodes"]:
        require(node, NODE)
        assert node["feature_type"] in TYPES
        if node["feature_type"] == "logit":
            assert f"(p={node['token_prob']:.3f})" in node["clerp"]
            assert node["layer"] == "4"
    assert [node["is_target_logit"] for node in data["nodes"] if node["feature_type"] == "logit"].count(True) == 1
    for link in data["links"]:
        assert {link["source"], link["target"]} <= ids
    assert len(data["links"]) == graph.n_edges
    assert {node for label, *nodes in data["qParams"]["supernodes"] for node in nodes} <= ids


def test_features_are_numbered_by_pairing_layer_and_number(made: Made) -> None:
    """The pairing can be undone."""
    data = circuit_tracer_json(made[0], slug="one", scan="tiny")
    for node in data["nodes"]:
        if node["feature_type"] == "cross layer transcoder":
            row = int((np.sqrt(8 * node["feature"] + 1) - 1) // 2)
            number = node["feature"] - row * (row + 1) // 2
            layer, there, _ = node["node_id"].split("_")
            assert (row - number, number) == (int(layer), int(there))


def test_influence_is_the_share_down_to_a_node_in_the_whole_graph(made: Made) -> None:
    graph = made[0]
    data = circuit_tracer_json(graph, slug="one", scan="tiny")
    shown = [node["influence"] for node in data["nodes"] if "influence" in node]
    sources = graph.nodes.n_sources - 1
    order = np.argsort(-graph.influence_N[:sources], kind="stable")
    assert (np.diff(np.array(shown)[order]) > -1e-12).all()
    assert 0 < min(shown) < max(shown) <= 1


def test_head_parts_ride_on_links(made: Made) -> None:
    """The loadings are computed from the frozen model, the weights are the graph's: that they agree is the point."""
    graph, replacement = made
    loadings = graph_loadings(replacement, graph)
    data = circuit_tracer_json(graph, slug="one", scan="tiny", loadings=loadings)
    assert len(data["links"]) == len(loadings)
    assert len({len(link["heads"]) for link in data["links"]}) > 2
    for link in data["links"]:
        parts = [part for _, _, part in link["heads"]]
        assert [abs(part) for part in parts] == sorted((abs(part) for part in parts), reverse=True)
        whole = sum(parts) + link["no_head"] + link["other_positions"]
        assert whole == pytest.approx(link["weight"], rel=1e-9, abs=1e-12)
    assert any(link["other_positions"] for link in data["links"])
    assert any(link["no_head"] for link in data["links"])


def test_single_edges_are_loaded_on_demand_by_the_names_of_their_nodes(made: Made) -> None:
    """Those of the graph come out as among all of them; one that pruning took away is whole again."""
    graph, replacement = made
    every = graph_loadings(replacement, graph)
    largest = int(np.abs(every.edge_E).argmax())
    ends = every.sources[every.source_E[largest]], every.targets[every.target_E[largest]]
    for one in (graph, replace(graph, effect_TS=np.zeros_like(graph.effect_TS))):
        found = graph_loadings(replacement, one, edges=[ends])
        assert (found.source_E, found.target_E) == (every.source_E[largest], every.target_E[largest])
        np.testing.assert_allclose(found.edge_E, every.edge_E[largest], rtol=1e-9)
        np.testing.assert_allclose(found.heads_ELH[0], every.heads_ELH[largest], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(found.missing_E, 0, atol=1e-11)
    assert len(graph_loadings(replacement, graph, edges=[])) == 0
    with pytest.raises(GossamerError, match="has no source 'token at 9'"):
        graph_loadings(replacement, graph, edges=[("token at 9", ends[1])])
    with pytest.raises(GossamerError, match="has no target 'logit'"):
        graph_loadings(replacement, graph, edges=[("token at 2", "logit")])
    with pytest.raises(GossamerError, match="The bias is at no position"):
        graph_loadings(replacement, graph, edges=[("bias", ends[1])])


def test_links_whose_edge_was_not_loaded_have_no_head_parts(made: Made) -> None:
    graph, replacement = made
    size_TS = np.abs(graph.effect_TS)
    smaller = replace(graph, effect_TS=np.where(size_TS > size_TS.mean(), graph.effect_TS, 0))
    data = circuit_tracer_json(graph, slug="one", scan="tiny", loadings=graph_loadings(replacement, smaller))
    assert sum("heads" in link for link in data["links"]) == smaller.n_edges < graph.n_edges


def test_files_are_listed_once(made: Made, tmp_path) -> None:
    graph = made[0]
    for slug in ("one", "two", "one"):
        path = write_circuit_tracer(graph, tmp_path, slug=slug, scan="tiny")
        assert json.loads(path.read_text("utf-8"))["metadata"]["slug"] == slug
    index = json.loads((tmp_path / "graph-metadata.json").read_text("utf-8"))
    assert [entry["slug"] for entry in index["graphs"]] == ["two", "one"]


def test_names_that_viewers_refuse_and_clusters_of_other_graphs_are_refused(made: Made) -> None:
    graph, replacement = made
    with pytest.raises(GossamerError, match="The scan 'a/b' may hold letters"):
        circuit_tracer_json(graph, slug="one", scan="a/b")
    smaller = graph.pruned(node_part=0.3)
    assert smaller.nodes.n_features < graph.nodes.n_features
    with pytest.raises(GossamerError, match="clusters are of another graph"):
        circuit_tracer_json(smaller, slug="one", scan="a", clusters=find_clusters(graph, replacement))
