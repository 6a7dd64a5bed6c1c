"""Attribution graphs of random models: complete, and every edge a prediction that comes true."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from edge_models import FAMILIES, gated, tiny
from random_transcoders import random_transcoders
from torch import Tensor

from gossamer import GossamerError, LoadedModel
from gossamer.attribution.build import attribution_graph
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.nodes import BIAS, ERROR, FEATURE, LOGIT, TOKEN
from gossamer.attribution.replacement import Replacement, replace_mlps
from gossamer.transcoders import TranscoderSet, from_mlp

IDS = torch.tensor([3, 5, 9, 2, 7, 1, 4])
FAMILY_AND_KIND = [(family, kind) for family in FAMILIES for kind in ("per-layer", "cross-layer")]


def deep(family: str) -> dict[str, int]:
    """Three layers, so that paths can cross attention between a feature and the next but one."""
    return {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}


def make_replacement(
    family: str, kind: str, make: Callable[..., LoadedModel] = gated, **transcoders: int
) -> Replacement:
    model = make(family, **deep(family))
    return replace_mlps(freeze(model, IDS), random_transcoders(model, kind, **transcoders))


def values_with(
    replacement: Replacement, written: Callable[[int, Tensor], Tensor], embedding_QD: Tensor | None = None
) -> np.ndarray:
    """Values of all targets of the graph when the MLPs of the frozen model write something else."""
    inputs = []

    def mlp(layer: int, read_QD: Tensor) -> Tensor:
        inputs.append(read_QD)
        return written(layer, read_QD)

    logits_V = replacement.frozen.forward(embedding_QD, mlp)
    return np.concatenate([replacement.read(torch.stack(inputs)).numpy(), (logits_V - logits_V.mean()).numpy()])


def targets_of(graph: AttributionGraph, values: np.ndarray) -> np.ndarray:
    """Of the values of all features and all logits, those that the graph has."""
    n_features = graph.nodes.n_features
    return np.concatenate([values[:n_features], values[n_features + graph.nodes.number_N[graph.nodes.n_sources :]]])


@pytest.mark.parametrize("make", [tiny, gated], ids=["dense", "gated"])
@pytest.mark.parametrize(("family", "kind"), FAMILY_AND_KIND)
def test_sources_and_bias_sum_to_every_target(family: str, kind: str, make: Callable[..., LoadedModel]) -> None:
    replacement = make_replacement(family, kind, make)
    graph = attribution_graph(replacement)
    model, frozen = replacement.frozen.model, replacement.frozen
    heard = np.concatenate(
        [replacement.transcoders.encode(layer, block.mlp_input_QD).numpy() for layer, block in enumerate(frozen.layers)]
    )
    features = graph.nodes.is_kind(FEATURE)
    assert 0 < features.sum() < heard.size
    np.testing.assert_allclose(np.sort(graph.nodes.value_N[features]), np.sort(heard[heard != 0]), rtol=1e-12)
    logits_V = model.logits(IDS)[0, -1]
    cap = getattr(model.hf.config, "final_logit_softcapping", None)
    logits_V = torch.atanh(logits_V / cap) * cap if cap else logits_V
    expected = torch.cat([torch.from_numpy(graph.nodes.value_N[features]), (logits_V - logits_V.mean())]).numpy()
    np.testing.assert_allclose(graph.effect_TS.sum(1), targets_of(graph, expected), rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(graph.remainder_T, 0, atol=1e-10)


@pytest.mark.parametrize(("family", "kind"), FAMILY_AND_KIND)
def test_every_edge_predicts_its_intervention_in_the_frozen_model(family: str, kind: str) -> None:
    """What a source writes, once more, changes each target by its edge when the features hold still."""
    replacement = make_replacement(family, kind)
    graph, frozen = attribution_graph(replacement), replacement.frozen

    def with_extra(extra_LQD: Tensor, layer: int, _: Tensor) -> Tensor:
        return frozen.layers[layer].mlp_written_QD + extra_LQD[layer]

    plain = values_with(replacement, partial(with_extra, torch.zeros_like(replacement.error_LQD)))
    nodes = graph.nodes
    n_sources = nodes.n_sources - 1  # the bias has its own test
    for source in range(0, n_sources, 3):
        extra_LQD, embedding_QD = torch.zeros_like(replacement.error_LQD), frozen.embedding_QD
        layer, position = int(nodes.layer_N[source]), int(nodes.position_N[source])
        if nodes.kind_N[source] == FEATURE:
            only = torch.zeros_like(replacement.features.activation_N)
            only[source] = replacement.features.activation_N[source]
            extra_LQD = replacement.written(only)
        elif nodes.kind_N[source] == ERROR:
            extra_LQD[layer, position] = replacement.error_LQD[layer, position]
        else:
            embedding_QD = embedding_QD.clone()
            embedding_QD[position] *= 2
        changed = values_with(replacement, partial(with_extra, extra_LQD), embedding_QD)
        effects_T = graph.effect_TS[:, source]
        np.testing.assert_allclose(targets_of(graph, changed - plain), effects_T, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize(("family", "kind"), FAMILY_AND_KIND)
def test_the_bias_node_is_what_is_left_without_tokens_features_and_errors(family: str, kind: str) -> None:
    replacement = make_replacement(family, kind)
    graph, frozen = attribution_graph(replacement), replacement.frozen
    bias_LD = replacement.transcoders.decoder_bias_LD
    nothing_QD = torch.zeros_like(frozen.embedding_QD)
    left = values_with(replacement, lambda layer, _: bias_LD[layer].expand_as(nothing_QD), nothing_QD)
    np.testing.assert_allclose(graph.effect_TS[:, -1], targets_of(graph, left), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["per-layer", "cross-layer"])
def test_total_effects_are_those_of_a_run_in_which_features_respond(kind: str) -> None:
    replacement = make_replacement("llama", kind)
    graph, features = attribution_graph(replacement), replacement.features
    held_F = torch.full_like(features.activation_N, torch.nan)
    held_F[::4] = torch.linspace(-1, 0.5, len(held_F[::4]), dtype=torch.float64)
    responding = replacement.responding(features.activation_N * (1 + held_F))
    changed = values_with(replacement, responding)
    held_NX = np.full((graph.nodes.n_sources, 2), np.nan)
    held_NX[: len(held_F), 0] = held_F.numpy()
    predicted_TX = graph.total_effects(held_NX)
    np.testing.assert_allclose(graph.value_T + predicted_TX[:, 0], targets_of(graph, changed), rtol=1e-9, atol=1e-11)
    assert not predicted_TX[:, 1].any()


@pytest.mark.parametrize("activation", ["relu", "topk"])
def test_graphs_of_other_activations_are_complete(activation: str) -> None:
    model = gated("gpt2")
    transcoders = random_transcoders(model, "cross-layer", activation=activation)
    graph = attribution_graph(replace_mlps(freeze(model, IDS), transcoders))
    assert 0 < graph.nodes.n_features < 2 * 12 * len(IDS)
    np.testing.assert_allclose(graph.remainder_T, 0, atol=1e-10)


@pytest.mark.parametrize("make", [tiny, gated], ids=["dense", "gated"])
def test_transcoders_copied_from_relu_mlps_leave_no_error(make: Callable[..., LoadedModel]) -> None:
    model = make("gpt2", n_layer=3, activation_function="relu")
    replacement = replace_mlps(freeze(model, IDS), from_mlp(model), leave_out=())
    graph = attribution_graph(replacement)
    assert float(replacement.error_LQD.abs().max()) <= 1e-12
    is_error_S = graph.nodes.is_kind(ERROR)[: graph.nodes.n_sources]
    np.testing.assert_allclose(graph.effect_TS[:, is_error_S], 0, atol=1e-12)
    np.testing.assert_allclose(graph.effect_TS[:, ~is_error_S].sum(1), graph.value_T, rtol=1e-12, atol=1e-12)
    without = [replacement.written(replacement.features.activation_N)[layer] for layer in range(3)]
    bias_LD = replacement.transcoders.decoder_bias_LD
    logits_V = replacement.frozen.forward(mlp=lambda layer, _: without[layer] + bias_LD[layer])
    torch.testing.assert_close(logits_V, model.logits(IDS)[0, -1], rtol=1e-12, atol=1e-12)
    assert graph.scores.replacement > 1 - 1e-9
    assert len(replace_mlps(freeze(model, IDS), from_mlp(model)).features) < len(replacement.features)


def test_the_most_influential_features_are_kept_and_the_graph_stays_complete() -> None:
    replacement = make_replacement("gpt2", "cross-layer")
    whole = attribution_graph(replacement)
    graph = attribution_graph(replacement, max_features=20)
    assert graph.nodes.n_features == 20 < whole.nodes.n_features == graph.n_active_features
    np.testing.assert_allclose(graph.remainder_T, 0, atol=1e-10)
    assert graph.scores.error_share > whole.scores.error_share
    kept = set(graph.nodes.identities())
    is_feature_N = whole.nodes.is_kind(FEATURE)
    is_kept_N = np.array([key in kept for key in whole.nodes.identities()])
    of_kept = whole.influence_N[is_feature_N & is_kept_N].mean()
    assert of_kept > 1.5 * whole.influence_N[is_feature_N & ~is_kept_N].mean()


def test_influence_is_the_sum_over_all_paths() -> None:
    graph = attribution_graph(make_replacement("gpt2", "cross-layer"))
    nodes = graph.nodes
    size_TS = np.abs(graph.effect_TS)
    size_TS[:, nodes.is_kind(BIAS)[: nodes.n_sources]] = 0
    step_NN = np.zeros((len(nodes), len(nodes)))
    step_NN[nodes.target_nodes_T, : nodes.n_sources] = size_TS / size_TS.sum(1, keepdims=True)
    paths_NN = np.linalg.inv(np.eye(len(nodes)) - step_NN)
    np.testing.assert_allclose(graph.influence_N, graph.probability_K @ paths_NN[nodes.is_kind(LOGIT)], rtol=1e-9)
    begins = graph.influence_N[nodes.is_kind(TOKEN) | nodes.is_kind(ERROR)].sum()
    np.testing.assert_allclose(begins, graph.probability_K.sum())
    tokens = graph.influence_N[nodes.is_kind(TOKEN)].sum()
    np.testing.assert_allclose(graph.scores.replacement, tokens / begins)


def test_pruning_keeps_what_was_asked_for_and_leaves_no_dead_ends() -> None:
    graph = attribution_graph(make_replacement("llama", "cross-layer"))
    sizes = []
    for part in (0.3, 0.6, 0.9):
        pruned = graph.pruned(node_part=part, edge_part=part)
        nodes = pruned.nodes
        sizes.append((len(nodes), pruned.n_edges))
        used_TS = pruned.effect_TS[:, : nodes.n_sources - 1] != 0
        assert used_TS.any(1)[: nodes.n_features].all()
        fed_S = used_TS.any(0)
        assert fed_S[~nodes.is_kind(TOKEN)[: nodes.n_sources - 1]].all()
        assert nodes.n_of_kind[TOKEN] == len(IDS)
        place = {key: index for index, key in enumerate(graph.nodes.identities())}
        there_N = np.array([place[key] for key in nodes.identities()])
        row_of_node = {int(node): row for row, node in enumerate(graph.nodes.target_nodes_T)}
        rows = [row_of_node[there_N[node]] for node in nodes.target_nodes_T]
        same_TS = graph.effect_TS[rows][:, there_N[: nodes.n_sources]]
        np.testing.assert_array_equal(pruned.effect_TS, np.where(pruned.effect_TS != 0, same_TS, 0))
        assert pruned.scores == graph.scores
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1] < (len(graph.nodes), graph.n_edges)
    with pytest.raises(GossamerError, match="node part to keep is"):
        graph.pruned(node_part=1.5)


def test_graphs_come_back_from_disk(tmp_path) -> None:
    graph = attribution_graph(make_replacement("gpt2", "per-layer"))
    for original in (graph, graph.pruned()):
        path = original.save(tmp_path / "graph.safetensors")
        loaded = AttributionGraph.load(path)
        np.testing.assert_array_equal(loaded.effect_TS, original.effect_TS)
        assert loaded.nodes.identities() == original.nodes.identities()
        assert (loaded.scores, loaded.pruning) == (original.scores, original.pruning)
        assert loaded.provenance["model"]["weights_sha256"] == original.provenance["model"]["weights_sha256"]


def test_targets_can_be_named() -> None:
    replacement = make_replacement("gpt2", "per-layer")
    graph = attribution_graph(replacement, targets=[8, 2])
    assert graph.nodes.number_N[graph.nodes.is_kind(LOGIT)].tolist() == [8, 2]
    assert graph.logit_row(2) == graph.n_targets - 1
    with pytest.raises(GossamerError, match="Token 5 is no target of this graph"):
        graph.logit_row(5)
    for wrong in ([], [3, 3], [-1], [99]):
        with pytest.raises(GossamerError, match="target tokens"):
            attribution_graph(replacement, targets=wrong)


def test_transcoders_that_do_not_fit_are_refused() -> None:
    model = tiny("gpt2")
    frozen, good = freeze(model, IDS), random_transcoders(model, "per-layer")
    other = random_transcoders(tiny("gpt2", n_layer=3), "per-layer")
    with pytest.raises(GossamerError, match="for a model of 3 layers and width 12, but gpt2 has 2 layers"):
        replace_mlps(frozen, other)
    with pytest.raises(GossamerError, match="skip connection"):
        replace_mlps(frozen, TranscoderSet(good.shape, replace(good.weights(), skip_LDD=torch.zeros(2, 12, 12))))
    with pytest.raises(GossamerError, match=r"float32 on cpu and gpt2 is torch\.float64"):
        replace_mlps(frozen, copy.deepcopy(good).float())
    with pytest.raises(GossamerError, match="room for at least one feature"):
        attribution_graph(replace_mlps(frozen, good), max_features=0)
