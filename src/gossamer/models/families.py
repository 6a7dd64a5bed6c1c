"""The table of supported families, and the sentences that refuse all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gossamer.errors import GossamerError, nearest


@dataclass(frozen=True)
class Family:
    """Dotted module names: from the model for `blocks`, norms and embeddings, from a block for its own parts.

    A `pre_norm` reads the residual stream; a `post_norm` sits between a part and the residual stream it writes to.
    """

    name: str
    blocks: str = "model.layers"
    attention: str = "self_attn"
    attention_pre_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    input_projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output_projection: str = "o_proj"
    mlp: str = "mlp"
    mlp_pre_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    final_norm: str = "model.norm"
    embedding: str = "model.embed_tokens"
    position_embedding: str | None = None
    unembedding: str = "lm_head"
    parallel_flag: str | None = None


def _post_norm_family(name: str) -> Family:
    return Family(
        name,
        attention_pre_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
    )


def _sandwich_norm_family(name: str) -> Family:
    return Family(
        name,
        attention_post_norm="post_attention_layernorm",
        mlp_pre_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )


_GPT2 = Family(
    "gpt2",
    blocks="transformer.h",
    attention="attn",
    attention_pre_norm="ln_1",
    input_projections=("c_attn",),
    output_projection="c_proj",
    mlp_pre_norm="ln_2",
    final_norm="transformer.ln_f",
    embedding="transformer.wte",
    position_embedding="transformer.wpe",
)
_GPT_NEOX = Family(
    "gpt_neox",
    blocks="gpt_neox.layers",
    attention="attention",
    input_projections=("query_key_value",),
    output_projection="dense",
    final_norm="gpt_neox.final_layer_norm",
    embedding="gpt_neox.embed_in",
    parallel_flag="use_parallel_residual",
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        _GPT2,
        _GPT_NEOX,
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3"),
        Family("smollm3"),
        Family("olmo"),
        _post_norm_family("olmo2"),
        _post_norm_family("olmo3"),
        Family("phi3", input_projections=("qkv_proj",)),
        Family("gemma"),
        _sandwich_norm_family("gemma2"),
        _sandwich_norm_family("gemma3_text"),
    )
}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ENCODER_ONLY = _words(
    "albert bert camembert deberta deberta-v2 distilbert electra ernie esm eurobert flaubert ibert longformer"
    " megatron-bert mobilebert modernbert mpnet nomic_bert rembert roberta roberta-prelayernorm roformer squeezebert"
    " xlm xlm-roberta xlm-roberta-xl xmod"
)
_ENCODER_DECODER = _words(
    "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder fsmt led longt5 m2m_100 marian mbart mt5 mvp"
    " nllb-moe pegasus pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5 whisper"
)
_OWN_ATTENTION = _words("bloom codegen ctrl falcon gpt_neo gptj mpt openai-gpt xglm xlnet")
_NO_ATTENTION = _words("falcon_mamba mamba mamba2 rwkv xlstm")


def family_of(config: Mapping[str, Any]) -> Family:
    """The family a `config.json` names, or the reason in one sentence why gossamer cannot read such a model."""
    model_type = str(config.get("model_type") or "")
    _refuse_unreadable(model_type, config)
    if model_type not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        hint = nearest(model_type, FAMILIES)
        raise GossamerError(f"The model family {model_type!r} is not supported; supported are {known}.{hint}")
    _refuse_flags(model_type, config)
    return FAMILIES[model_type]


def _refuse_unreadable(model_type: str, config: Mapping[str, Any]) -> None:
    if not model_type:
        raise GossamerError("The config names no model_type, so its family is unknown; use a causal LM's folder.")
    if model_type in _ENCODER_DECODER or config.get("is_encoder_decoder"):
        raise GossamerError(f"{model_type!r} is an encoder-decoder model; gossamer needs a decoder-only causal LM.")
    if model_type in _ENCODER_ONLY:
        raise GossamerError(f"{model_type!r} is an encoder-only model; gossamer needs a decoder-only causal LM.")
    if model_type in _OWN_ATTENTION:
        raise GossamerError(
            f"The attention of {model_type!r} cannot be replaced (transformers computes it inside the model, past its "
            "registry of attention functions); choose one of " + ", ".join(sorted(FAMILIES)) + "."
        )
    if model_type in _NO_ATTENTION:
        raise GossamerError(f"{model_type!r} has no attention to gate; choose a transformer, such as gpt2 or llama.")


def _refuse_flags(model_type: str, config: Mapping[str, Any]) -> None:
    if config.get("add_cross_attention"):
        raise GossamerError(f"This {model_type!r} model has cross attention; use a decoder-only causal LM.")
    if config.get("use_bidirectional_attention"):
        raise GossamerError(f"This {model_type!r} model attends in both directions; gossamer needs causal attention.")
