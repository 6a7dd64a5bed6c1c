"""What circuit-tracer makes of a model and transcoders in a folder; run by `test_circuit_tracer.py` in its environment.

    python circuit_tracer_side.py FOLDER

FOLDER/model          a GPT-2 as transformers saves it, tokenizer included
FOLDER/transcoders    in circuit-tracer's layout
FOLDER/request.json   {"ids": [...], "targets": [...]}
FOLDER/graphs         a graph of ours, to be opened by circuit-tracer's page
FOLDER/answer.npz     written: its graph, its influence of every node, its scores
FOLDER/opened.json    written: our graph as its code read it, and as its server hands it out
"""

from __future__ import annotations

import json
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from circuit_tracer import attribute
from circuit_tracer.frontend.graph_models import Model
from circuit_tracer.frontend.local_server import serve
from circuit_tracer.graph import compute_graph_scores, compute_node_influence
from circuit_tracer.replacement_model.replacement_model_transformerlens import TransformerLensReplacementModel
from circuit_tracer.utils.hf_utils import load_transcoder_from_hub
from transformer_lens import HookedTransformerConfig
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast


def replacement_model(folder: Path) -> Any:
    """The model in TransformerLens' layout, nothing folded or centred, with the transcoders around its MLPs."""
    hf = GPT2LMHeadModel.from_pretrained(folder / "model", dtype=torch.float32)
    config = HookedTransformerConfig(
        n_layers=hf.config.n_layer,
        d_model=hf.config.n_embd,
        d_head=hf.config.n_embd // hf.config.n_head,
        n_heads=hf.config.n_head,
        d_mlp=hf.config.n_inner or 4 * hf.config.n_embd,
        d_vocab=hf.config.vocab_size,
        n_ctx=hf.config.n_positions,
        act_fn=hf.config.activation_function,
        eps=hf.config.layer_norm_epsilon,
        normalization_type="LN",
        model_name="tiny",
        device="cpu",
        dtype=torch.float32,
    )
    transcoders, _ = load_transcoder_from_hub(str(folder / "transcoders"), dtype=torch.float32)
    model = TransformerLensReplacementModel(config)
    model.load_state_dict(convert_gpt2_weights(hf, config), strict=False)
    begin = json.loads((folder / "model" / "tokenizer_config.json").read_text("utf-8"))["bos_token"]
    model.tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "model" / "tokenizer.json"), bos_token=begin, eos_token=begin
    )
    model._configure_replacement_model(transcoders)
    return model


def answer(folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text("utf-8"))
    model = replacement_model(folder)
    targets = torch.tensor(request["targets"])
    graph = attribute(torch.tensor(request["ids"]), model, attribution_targets=targets, verbose=False)
    weight_N = torch.zeros(len(graph.adjacency_matrix))
    weight_N[-len(graph.logit_probabilities) :] = graph.logit_probabilities
    np.savez(
        folder / "answer.npz",
        features=graph.active_features[graph.selected_features].numpy(),
        activations=graph.activation_values[graph.selected_features].numpy(),
        adjacency=graph.adjacency_matrix.numpy(),
        probabilities=graph.logit_probabilities.numpy(),
        influence=compute_node_influence(graph.adjacency_matrix, weight_N).numpy(),
        scores=np.array(compute_graph_scores(graph)),
    )


def opened(folder: Path) -> None:
    graphs = folder / "graphs"
    (path,) = [path for path in graphs.glob("*.json") if path.name != "graph-metadata.json"]
    read = Model.model_validate_json(path.read_text("utf-8"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = serve(str(graphs), port=port)
    try:
        served = {}
        for page in ("", "data/graph-metadata.json", f"graph_data/{path.name}"):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=20) as reply:
                served[page] = reply.read().decode()
    finally:
        server.stop()
    (folder / "opened.json").write_text(json.dumps({"read": read.model_dump(), "served": served}), "utf-8")


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
    opened(Path(sys.argv[1]))
