"""Anatomy names parts that really run, and the residual stream is the sum that its rule says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel

from gossamer.attention import ForceShut, tape, use_gossamer_attention
from gossamer.errors import GossamerError
from gossamer.models import FAMILIES, Anatomy, anatomy, check_seam, family_of

Tiny = Callable[..., PreTrainedModel]
VARIANTS = [(family, {}) for family in FAMILIES] + [("gpt_neox", {"use_parallel_residual": False})]


class Watch:
    """Remembers what every watched module was given and gave."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.inputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self.outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in modules}
        self.hooks = [module.register_forward_hook(self.keep, with_kwargs=True) for module in self.inputs]

    def keep(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.inputs[module].append(args[0] if args else kwargs["hidden_states"])
        self.outputs[module].append(output[0] if isinstance(output, tuple) else output)

    def into(self, module: nn.Module) -> Tensor:
        (tensor,) = self.inputs[module]
        return tensor

    def out_of(self, module: nn.Module) -> Tensor:
        (tensor,) = self.outputs[module]
        return tensor


def named_modules(parts: Anatomy) -> list[nn.Module]:
    groups = [parts.blocks, parts.attentions, parts.attention_writers, parts.mlps, parts.mlp_writers]
    groups += [parts.attention_norms, parts.mlp_norms, parts.output_projections, *parts.input_projections]
    single = [parts.embedding, parts.position_embedding, parts.final_norm, parts.unembedding]
    return [module for module in [*single, *(module for group in groups for module in group)] if module is not None]


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_every_named_part_runs_and_the_stream_is_their_sum(
    tiny: Tiny, ids_BT: Tensor, family: str, changes: dict[str, Any]
) -> None:
    model = tiny(family, **changes).double()
    parts = anatomy(model)
    watch = Watch(named_modules(parts))
    with torch.no_grad():
        model(ids_BT, use_cache=False)
    stream_BQD = watch.out_of(parts.embedding)
    if parts.position_embedding is not None:
        stream_BQD = stream_BQD + watch.out_of(parts.position_embedding)
    for layer, block in enumerate(parts.blocks):
        torch.testing.assert_close(watch.into(block), stream_BQD)
        before_mlp_BQD = stream_BQD + watch.out_of(parts.attention_writers[layer])
        mlp_reader = parts.mlp_norms[layer] or parts.mlps[layer]
        torch.testing.assert_close(watch.into(mlp_reader), stream_BQD if parts.parallel else before_mlp_BQD)
        attention_norm = parts.attention_norms[layer]
        if attention_norm is not None:
            torch.testing.assert_close(watch.into(attention_norm), stream_BQD)
        stream_BQD = before_mlp_BQD + watch.out_of(parts.mlp_writers[layer])
        torch.testing.assert_close(watch.out_of(block), stream_BQD)
    torch.testing.assert_close(watch.into(parts.final_norm), stream_BQD)
    torch.testing.assert_close(watch.into(parts.unembedding), watch.out_of(parts.final_norm))


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_and_flags(tiny: Tiny, family: str) -> None:
    parts = anatomy(tiny(family))
    assert (parts.n_layers, parts.n_heads, parts.d_model, parts.d_head) == (2, 4, 32, 8)
    assert parts.n_key_heads == (4 if family in ("gpt2", "gpt_neox") else 2)
    assert parts.parallel == (family == "gpt_neox")
    assert parts.post_norm == (family in ("olmo2", "olmo3", "gemma2", "gemma3_text"))
    assert len(parts.sites()) == 2
    assert ("before the block" in parts.rule) == parts.parallel
    assert ("norm of their own" in parts.rule) == parts.post_norm


@pytest.mark.parametrize("family", FAMILIES)
def test_gossamer_attention_is_the_familys_own_and_its_seam_is_used_in_every_layer(
    tiny: Tiny, ids_BT: Tensor, family: str
) -> None:
    model = tiny(family)
    parts = anatomy(model)
    with torch.no_grad():
        own = model(ids_BT, use_cache=False).logits
        use_gossamer_attention(model, parts.sites())
        check_seam(model, parts)
        ours = model(ids_BT, use_cache=False).logits
        torch.testing.assert_close(ours, own, rtol=0, atol=1e-5)
        for layer in range(parts.n_layers):
            with tape(model, replace=[ForceShut(layer, torch.ones(1, 1, 1, 1, dtype=torch.bool))]):
                shut = model(ids_BT, use_cache=False).logits
            assert (shut - ours).abs().max() > 1e-3


def test_doctor_notices_attention_that_is_computed_elsewhere(tiny: Tiny) -> None:
    model = tiny("llama")
    parts = anatomy(model)
    use_gossamer_attention(model, parts.sites())
    for attention in parts.attentions:  # attention runs, but what it writes is thrown away
        attention.register_forward_hook(lambda _module, _args, out: (torch.zeros_like(out[0]), *out[1:]))
    with pytest.raises(GossamerError, match="Replacing the attention of this llama model leaves its output unchanged"):
        check_seam(model, parts)


def test_doctor_notices_a_layer_that_goes_past_the_registry(tiny: Tiny) -> None:
    model = tiny("llama")
    parts = anatomy(model)
    use_gossamer_attention(model, parts.sites())
    parts.attentions[1].forward = lambda hidden_states, **_: (hidden_states, None)  # type: ignore[method-assign]
    with pytest.raises(GossamerError, match="layer 1"):
        check_seam(model, parts)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert"}, "encoder-only"),
        ({"model_type": "modernbert"}, "encoder-only"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "somebodys", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bloom"}, "cannot be replaced"),
        ({"model_type": "gpt_neo"}, "cannot be replaced"),
        ({"model_type": "mamba"}, "no attention to gate"),
        ({"model_type": "lama"}, "not supported; supported are .* Did you mean 'llama'"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "cross attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "both directions"),
        ({}, "names no model_type"),
    ],
)
def test_other_families_are_refused_with_a_sentence(config: dict[str, Any], words: str) -> None:
    with pytest.raises(GossamerError, match=words) as refusal:
        family_of(config)
    assert str(refusal.value).count("\n") == 0


def test_models_that_are_no_causal_lm_are_refused(tiny: Tiny) -> None:
    with pytest.raises(GossamerError, match="not a transformers model"):
        anatomy(nn.Linear(2, 2))
    with pytest.raises(GossamerError, match=r"has no part 'model\.layers'"):
        anatomy(tiny("llama").model)
    bert = BertForMaskedLM(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(GossamerError, match="encoder-only"):
        anatomy(bert)


def test_anatomy_looks_through_peft(tiny: Tiny) -> None:
    peft = pytest.importorskip("peft", reason="peft is optional")
    model = tiny("llama")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert anatomy(wrapped).blocks == anatomy(model).blocks
