"""Tiny random models, random transcoders for them, and random text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gossamer.corpus.sequences import Sequences
from gossamer.models import LoadedModel
from gossamer.models.checkpoint import finish
from gossamer.transcoders import TranscoderSet, TranscoderShape, Weights
from gossamer.transcoders.belonging import belonging_to

N_VOCABULARY, LENGTH = 29, 12
GPT2: dict[str, Any] = {"n_embd": 12, "n_layer": 3, "n_head": 2, "n_positions": LENGTH, "n_inner": 20}
SIZES: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": LENGTH,
}
NEOX = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": NEOX | {"use_parallel_residual": True},
    "llama": SIZES,
    "olmo2": {name: size for name, size in SIZES.items() if name != "head_dim"},
    "gemma2": SIZES | {"sliding_window": 4, "query_pre_attn_scalar": 4},
}


def make_model(
    family: str = "gpt2", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> LoadedModel:
    """A random model whose MLPs write something worth explaining."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": N_VOCABULARY}
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(FAMILIES[family] | ids | changes)))
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 and family != "gpt2" else 0.0, 0.3)
        if family == "gpt2":
            for block in hf.transformer.h:
                block.ln_2.weight.fill_(1.0)
    return finish(hf.eval().to(dtype), name=family, source="test", layout="test", tokenizer=None, device="cpu")


def make_text(n: int, *, seed: int = 0, segments: bool = False) -> Sequences:
    generator = np.random.default_rng(seed)
    ids_NT = generator.integers(1, N_VOCABULARY, (n, LENGTH))
    ids_NT[:, 0] = 0
    if not segments:
        return Sequences(ids_NT)
    ids_NT[:, 5] = 0
    segments_NT = np.zeros_like(ids_NT)
    segments_NT[:, 5:] = 1
    return Sequences(ids_NT, segments_NT)


def make_transcoders(
    kind: str = "cross-layer",
    activation: str = "jumprelu",
    *,
    model: LoadedModel | None = None,
    skip: bool = False,
    n_layers: int = 3,
    n_features: int = 7,
    width: int = 12,
    seed: int = 0,
) -> TranscoderSet:
    """Random transcoders with thresholds at which some features are on and some off."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=draw)

    shape = TranscoderShape(kind, n_layers, n_features, width, activation, 3 if activation == "topk" else None)  # type: ignore[arg-type]
    weights = Weights(
        encoder_LFD=normal(n_layers, n_features, width),
        encoder_bias_LF=normal(n_layers, n_features),
        decoder_FTD=[normal(n_features, len(shape.targets(source)), width) for source in range(n_layers)],
        decoder_bias_LD=normal(n_layers, width),
        threshold_LF=normal(n_layers, n_features).abs() if activation == "jumprelu" else None,
        skip_LDD=normal(n_layers, width, width) if skip else None,
    )
    return TranscoderSet(shape, weights, belonging_to(model) if model else {})


@pytest.fixture(scope="module")
def relu_model() -> LoadedModel:
    """A GPT-2 whose MLPs are hidden layers of ReLUs."""
    return make_model("gpt2", activation_function="relu")


@pytest.fixture
def model() -> Callable[..., LoadedModel]:
    return make_model


@pytest.fixture
def text() -> Callable[..., Sequences]:
    return make_text


@pytest.fixture
def transcoders() -> Callable[..., TranscoderSet]:
    return make_transcoders
