"""Clusters: every kept feature in one of them, alike inside, and labelled by what they promote."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from edge_models import gated
from random_transcoders import random_transcoders

from gossamer import GossamerError, load
from gossamer.attribution.build import attribution_graph
from gossamer.attribution.clusters import Cluster, Clusters, find_clusters, joined
from gossamer.attribution.contexts import with_contexts
from gossamer.attribution.explain import Explanation
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.nameable import Nameable
from gossamer.attribution.replacement import Replacement, replace_mlps
from gossamer.corpus import Sequences

IDS = torch.tensor([3, 5, 9, 2, 7, 1, 4])


@pytest.fixture(scope="module")
def made() -> tuple[AttributionGraph, Replacement]:
    model = gated("gpt2", n_layer=3)
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, "cross-layer", n_features=20))
    return attribution_graph(replacement).pruned(node_part=0.9), replacement


def test_joining_stops_where_groups_are_no_longer_alike() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0.95, 0], [0, 1], [0.1, 1.0]])
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    likeness = unit @ unit.T
    assert sorted(group.tolist() for group in joined(likeness, 0.5)) == [[0, 1, 2], [3, 4]]
    assert len(joined(likeness, 0.9999)) == 4  # the first and the third have one direction
    assert len(joined(likeness, -1)) == 1
    assert joined(np.zeros((0, 0)), 0.5) == []


def test_groups_hold_more_alike_pairs_than_they_leave_apart() -> None:
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(30, 4))
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    likeness = unit @ unit.T
    groups = joined(likeness, 0.3)
    assert sorted(np.concatenate(groups).tolist()) == list(range(30))
    for one in range(len(groups)):
        for other in range(one):
            assert likeness[np.ix_(groups[one], groups[other])].mean() <= 0.3 + 1e-12


def test_every_feature_is_in_one_cluster_of_its_position(made: tuple[AttributionGraph, Replacement]) -> None:
    graph, replacement = made
    clusters = find_clusters(graph, replacement)
    members = [feature for cluster in clusters.clusters for feature in cluster.features]
    assert len(members) == len(set(members)) == graph.nodes.n_features > len(clusters.clusters) > 1
    for cluster in clusters.clusters:
        assert {position for _, position, _ in cluster.features} == {cluster.position}
        layers = [layer for layer, _, _ in cluster.features]
        assert (cluster.first_layer, cluster.last_layer) == (min(layers), max(layers))
    np.testing.assert_allclose(sum(cluster.share for cluster in clusters.clusters), 1)
    assert clusters.by_share()[0].share == max(cluster.share for cluster in clusters.clusters)
    assert len(find_clusters(graph, replacement, alike=1.0).clusters) >= len(clusters.clusters)


def test_promoted_tokens_are_those_whose_logits_the_writing_raises_most(
    made: tuple[AttributionGraph, Replacement],
) -> None:
    """Of a cluster at the last position: writing to the last block goes straight to the logits."""
    graph, replacement = made
    model = replacement.frozen.model
    cluster = find_clusters(graph, replacement).at(len(IDS) - 1)[0]
    written_D = sum(
        replacement.transcoders.decoder(layer, target)[number] * _activation(replacement, (layer, position, number))
        for layer, position, number in cluster.features
        for target in range(layer, 3)
    )
    norm = model.hf.transformer.ln_f
    read_D = (written_D - written_D.mean()) * norm.weight.detach()
    logits_V = model.hf.lm_head.weight.detach() @ read_D
    best = (logits_V - logits_V.mean()).topk(len(cluster.promoted)).indices.tolist()
    assert cluster.promoted == tuple(map(str, best))
    word = "layers" if "–" in cluster.layers else "layer"
    assert cluster.label == f"4 ({word} {cluster.layers}): {best[0]}, {best[1]}"


def test_labels_name_only_what_a_reader_can_read_and_training_has_seen() -> None:
    """The bundled vocabulary has control characters, halves of letters, and single letters that no text ever had."""
    model = load("bundled/dense")
    nameable = Nameable(model, model.hf.get_output_embeddings().weight.detach())
    spelling = {model.tokenizer.decode([token]): token for token in reversed(range(len(model.tokenizer)))}
    unfit = [model.tokenizer.bos_token_id, *(spelling[text] for text in ("\x1b", "\ufffd", " ", "\n", "u", "R"))]
    raised_V = torch.full((len(model.tokenizer),), -1.0)
    raised_V[unfit] = torch.arange(20.0, 20 - len(unfit), -1)
    assert nameable.best(raised_V, 5) == ()
    raised_V[spelling["small"]], raised_V[spelling[" short"]] = 1.0, 0.5
    assert nameable.best(raised_V, 5) == ("small",)  # no text of the language has ` short`, with a space
    raised_V[spelling["short"]] = 2.0
    assert nameable.best(raised_V, 5) == ("short", "small")
    assert nameable.best(raised_V, 1) == ("short",)


def test_a_label_without_promoted_tokens_is_the_token_and_its_layers() -> None:
    assert Cluster(3, " large", ((0, 3, 1), (2, 3, 4)), 0, 2, 0.5, ()).label == "large (layers 0–2)"
    assert Cluster(3, " large", ((2, 3, 4),), 2, 2, 0.5, (" small", "b")).label == "large (layer 2): small, b"


def test_boxes_are_chosen_token_by_token() -> None:
    """A token whose features matter little beside another's still has its strongest box; small ones are left out."""

    def cluster(position: int, token: str, share: float, promoted: tuple[str, ...] = ("a", ":")) -> Cluster:
        return Cluster(position, token, ((0, position, 1), (2, position, 7)), 0, 2, share, promoted)

    of_last = [cluster(2, ' "', share) for share in (0.5, 0.3, 0.1, 0.06)]
    of_word = [cluster(1, " large", 0.02), cluster(1, " large", 0.01), cluster(1, " large", 0.001)]
    clusters = Clusters("", ("<bos>", " large", ' "'), (*of_word, *of_last), 0.3, {})
    features = SimpleNamespace(clusters=clusters)
    boxes = Explanation(tokens=None, direct=None, features=features).boxes()  # type: ignore[arg-type]
    assert [(box.position, box.share) for box in boxes] == [(1, 0.02), (1, 0.01), (2, 0.5), (2, 0.3), (2, 0.1)]
    assert [box.label for box in boxes] == ["large", "→ a, ‘:’", "→ a, ‘:’", "→ a, ‘:’", "→ a, ‘:’"]
    assert {(box.layer_from, box.layer_to) for box in boxes} == {(0, 2)}
    assert Explanation(tokens=None, direct=None).boxes() == []  # type: ignore[arg-type]


def _activation(replacement: Replacement, key: tuple[int, int, int]) -> float:
    features = replacement.features
    place = (features.layer_N == key[0]) & (features.position_N == key[1]) & (features.feature_N == key[2])
    return float(features.activation_N[place])


def test_contexts_are_where_the_cluster_is_most_active(made: tuple[AttributionGraph, Replacement]) -> None:
    graph, replacement = made
    text = Sequences(torch.cat([IDS[None], torch.randint(1, 31, (5, len(IDS)))]).numpy())
    found = with_contexts(find_clusters(graph, replacement), replacement, text, n=6)
    for cluster in found.clusters:
        activations = [context.activation for context in cluster.contexts]
        assert activations == sorted(activations, reverse=True)
        if cluster.position:  # in the prompt itself it is at least as active as at its own place
            here = sum(_activation(replacement, key) for key in cluster.features)
            assert activations[0] >= here - 1e-9


def test_clusters_come_back_from_disk(made: tuple[AttributionGraph, Replacement], tmp_path) -> None:
    clusters = find_clusters(*made)
    assert Clusters.load(clusters.save(tmp_path / "clusters.safetensors")) == clusters
    with pytest.raises(GossamerError, match="Likeness is between -1 and 1"):
        find_clusters(*made, alike=2)
