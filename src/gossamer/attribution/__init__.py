"""Attribution: what made a model say a token, in features, attention edges and the heads that carry them."""

from gossamer.attribution.agreement import ablate_clusters
from gossamer.attribution.build import attribution_graph, most_influential
from gossamer.attribution.clusters import find_clusters
from gossamer.attribution.contexts import with_contexts
from gossamer.attribution.diff import GraphDiff, diff_graphs
from gossamer.attribution.export import circuit_tracer_json, write_circuit_tracer
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.graph_loadings import graph_hops, graph_loadings
from gossamer.attribution.head_loadings import HeadLoadings, token_loadings
from gossamer.attribution.hops import Hop
from gossamer.attribution.interventions import (
    ScaleAttention,
    ScaleFeatures,
    measured_change,
    predicted_change,
    recomputed_change,
)
from gossamer.attribution.pair import AttributedPair, TranscoderPair, attribute
from gossamer.attribution.replacement import replace_mlps
from gossamer.attribution.result import TokenAttribution
from gossamer.attribution.targets import Prompt, Target, next_token_target, read_prompt
from gossamer.attribution.task_heads import TaskHeads, attribute_task
from gossamer.attribution.weights import token_attribution
from gossamer.attribution.why import ScoreSplit, split_score

__all__ = [
    "AttributedPair",
    "AttributionGraph",
    "GraphDiff",
    "HeadLoadings",
    "Hop",
    "Prompt",
    "ScaleAttention",
    "ScaleFeatures",
    "ScoreSplit",
    "Target",
    "TaskHeads",
    "TokenAttribution",
    "TranscoderPair",
    "ablate_clusters",
    "attribute",
    "attribute_task",
    "attribution_graph",
    "circuit_tracer_json",
    "diff_graphs",
    "find_clusters",
    "freeze",
    "graph_hops",
    "graph_loadings",
    "measured_change",
    "most_influential",
    "next_token_target",
    "predicted_change",
    "read_prompt",
    "recomputed_change",
    "replace_mlps",
    "split_score",
    "token_attribution",
    "token_loadings",
    "with_contexts",
    "write_circuit_tracer",
]
