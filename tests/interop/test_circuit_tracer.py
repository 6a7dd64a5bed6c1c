"""The same graph from circuit-tracer, which lives in an environment of its own because it pins an older transformers.

    python -m venv .venv-circuit-tracer
    .venv-circuit-tracer/bin/pip install torch==2.13.0
    .venv-circuit-tracer/bin/pip install circuit-tracer==0.5.0
    make interop

Two differences are by design and allowed for: the error at the first position, and what leaves the bias out.
circuit-tracer gives what MLPs write at the first position to no node; our error nodes there are dropped beforehand.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gossamer import LoadedModel
from gossamer.attribution.build import attribution_graph
from gossamer.attribution.clusters import find_clusters
from gossamer.attribution.export import write_circuit_tracer
from gossamer.attribution.frozen import freeze
from gossamer.attribution.graph import AttributionGraph
from gossamer.attribution.graph_loadings import graph_loadings
from gossamer.attribution.influence import node_influence, scores
from gossamer.attribution.nodes import BIAS, ERROR, FEATURE
from gossamer.attribution.replacement import replace_mlps
from gossamer.corpus import tokenizer as language_tokenizer
from gossamer.models.checkpoint import finish
from gossamer.transcoders import TranscoderSet, TranscoderShape, Weights, load
from gossamer.transcoders.circuit_tracer import write_circuit_tracer as write_transcoders

PYTHON = Path(os.environ.get("CIRCUIT_TRACER_PYTHON", ".venv-circuit-tracer/bin/python"))
PROMPT = 'The opposite of "large" is "'

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON} has no circuit-tracer; see the head of this file"),
]


@dataclass(frozen=True)
class Both:
    """Our graph, circuit-tracer's, and what it made of our file."""

    ours: AttributionGraph
    theirs: dict[str, np.ndarray]
    opened: dict[str, Any]
    exported: dict[str, Any]


def make_model() -> LoadedModel:
    torch.manual_seed(0)
    tokenizer = language_tokenizer.load()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=32, n_embd=24, n_layer=4, n_head=3, bos_token_id=0, eos_token_id=0
    )
    hf = GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            parameter.normal_(1.0 if ".ln_" in name and "weight" in name else 0.0, 0.25)
    return finish(hf.eval(), name="tiny", source="a test", tokenizer=tokenizer, device="cpu")


def make_transcoders(model: LoadedModel, kind: str) -> TranscoderSet:
    shape = TranscoderShape(kind, model.anatomy.n_layers, 40, model.anatomy.d_model, "jumprelu")
    size = (shape.n_layers, shape.n_features)
    weights = Weights(
        encoder_LFD=torch.randn(*size, shape.width) * 0.3,
        encoder_bias_LF=torch.randn(size) * 0.3,
        decoder_FTD=[torch.randn(40, len(shape.targets(layer)), shape.width) * 0.1 for layer in range(shape.n_layers)],
        decoder_bias_LD=torch.randn(shape.n_layers, shape.width) * 0.1,
        threshold_LF=torch.rand(size) * 1.5,
    )
    return TranscoderSet(shape, weights, {"skips_first_position": True})


@pytest.fixture(scope="module", params=["per-layer", "cross-layer"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model()
    model.hf.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    write_transcoders(make_transcoders(model, request.param), folder / "transcoders")
    ids = model.encode(PROMPT)
    replacement = replace_mlps(freeze(model, ids), load(folder / "transcoders"), leave_out=(0,))
    ours = attribution_graph(replacement)
    targets = ours.nodes.number_N[ours.nodes.n_sources :].tolist()
    (folder / "request.json").write_text(json.dumps({"ids": ids.tolist(), "targets": targets}), "utf-8")
    pruned = ours.pruned()
    written = write_circuit_tracer(
        pruned,
        folder / "graphs",
        slug="ours",
        scan="tiny",
        loadings=graph_loadings(replacement, pruned),
        clusters=find_clusters(pruned, replacement),
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    script = Path(__file__).parent / "circuit_tracer_side.py"
    done = subprocess.run([str(PYTHON), str(script), str(folder)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return Both(
        ours,
        dict(np.load(folder / "answer.npz")),
        json.loads((folder / "opened.json").read_text("utf-8")),
        json.loads(written.read_text("utf-8")),
    )


def without_first_errors_and_bias(graph: AttributionGraph) -> np.ndarray:
    """Our effects as circuit-tracer sees them: nothing from errors at the first position."""
    nodes = graph.nodes
    effect_TS = graph.effect_TS.copy()
    effect_TS[:, ((nodes.kind_N == ERROR) & (nodes.position_N == 0))[: nodes.n_sources]] = 0
    return effect_TS


def test_features_and_activations_are_the_same(both: Both) -> None:
    nodes, is_feature_N = both.ours.nodes, both.ours.nodes.is_kind(FEATURE)
    here = np.stack([nodes.layer_N, nodes.position_N, nodes.number_N], axis=1)[is_feature_N]
    assert len(here) > 50
    np.testing.assert_array_equal(here, both.theirs["features"])
    np.testing.assert_allclose(nodes.value_N[is_feature_N], both.theirs["activations"], rtol=1e-3, atol=1e-4)


def test_direct_effects_are_the_same(both: Both) -> None:
    nodes = both.ours.nodes
    here_TS = np.delete(without_first_errors_and_bias(both.ours), nodes.is_kind(BIAS)[: nodes.n_sources], axis=1)
    n_logits = nodes.n_of_kind[-1]
    rows = [*range(nodes.n_features), *range(-n_logits, 0)]
    there_TS = both.theirs["adjacency"][rows][:, :-n_logits]
    assert there_TS.shape == here_TS.shape
    np.testing.assert_allclose(here_TS, there_TS, rtol=1e-3, atol=1e-4 * np.abs(there_TS).max())


def test_influence_of_every_node_and_both_scores_are_the_same(both: Both) -> None:
    nodes = both.ours.nodes
    np.testing.assert_allclose(both.ours.probability_K, both.theirs["probabilities"], rtol=1e-3)
    effect_TS = without_first_errors_and_bias(both.ours)
    influence_N = node_influence(nodes, effect_TS, both.ours.probability_K)
    sources = ~nodes.is_kind(BIAS)[: nodes.n_sources]
    here_S, there_S = influence_N[: nodes.n_sources][sources], both.theirs["influence"][: sources.sum()]
    np.testing.assert_allclose(here_S, there_S, rtol=2e-3, atol=1e-5 * there_S.max())
    ours = scores(nodes, effect_TS, influence_N)
    np.testing.assert_allclose([ours.replacement, ours.completeness], both.theirs["scores"], rtol=1e-3)


def test_our_file_opens_there(both: Both) -> None:
    """With all that is ours in it: the heads of every link, and clusters as supernodes."""
    assert all({"heads", "no_head", "other_positions"} <= set(link) for link in both.exported["links"])
    assert any(link["heads"] for link in both.exported["links"])
    assert both.opened["read"]["qParams"]["supernodes"] == both.exported["qParams"]["supernodes"] != []
    assert both.opened["read"]["metadata"]["slug"] == "ours"
    assert len(both.opened["read"]["nodes"]) == len(both.exported["nodes"])
    assert both.opened["read"]["links"] == both.exported["links"]
    served = both.opened["served"]
    assert "attribution graph" in served[""].lower()
    assert json.loads(served["graph_data/ours.json"]) == both.exported
    assert json.loads(served["data/graph-metadata.json"])["graphs"][0]["slug"] == "ours"
