"""Interventions in the model itself, checked by other means, and the graph's predictions of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from edge_models import FAMILIES, again, gated, tiny
from random_transcoders import random_transcoders
from torch import Tensor, nn

from gossamer import GossamerError, LoadedModel
from gossamer.attention import ForceShut, tape
from gossamer.attribution.build import attribution_graph
from gossamer.attribution.frozen import freeze
from gossamer.attribution.interventions import (
    Intervention,
    ScaleAttention,
    ScaleFeatures,
    measured_change,
    predicted_change,
    recomputed_change,
)
from gossamer.attribution.replacement import Replacement, replace_mlps
from gossamer.transcoders import from_mlp

IDS = torch.tensor([3, 5, 9, 2, 7, 1, 4])


def keys(replacement: Replacement) -> list[tuple[int, int, int]]:
    features = replacement.features
    return list(zip(features.layer_N.tolist(), features.position_N.tolist(), features.feature_N.tolist(), strict=True))


def copied(model: LoadedModel) -> Replacement:
    return replace_mlps(freeze(model, IDS), from_mlp(model), leave_out=())


def without_norms(model: LoadedModel) -> LoadedModel:
    """Then whatever is written last reaches the logits as it is."""
    for block in model.hf.transformer.h:
        block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
    model.hf.transformer.ln_f = nn.Identity()
    return again(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_scaling_by_one_changes_nothing(family: str) -> None:
    model = gated(family)
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, "cross-layer"))
    for intervention in (
        ScaleFeatures(tuple(keys(replacement)[::3]), 1.0),
        ScaleAttention(0, 1, factor=1.0),
        ScaleAttention(1, 2, query=4, key=2, factor=1.0),
    ):
        for change in (predicted_change, recomputed_change, measured_change):
            np.testing.assert_allclose(change(replacement, intervention), 0, atol=1e-12)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_scaling_features_is_scaling_neurons_where_they_are_the_same(factor: float) -> None:
    """In several layers at once: later neurons are held, whatever earlier ones do to them."""
    model = gated("gpt2", n_layer=3, activation_function="relu")
    replacement = copied(model)
    chosen = keys(replacement)[::2]
    clean = dict(zip(keys(replacement), replacement.features.activation_N.tolist(), strict=True))
    handles = []
    for index, block in enumerate(model.hf.transformer.h):

        def hold(module: nn.Module, args: tuple[Tensor], hidden_BTF: Tensor, layer: int = index) -> Tensor:
            held_BTF = hidden_BTF.clone()
            for at, position, number in chosen:
                if at == layer:
                    held_BTF[0, position, number] = clean[at, position, number] * factor
            return held_BTF

        handles.append(block.mlp.act.register_forward_hook(hold))
    expected_V = model.logits(IDS)[0, -1]
    for handle in handles:
        handle.remove()
    expected_V = expected_V - model.logits(IDS)[0, -1]
    assert float(expected_V.abs().max()) > 0.01
    measured_V = measured_change(replacement, ScaleFeatures(tuple(chosen), factor))
    torch.testing.assert_close(measured_V, expected_V, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [tiny, gated])
def test_taking_an_edge_or_a_head_away_is_shutting_it(make: Callable[[str], LoadedModel]) -> None:
    model = make("llama")
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, "per-layer"))
    pattern_HQK = replacement.frozen.layers[0].pattern_HQK
    head, query, key = ((pattern_HQK > 0.05) & (pattern_HQK < 0.9)).nonzero()[0].tolist()
    clean_V = model.logits(IDS)[0, -1]
    for intervention in (ScaleAttention(0, head, query, key), ScaleAttention(0, head)):
        shut_HQK = intervention.pattern(torch.ones_like(pattern_HQK)) == 0
        with tape(model.hf, replace=[ForceShut(0, shut_HQK[None])]):
            expected_V = model.logits(IDS)[0, -1] - clean_V
        assert float(expected_V.abs().max()) > 1e-3
        measured_V = measured_change(replacement, intervention)
        torch.testing.assert_close(measured_V, expected_V, rtol=1e-9, atol=1e-12)


def test_predictions_come_true_where_nothing_behind_the_intervention_is_frozen_or_approximate() -> None:
    """In the last block of a model without norms only the MLP follows, and it as its features do."""
    model = without_norms(gated("gpt2", activation_function="relu"))
    replacement = copied(model)
    last = tuple(key for key in keys(replacement) if key[0] == 1 and key[1] == len(IDS) - 1)
    for intervention in (ScaleFeatures(last), ScaleFeatures(last[::2], 3.0), ScaleAttention(1, 2, factor=1 - 1e-4)):
        predicted_V = predicted_change(replacement, intervention)
        assert float(predicted_V.abs().max()) > 1e-6
        torch.testing.assert_close(measured_change(replacement, intervention), predicted_V, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("of_features", [True, False])
def test_where_features_are_neurons_recomputing_gives_what_the_model_does(of_features: bool) -> None:
    """Norms and patterns move; the change is so small that no neuron which was off comes on."""
    replacement = copied(gated("gpt2", n_layer=3, activation_function="relu"))
    first = tuple(key for key in keys(replacement) if key[0] == 0)
    intervention: Intervention = (
        ScaleFeatures(first, 1 - 1e-6) if of_features else ScaleAttention(0, 1, factor=1 - 1e-6)
    )
    measured_V = measured_change(replacement, intervention)
    torch.testing.assert_close(recomputed_change(replacement, intervention), measured_V, rtol=1e-6, atol=1e-13)
    graph_misses_V = predicted_change(replacement, intervention) - measured_V
    assert float(graph_misses_V.abs().max()) > 0.01 * float(measured_V.abs().max()) > 1e-10


def test_a_feature_that_falls_below_its_threshold_goes_off() -> None:
    replacement = copied(gated("gpt2", activation_function="relu"))
    nothing_N = torch.full_like(replacement.features.activation_N, torch.nan)
    reads_QD = replacement.frozen.layers[0].mlp_input_QD
    for may_go_off in (False, True):
        turned_QD = replacement.responding(nothing_N, may_go_off=may_go_off)(0, -reads_QD)
        linear_QD = replacement.responding(nothing_N)(0, -reads_QD)
        assert torch.equal(turned_QD, linear_QD) is not may_go_off
    same = replacement.responding(nothing_N, may_go_off=True)(0, reads_QD)
    torch.testing.assert_close(same, replacement.frozen.layers[0].mlp_written_QD)


def test_the_graphs_total_effects_are_the_replacement_models_predictions() -> None:
    model = gated("qwen3", num_hidden_layers=3)
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, "cross-layer"))
    graph = attribution_graph(replacement, targets=[4, 11])
    chosen = keys(replacement)[1::3]
    held_NX = np.full((graph.nodes.n_sources, 1), np.nan)
    held_NX[1 : graph.nodes.n_features : 3] = -1
    change_V = predicted_change(replacement, ScaleFeatures(tuple(chosen)))
    expected_K = (change_V - change_V.mean())[[4, 11]]
    np.testing.assert_allclose(graph.total_effects(held_NX)[-2:, 0], expected_K, rtol=1e-9)


def test_what_is_not_there_cannot_be_scaled() -> None:
    model = tiny("gpt2")
    replacement = replace_mlps(freeze(model, IDS), random_transcoders(model, "per-layer"))
    with pytest.raises(GossamerError, match="Feature 99 of layer 0 is not active at position 2"):
        predicted_change(replacement, ScaleFeatures(((0, 2, 99),)))
    with pytest.raises(GossamerError, match="at least one"):
        measured_change(replacement, ScaleFeatures(()))
    for change in (predicted_change, recomputed_change, measured_change):
        with pytest.raises(GossamerError, match="no such head or edge"):
            change(replacement, ScaleAttention(0, 7))
        with pytest.raises(GossamerError, match="no such head or edge"):
            change(replacement, ScaleAttention(0, 1, query=7))
