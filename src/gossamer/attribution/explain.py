"""Why a model says a token: everything attribution knows of one model on one prompt.

    gradient  every attention edge's contribution, through whatever later layers make of it (`weights`)
    direct    loadings of embeddings and MLP outputs on the target itself, MLPs taken as given (`head_loadings`)
    graph     with transcoders: the pruned graph, the loadings of its edges, its clusters, and what heads carry over
              every hop in the unpruned graph, through all features (`graph_loadings`)

Each of the three measures says what heads carry over a hop; they answer different questions and differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from gossamer.attribution.build import attribution_graph, most_influential
from gossamer.attribution.clusters import Cluster, Clusters, find_clusters
from gossamer.attribution.contexts import with_contexts
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.graph_loadings import graph_hops, graph_loadings
from gossamer.attribution.head_loadings import HeadLoadings, token_loadings
from gossamer.attribution.held import Held
from gossamer.attribution.replacement import replace_mlps
from gossamer.attribution.result import Method, TokenAttribution
from gossamer.attribution.targets import Kind, Prompt, Target
from gossamer.attribution.weights import token_attribution
from gossamer.circuits.store import Stored
from gossamer.corpus.sequences import Sequences
from gossamer.errors import GossamerError, nearest
from gossamer.models import LoadedModel
from gossamer.transcoders.module import TranscoderSet

if TYPE_CHECKING:
    from gossamer.figures.token_strip import FeatureBox

Measure = Literal["gradient", "direct", "graph"]
IN_GRAPHS: tuple[Kind, ...] = ("centred logit", "logit difference")  # what a graph explains
MOST_BOXES, SMALL_BOX = 3, 0.1  # clusters at a token in a picture, and the share of the token's that they exceed


@dataclass(frozen=True, eq=False)
class FeatureGraph(Stored):
    """What transcoders add: a pruned graph, its edges' loadings, its clusters, and the hops of the unpruned graph."""

    FORMAT: ClassVar[str] = "gossamer feature graph"

    graph: AttributionGraph
    loadings: HeadLoadings
    clusters: Clusters
    hops: HeadLoadings


@dataclass(frozen=True, eq=False)
class Explanation(Stored):
    """One model on one prompt."""

    FORMAT: ClassVar[str] = "gossamer explanation"

    tokens: TokenAttribution
    direct: HeadLoadings
    features: FeatureGraph | None = None

    @property
    def measures(self) -> Mapping[str, TokenAttribution | HeadLoadings]:
        """What there is of `gradient`, `direct` and `graph`."""
        found: dict[str, TokenAttribution | HeadLoadings] = {"gradient": self.tokens, "direct": self.direct}
        return found if self.features is None else found | {"graph": self.features.hops}

    def measure(self, name: str) -> TokenAttribution | HeadLoadings:
        """One of them by name."""
        if name not in self.measures:
            known = ", ".join(self.measures)
            raise GossamerError(f"There is no measure {name!r} of {self.tokens.model}; there are {known}.")
        return self.measures[name]

    def boxes(self) -> list[FeatureBox]:
        """Every token's most influential clusters of features, as boxes of a picture; none without transcoders."""
        if self.features is None:
            return []
        clusters = self.features.clusters
        return [box for position in range(len(clusters.tokens_Q)) for box in _boxes(clusters.at(position))]


def _boxes(clusters: Sequence[Cluster]) -> list[FeatureBox]:
    """The boxes of one token: its strongest cluster, and others that are not small beside all of them."""
    from gossamer.figures.token_strip import FeatureBox

    of_token = sum(one.share for one in clusters)
    chosen = [one for place, one in enumerate(clusters[:MOST_BOXES]) if not place or one.share > SMALL_BOX * of_token]
    labels = [_box_label(one, first=not place) for place, one in enumerate(chosen)]
    return [
        FeatureBox(one.position, label, one.first_layer, one.last_layer, one.share)
        for one, label in zip(chosen, labels, strict=True)
    ]


def _box_label(cluster: Cluster, *, first: bool) -> str:
    """The word that a token's first cluster stands on; of others, and where there is no word, what it promotes."""
    word = cluster.token.strip()
    promoted = ", ".join(_readably(token.strip()) for token in cluster.promoted[:2])
    return word if (first and any(map(str.isalpha, word))) or not promoted else f"→ {promoted}"


def _readably(token: str) -> str:
    """Signs in quotes, so that they are not taken for the label's own."""
    return token if any(map(str.isalnum, token)) else f"‘{token}’"


def explain(
    model: LoadedModel,
    prompt: Prompt,
    target: Target,
    *,
    transcoders: TranscoderSet | None = None,
    method: Method = "gradient",
    held: Held | None = None,
    ablate: Held | None = None,
    text: Sequences | None = None,
) -> Explanation:
    """Attribute a target; `ablate` checks every edge by exact ablation with these parts held.

    `method` and `held` are those of the measure `gradient`, see `token_attribution`. With a `text`, clusters of
    features come with the contexts in it where they are most active.
    """
    if method not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise GossamerError(f"There is no method {method!r}; there are {known}.{nearest(method, get_args(Method))}")
    if transcoders is not None and target.kind not in IN_GRAPHS:
        raise GossamerError(
            f"A graph explains a {' or a '.join(IN_GRAPHS)}, not a {target.kind}; leave out the transcoders."
        )
    tokens = token_attribution(model, prompt, target, method=method, held=held, ablate=ablate)
    features = None if transcoders is None else _features(model, prompt, target, transcoders, text)
    return Explanation(tokens, token_loadings(model, prompt, target), features)


def _features(
    model: LoadedModel, prompt: Prompt, target: Target, transcoders: TranscoderSet, text: Sequences | None
) -> FeatureGraph:
    transcoders.require_model(model)
    asked = [target.token, *target.foils]
    replacement = most_influential(replace_mlps(freeze(model, prompt.ids_T(model)), transcoders), targets=asked)
    whole = attribution_graph(replacement, targets=asked)
    pruned = whole.pruned()
    clusters = find_clusters(pruned, replacement)
    return FeatureGraph(
        pruned,
        graph_loadings(replacement, pruned),
        clusters if text is None else with_contexts(clusters, replacement, text),
        graph_hops(replacement, whole, target),
    )
