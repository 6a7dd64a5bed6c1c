"""An attributed pair as plain data, for JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gossamer.attribution.explain import Explanation
    from gossamer.attribution.hops import Carriers
    from gossamer.attribution.pair import AttributedPair
    from gossamer.attribution.why import ScoreSplit

MOST_EDGES = 40
MEANINGS = {
    "gradient": "gradient: every attention edge's weight times its value vector times the gradient of the target behind"
    " it, through the MLPs to first order; gates, patterns and norms are held",
    "direct": "direct: what stands at the key position, embedding and MLP outputs, and reaches the target itself over"
    " one hop, MLPs taken as given",
    "graph": "graph: what tokens, features and errors at the key position give features and logits at the query"
    " position over one hop, times what those are worth to the target",
}


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
        "measures": {name: MEANINGS[name] for name in pair.measures},
    }
    if pair.why:
        found["why"] = {role: _why_data(split) for role, split in pair.why.items()}
    return found | {"dense": _model_data(pair, pair.dense), "sparse": _model_data(pair, pair.sparse)}


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
