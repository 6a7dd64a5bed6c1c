"""Graphs for other viewers: the JSON that circuit-tracer's page and Neuronpedia open.

Per-head parts ride on each link under keys of ours, which both ignore: `heads` as [layer, head, part], `no_head` and
`other_positions`; the four numbers of a link sum to its weight. The bias is in no viewer and is left out; it belongs to
the completeness of our own file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import gossamer
from gossamer.attribution.clusters import Clusters
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.head_loadings import HeadLoadings
from gossamer.attribution.nodes import BIAS, ERROR, FEATURE, TOKEN
from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json

SCHEMA_VERSION = 1  # features are numbered by Cantor's pairing of layer and number
INDEX = "graph-metadata.json"
ALLOWED_NAME = re.compile(r"[A-Za-z0-9_.-]+")


def circuit_tracer_json(
    graph: AttributionGraph,
    *,
    slug: str,
    scan: str,
    loadings: HeadLoadings | None = None,
    clusters: Clusters | None = None,
) -> dict[str, Any]:
    """The graph as plain data; `scan` is the name under which a viewer knows the model's transcoders."""
    for name, value in (("slug", slug), ("scan", scan)):
        if not ALLOWED_NAME.fullmatch(value):
            raise GossamerError(f"The {name} {value!r} may hold letters, digits, '_', '.' and '-' only.")
    ids = [_node_id(graph, node) for node in range(len(graph.nodes))]
    return {
        "metadata": _metadata(graph, slug, scan),
        "qParams": {
            "pinnedIds": [],
            "supernodes": _supernodes(graph, clusters, ids),
            "linkType": "both",
            "clickedId": "",
            "sg_pos": "",
        },
        "nodes": [_node(graph, node, ids[node]) for node in np.flatnonzero(~graph.nodes.is_kind(BIAS)).tolist()],
        "links": _links(graph, ids, loadings),
    }


def write_circuit_tracer(graph: AttributionGraph, folder: str | Path, **options: Any) -> Path:
    """Write SLUG.json into a folder and enter it in the folder's list of graphs; options as `circuit_tracer_json`."""
    data = circuit_tracer_json(graph, **options)
    path = Path(folder) / f"{data['metadata']['slug']}.json"
    index = Path(folder) / INDEX
    known = read_json(index)["graphs"] if index.exists() else []
    write_json(path, data)
    others = [entry for entry in known if entry["slug"] != data["metadata"]["slug"]]
    write_json(index, {"graphs": [*others, data["metadata"]]})
    return path


def _metadata(graph: AttributionGraph, slug: str, scan: str) -> dict[str, Any]:
    pruning = graph.pruning
    return {
        "slug": slug,
        "scan": scan,
        "transcoder_list": [],
        "prompt_tokens": list(graph.tokens_Q),
        "prompt": graph.prompt,
        "node_threshold": pruning.node_part if pruning else None,
        "schema_version": SCHEMA_VERSION,
        "info": {
            "generator": {"name": "gossamer", "version": gossamer.__version__},
            "replacement_score": graph.scores.replacement,
            "completeness_score": graph.scores.completeness,
            "error_share": graph.scores.error_share,
        },
        "pruning_settings": {"node_threshold": pruning.node_part, "edge_threshold": pruning.edge_part}
        if pruning
        else {},
    }


def _node_id(graph: AttributionGraph, node: int) -> str:
    kind, layer, position, number = graph.nodes.identities()[node]
    if kind == FEATURE:
        return f"{layer}_{number}_{position}"
    if kind == ERROR:
        return f"{layer}_-1_{position}"
    if kind == TOKEN:
        return f"E_{number}_{position}"
    return "bias" if kind == BIAS else f"{layer + 1}_{number}_{position}"


def _node(graph: AttributionGraph, node: int, node_id: str) -> dict[str, Any]:
    """One node; which keys it has beyond the common ones depends on its kind."""
    kind, layer, position, number = graph.nodes.identities()[node]
    common = {"node_id": node_id, "ctx_idx": position, "run_idx": 0, "reverse_ctx_idx": 0}
    influence = float(graph.cumulative_N[node])
    if kind == FEATURE:
        return common | {
            "feature": (layer + number) * (layer + number + 1) // 2 + number,
            "layer": str(layer),
            "feature_type": "cross layer transcoder",
            "jsNodeId": f"{layer}_{number}-0",
            "clerp": "",
            "influence": influence,
            "activation": float(graph.nodes.value_N[node]),
        }
    if kind == ERROR:
        return common | {
            "feature": -1,
            "layer": str(layer),
            "feature_type": "mlp reconstruction error",
            "jsNodeId": f"{layer}_{position}-0",
            "clerp": f"error of MLP {layer} at {graph.tokens_Q[position]!r}",
            "influence": influence,
        }
    if kind == TOKEN:
        return common | {
            "feature": position,
            "layer": "E",
            "feature_type": "embedding",
            "jsNodeId": f"E_{number}-{position}",
            "clerp": f"embedding of {graph.tokens_Q[position]!r}",
            "influence": influence,
        }
    place = node - graph.nodes.n_sources
    probability = float(graph.probability_K[place])
    return common | {
        "feature": number,
        "layer": str(layer + 1),
        "feature_type": "logit",
        "jsNodeId": f"L_{number}-{position}",
        "clerp": f'Output "{graph.logit_tokens_K[place]}" (p={probability:.3f})',
        "token_prob": probability,
        "is_target_logit": place == 0,
    }


def _links(graph: AttributionGraph, ids: list[str], loadings: HeadLoadings | None) -> list[dict[str, Any]]:
    edge_of = {} if loadings is None else _edge_numbers(loadings)
    bias = int(np.flatnonzero(graph.nodes.is_kind(BIAS))[0])
    links = []
    for row, column in zip(*(places.tolist() for places in np.nonzero(graph.effect_TS)), strict=True):
        if column == bias:
            continue
        target = int(graph.nodes.target_nodes_T[row])
        link = {"source": ids[column], "target": ids[target], "weight": float(graph.effect_TS[row, column])}
        if loadings is not None and (column, row) in edge_of:
            link |= _head_parts(loadings, edge_of[column, row])
        links.append(link)
    return links


def _edge_numbers(loadings: HeadLoadings) -> dict[tuple[int, int], int]:
    pairs = zip(loadings.source_E.tolist(), loadings.target_E.tolist(), strict=True)
    return {pair: edge for edge, pair in enumerate(pairs)}


def _head_parts(loadings: HeadLoadings, edge: int) -> dict[str, Any]:
    part_LH = loadings.heads_ELH[edge]
    layers, heads = np.nonzero(part_LH)
    order = np.argsort(-np.abs(part_LH[layers, heads]), kind="stable")
    return {
        "heads": [[int(layers[i]), int(heads[i]), float(part_LH[layers[i], heads[i]])] for i in order],
        "no_head": float(loadings.no_head_E[edge]),
        "other_positions": float(loadings.others_E[edge]),
    }


def _supernodes(graph: AttributionGraph, clusters: Clusters | None, ids: list[str]) -> list[list[str]]:
    """Clusters of several features, by their label."""
    if clusters is None:
        return []
    found = []
    for cluster in clusters.clusters:
        members = [f"{layer}_{number}_{position}" for layer, position, number in cluster.features]
        if missing := set(members) - set(ids):
            raise GossamerError(f"The clusters are of another graph: it has no node {min(missing)}.")
        if len(members) > 1:
            found.append([cluster.label, *members])
    return found
