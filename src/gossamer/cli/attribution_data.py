"""An attributed pair as plain data, for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.attribution.diff import GraphDiff
    from gossamer.attribution.explain import Explanation
    from gossamer.attribution.hops import Carriers
    from gossamer.attribution.pair import AttributedPair
    from gossamer.attribution.why import ScoreSplit

MOST_EDGES, MOST_CHANGES = 40, 200
MEANINGS = {
    "gradient": "gradient: every attention edge's weight times its value vector times the gradient of the target behind"
    " it, through the MLPs to first order",
    "direct": "direct: what stands at the key position, embedding and MLP outputs, and reaches the target itself over"
    " one hop, MLPs taken as given",
    "graph": "graph: what tokens, features and errors at the key position give features and logits at the query"
    " position over one hop, times what those are worth to the target",
}


INTEGRATED = "; the gradient is the mean of those on the way from no attention at all to the run"


def meanings(pair: AttributedPair) -> dict[str, str]:
    """What each measure of the pair says, in words."""
    tokens = pair.sparse.tokens
    asked = (INTEGRATED if tokens.method == "integrated" else "") + f"; {tokens.held.describe()}"
    return {name: MEANINGS[name] + (asked if name == "gradient" else "") for name in pair.measures}


def no_graph(pair: AttributedPair) -> str | None:
    """Why there is no graph of features, where the target is one that no graph explains."""
    from gossamer.attribution.explain import IN_GRAPHS

    kind = pair.sparse.tokens.target.kind
    if kind in IN_GRAPHS:
        return None
    return f"There is no graph of features: graphs explain a {' or a '.join(IN_GRAPHS)}, not a {kind}."


def pair_data(pair: AttributedPair) -> dict[str, Any]:
    """Everything of a pair but its edges, for JSON."""
    tokens = pair.sparse.tokens
    found: dict[str, Any] = {
        "prompt": tokens.prompt.text,
        "tokens": list(tokens.prompt.tokens),
        "target": tokens.target.describe(),
        "hop": {"key": pair.hop.key, "query": pair.hop.query},
        "share": pair.share,
        "measure": pair.measure,
        "measures": meanings(pair),
    }
    reason, difference = no_graph(pair), pair.difference()
    if reason is not None:
        found["no graph"] = reason
    if difference is not None:
        found["graph difference"] = _difference_data(difference)
    if pair.why:
        found["why"] = {role: _why_data(split) for role, split in pair.why.items()}
    return found | {"dense": _model_data(pair, pair.dense), "sparse": _model_data(pair, pair.sparse)}


def _difference_data(found: GraphDiff) -> dict[str, Any]:
    """Counts, every node, and the largest edges; an edge names its nodes by their places in the list."""
    largest = sorted(found.edges, key=lambda edge: -edge.size)[:MOST_CHANGES]
    return {
        "from": found.names[0],
        "to": found.names[1],
        "by": found.level,
        "counts": {
            what: {status: sum(change.status == status for change in changes) for status in ("kept", "lost", "added")}
            for what, changes in (("nodes", found.nodes), ("edges", found.edges))
        },
        "nodes": [vars(node) | {"status": node.status} for node in found.nodes],
        "largest edges": [vars(edge) | {"status": edge.status} for edge in largest],
    }


def _model_data(pair: AttributedPair, found: Explanation) -> dict[str, Any]:
    tokens = found.tokens
    measured = {name: _carriers_data(found.measure(name).carriers(pair.hop, pair.share)) for name in pair.measures}
    data: dict[str, Any] = {
        "model": tokens.model,
        "value": tokens.value,
        "probability": tokens.probability,
        "open edges": len(tokens),
        "heads": measured,
        "hops into the answer": [
            {"key": hop.key, "total": carried.total, "gross": carried.gross, "heads": len(carried)}
            | ({"lost when shut": float(tokens.lost_K[hop.key])} if hop.query == len(tokens.prompt) - 1 else {})
            for hop, carried in tokens.hops(pair.hop.query)
        ],
    }
    if tokens.ablation is not None:
        data["agreement with exact ablation"] = vars(tokens.agreement())
    return data if found.features is None else data | {"graph": _graph_data(found, pair.share)}


def _why_data(split: ScoreSplit) -> dict[str, Any]:
    about = {"head": f"L{split.layer}H{split.head}", "query": split.query, "key": split.key, "score": split.score}
    pairs = [{"query": one.query, "key": one.key, "part": one.part} for one in split.largest()]
    return about | {"offset": split.offset, "gate logit": split.gate_logit, "largest parts": pairs}


def _carriers_data(found: Carriers) -> dict[str, Any]:
    heads = [{"head": one.name, "contribution": one.contribution} for one in found.heads]
    numbers = {"total": found.total, "gross": found.gross, "signed share": found.signed_share}
    return {"n": len(found), "of": found.available, **numbers, "heads": heads}


def _graph_data(found: Explanation, share: float) -> dict[str, Any]:
    """The scores, the clusters and the strongest edges with their heads."""
    assert found.features is not None
    graph, loadings = found.features.graph, found.features.loadings
    strongest = sorted(range(len(loadings)), key=lambda edge: -abs(loadings.edge_E[edge]))[:MOST_EDGES]
    edges = []
    for edge in strongest:
        carried = loadings.edge_carriers(edge, share)
        edges.append(
            {
                "source": loadings.sources[loadings.source_E[edge]],
                "target": loadings.targets[loadings.target_E[edge]],
                "effect": float(loadings.edge_E[edge]),
                "no head": float(loadings.no_head_E[edge]),
                "other positions": float(loadings.others_E[edge]),
                "heads": {one.name: one.contribution for one in carried.heads},
            }
        )
    clusters = [
        {
            "label": one.label,
            "position": one.position,
            "share": one.share,
            "features": [list(feature) for feature in one.features],
            "contexts": [context.text for context in one.contexts],
        }
        for one in found.features.clusters.clusters
    ]
    return {"scores": vars(graph.scores), "nodes": len(graph.nodes), "clusters": clusters, "strongest edges": edges}
