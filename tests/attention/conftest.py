"""Tiny random models of every family, in float64, with gates that are neither all open nor all closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gossamer.attention import AttentionSite, GateConfig, attach_gates, attentions_of, gates_of, tape

VOCABULARY = 40
LAYERS, HEADS = 2, 4
SHARED = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
DECODER = {
    **SHARED,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**SHARED, "n_embd": 24, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
             "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {**DECODER, "rotary_pct": 0.5},
    "llama": DECODER,
    "qwen3": DECODER,
    "olmo2": DECODER,
    "mistral": {**DECODER, "sliding_window": 5},
    "opt": {**SHARED, "hidden_size": 32, "ffn_dim": 40, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
            "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.4},
    "gemma2": {**DECODER, "sliding_window": 5, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    "gpt_oss": {**DECODER, "sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
MAIN = ("gpt2", "gpt_neox", "llama", "qwen3", "olmo2", "mistral")
EXTRA = ("opt", "gemma2", "gpt_oss")


def sites_of(model: PreTrainedModel) -> list[AttentionSite]:
    """Found by what they look like, so that these tests lean on no other room."""
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    sites = []
    for layer, block in enumerate(blocks):
        attention = next(child for name, child in block.named_children() if name in ("attn", "attention", "self_attn"))
        names = ("c_proj", "dense", "o_proj", "out_proj")
        projection = next(child for name, child in attention.named_children() if name in names)
        sites.append(AttentionSite(layer, attention, HEADS, projection, block))
    return sites


def make_model(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
    model.set_experts_implementation("eager")  # the fast one knows no float64
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


def make_gated(family: str, kind: str, dtype: torch.dtype = torch.float64, **changes: Any) -> PreTrainedModel:
    """Offsets at the median gate logit of each head, layer by layer: about half of the edges open."""
    model = make_model(family, dtype, **changes)
    attach_gates(model, sites_of(model), GateConfig(kind=kind, offset=0.0))
    ids = make_ids(batch=2)
    for (mark, _), gate in zip(attentions_of(model), gates_of(model), strict=True):
        with torch.no_grad(), tape(model, record=["gate", "allowed"], layers=[mark.layer]) as t:
            model(ids)
        logits_BHQK, allowed = t["gate", mark.layer], t["allowed", mark.layer]
        for head in range(HEADS):
            of_head = logits_BHQK[:, head][allowed[:, 0]]
            gate.offset_H.data[head] = -of_head.quantile(0.45 if head else 0.3).float()
    assert_mixed(model, ids)
    return model


def assert_mixed(model: PreTrainedModel, ids: Tensor) -> None:
    with torch.no_grad(), tape(model, record=["open", "allowed"]) as t:
        model(ids)
    for layer in t.layers("open"):
        share = t["open", layer].sum() / (t["allowed", layer].sum() * HEADS)
        assert 0.2 < share < 0.9, f"layer {layer} has {share:.2f} of its edges open"


def make_ids(batch: int = 2, length: int = 12) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def ids_BT() -> Tensor:
    return make_ids()


@pytest.fixture
def plain() -> Callable[..., PreTrainedModel]:
    return make_model


@pytest.fixture
def gated() -> Callable[..., PreTrainedModel]:
    return make_gated


@pytest.fixture
def sites() -> Callable[[PreTrainedModel], list[AttentionSite]]:
    return sites_of
