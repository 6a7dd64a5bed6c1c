"""Gates as parts of a model: attached, kept, trained in every precision and refused where they cannot work."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from gossamer.attention import (
    ATTENTION_NAME,
    GATE_KEY,
    AttentionSite,
    Gate,
    GateConfig,
    attach_gates,
    detach_gates,
    gates_of,
    gossamer_attention,
    sampled_gates,
    tape,
    use_gossamer_attention,
)
from gossamer.errors import GossamerError

Make = Callable[..., PreTrainedModel]
Sites = Callable[[PreTrainedModel], list[AttentionSite]]


def test_config_round_trip() -> None:
    config = GateConfig(kind="flow", offset=2.5)
    assert GateConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"kind": "logits", "version": 1}, "Did you mean 'logit'"),
        ({"kind": "logit", "version": 2}, "version 2"),
        ({"kind": "logit", "version": 1, "ofset": 1.0}, "Did you mean 'offset'"),
        ({"kind": "logit"}, "lacks the field 'version'"),
        ({"kind": "logit", "version": 1, "offset": "4"}, "must be a number"),
        (["logit"], "must be a mapping"),
    ],
)
def test_config_refuses_what_it_does_not_know(data: Any, message: str) -> None:
    with pytest.raises(GossamerError, match=message):
        GateConfig.from_dict(data)


def test_attaching_and_detaching(plain: Make, sites: Sites) -> None:
    model = plain("qwen3")
    before = set(model.state_dict())
    attach_gates(model, sites(model), GateConfig("mass", 3.0))
    assert set(model.state_dict()) - before == {f"model.layers.{layer}.self_attn.gate.offset_H" for layer in range(2)}
    assert GateConfig.from_dict(getattr(model.config, GATE_KEY)) == GateConfig("mass", 3.0)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert [gate.offset_H.tolist() for gate in gates_of(model)] == [[3.0] * 4] * 2
    with pytest.raises(GossamerError, match="already has gates"):
        attach_gates(model, sites(model), GateConfig())
    detach_gates(model)
    assert set(model.state_dict()) == before
    assert not hasattr(model.config, GATE_KEY)
    assert model.config._attn_implementation == ATTENTION_NAME
    with pytest.raises(GossamerError, match="no gates to sample"), sampled_gates(model):
        pass


def test_detaching_a_flow_gate_removes_its_hooks(gated: Make) -> None:
    model = gated("gpt2", "flow")
    assert any(block._forward_pre_hooks for block in model.transformer.h)
    detach_gates(model)
    assert not any(block._forward_pre_hooks for block in model.transformer.h)


def test_offsets_stay_precise_in_a_low_precision_model(gated: Make, ids_BT: Tensor) -> None:
    model = gated("llama", "logit").bfloat16()
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert {gate.offset_H.dtype for gate in gates_of(model)} == {torch.float32}
    assert gated("llama", "logit").double().model.layers[0].self_attn.gate.offset_H.dtype == torch.float64
    with sampled_gates(model, tau=0.5) as run:
        logits = model(ids_BT).logits
    assert logits.dtype == torch.bfloat16
    (logits.float().square().mean() + run.expected_open).backward()
    assert gates_of(model)[0].offset_H.grad.dtype == torch.float32


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_bfloat16_decides_gates_in_float32(gated: Make, ids_BT: Tensor, family: str, how: str) -> None:
    model = gated(family, "logit", torch.float32)
    with torch.no_grad():
        precise = model(ids_BT).logits
    if how == "bfloat16":
        model = model.bfloat16()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        with tape(model, record=["q", "k", "open", "allowed"]) as t:
            logits = model(ids_BT).logits
        fast = model(ids_BT).logits
    assert (fast.float() - logits.float()).abs().max() < 0.1 * precise.abs().max()
    assert (precise - logits.float()).abs().mean() < 0.2 * precise.abs().mean()
    for layer in range(2):
        q, k = t["q", layer], t["k", layer]
        assert q.dtype == torch.bfloat16
        offset_H11 = gates_of(model)[layer].offset_H.double()[:, None, None]
        exact = q.double() @ k.double().transpose(-1, -2) * q.shape[-1] ** -0.5 + offset_H11
        clear = t["allowed", layer] & (exact.abs() > 1e-4)
        assert torch.equal(t["open", layer][clear], (exact > 0)[clear])


def test_autocast_gradients_point_the_same_way(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "mass", torch.float32)
    directions = []
    for enabled in (False, True):
        model.zero_grad()
        with sampled_gates(model, tau=1.0, seed=2) as run, torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = model(ids_BT).logits
        (logits.float().square().mean() + run.expected_open).backward()
        assert run.expected_open.dtype == torch.float32
        directions.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.cosine_similarity(*directions, dim=0) > 0.98


def test_sampling_is_reproducible_and_counts(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "logit")

    def sample(**options: Any) -> tuple[Tensor, float, float]:
        with torch.no_grad(), sampled_gates(model, **options) as run:
            logits = model(ids_BT).logits
        assert run.allowed_pairs == 2 * 2 * 4 * 78
        assert run.open_share == run.open_pairs / run.allowed_pairs
        return logits, float(run.expected_open), run.open_share

    first = sample(seed=1, step=5)
    assert torch.equal(first[0], sample(seed=1, step=5)[0])
    assert not torch.equal(first[0], sample(seed=1, step=6)[0])
    assert not torch.equal(first[0], sample(seed=2, step=5)[0])
    assert torch.equal(sample(tau=0.0)[0], model(ids_BT).logits)
    assert first[1] == pytest.approx(sample(tau=0.0)[1], rel=0.2)
    sharp = sample(tau=0.0, penalty_tau=1e-3)
    assert sharp[1] == pytest.approx(sharp[2], abs=1e-3)


def test_accumulated_forwards_draw_different_noise(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "logit")
    with torch.no_grad(), sampled_gates(model, seed=1) as run:
        first, second = model(ids_BT).logits, model(ids_BT).logits
    assert not torch.equal(first, second)
    assert run.allowed_pairs == 2 * 2 * 2 * 4 * 78


def test_padding_is_not_counted(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "logit")
    mask = torch.ones_like(ids_BT)
    mask[0, :4] = 0
    with torch.no_grad(), sampled_gates(model) as run:
        model(ids_BT, attention_mask=mask)
    assert run.allowed_pairs == 2 * 4 * (78 + 36)


@pytest.mark.parametrize("options", [{"tau": -1.0}, {"tau_backward": 0.0}, {"penalty_tau": 0.0}])
def test_impossible_temperatures_are_refused(gated: Make, options: dict[str, float]) -> None:
    with pytest.raises(GossamerError, match="tau"), sampled_gates(gated("gpt2", "logit"), **options):
        pass


def test_nothing_to_count_without_a_forward(gated: Make) -> None:
    with pytest.raises(GossamerError, match="No forward"), sampled_gates(gated("gpt2", "logit")) as run:
        _ = run.expected_open


def test_activation_checkpointing_is_refused_or_right(gated: Make, ids_BT: Tensor) -> None:
    model = gated("llama", "logit")
    model(ids_BT).logits.sum().backward()
    expected = model.lm_head.weight.grad.clone(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(GossamerError, match="Activation checkpointing"), sampled_gates(model):
        pass
    with pytest.raises(GossamerError, match="Activation checkpointing"), tape(model, record=["q"]):
        pass
    model(ids_BT, use_cache=False).logits.sum().backward()  # deterministic gates are recomputed alike
    assert torch.allclose(model.lm_head.weight.grad, expected[0])
    assert torch.allclose(model.model.layers[0].self_attn.q_proj.weight.grad, expected[1])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_by_hand_is_refused(gated: Make, ids_BT: Tensor, reentrant: bool) -> None:
    model = gated("gpt2", "logit")
    embedded = model.transformer.wte(ids_BT).detach().requires_grad_()

    def run(inputs_embeds: Tensor) -> Tensor:
        return model(inputs_embeds=inputs_embeds).logits

    with pytest.raises(GossamerError, match="Activation checkpointing"), sampled_gates(model):
        checkpoint(run, embedded, use_reentrant=reentrant).sum().backward()


def test_a_lost_gate_is_never_a_dense_model(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "logit")
    key = getattr(model.config, GATE_KEY)
    del model.transformer.h[1].attn.gate
    with pytest.raises(GossamerError, match="no gate was loaded"):
        model(ids_BT)
    model = gated("gpt2", "logit")
    delattr(model.config, GATE_KEY)
    with pytest.raises(GossamerError, match="lost the gossamer_gate key"):
        model(ids_BT)
    setattr(model.config, GATE_KEY, key)
    model(ids_BT)


FAMILIES_THAT_BYPASS: dict[str, dict[str, Any]] = {
    "gpt_neo": {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "attention_types": [[["global"], 1]]},
    "gptj": {"n_embd": 8, "n_layer": 1, "n_head": 2, "rotary_dim": 4},
    "bloom": {"hidden_size": 8, "n_layer": 1, "n_head": 2},
    "falcon": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2},
    "mpt": {"d_model": 8, "n_layers": 1, "n_heads": 2},
    "codegen": {"n_embd": 8, "n_layer": 1, "n_head": 4, "rotary_dim": 2},
    "xglm": {"d_model": 8, "num_layers": 1, "attention_heads": 2, "ffn_dim": 8},
}


@pytest.mark.parametrize("family", sorted(FAMILIES_THAT_BYPASS))
def test_families_that_bypass_the_registry_are_refused(family: str) -> None:
    config = AutoConfig.for_model(family, vocab_size=20, **FAMILIES_THAT_BYPASS[family])
    model = AutoModelForCausalLM.from_config(config)
    site = AttentionSite(0, next(module for module in model.modules() if "Attention" in type(module).__name__), 2)
    with pytest.raises(GossamerError, match=f"The {family} family"):
        use_gossamer_attention(model, [site])
    with pytest.raises(GossamerError, match=f"The {family} family"):
        attach_gates(model, [site], GateConfig())
    assert not hasattr(site.module, "gate")


def test_models_that_are_not_causal_decoders_are_refused(plain: Make) -> None:
    shape = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    bert = BertForMaskedLM(BertConfig(**shape))
    attention = bert.bert.encoder.layer[0].attention.self
    with pytest.raises(GossamerError, match="only causal language models"):
        attach_gates(bert, [AttentionSite(0, attention, 2)], GateConfig())
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    with pytest.raises(GossamerError, match="has cross attention"):
        use_gossamer_attention(t5, [AttentionSite(0, t5.decoder.block[0].layer[0], 2)])
    with pytest.raises(GossamerError, match="no attention that Gossamer knows"):
        use_gossamer_attention(plain("gpt2"), [])
    with pytest.raises(GossamerError, match="not a Hugging Face"):
        use_gossamer_attention(nn.Linear(2, 2), [AttentionSite(0, nn.Linear(2, 2), 2)])


def test_cross_attention_is_refused(plain: Make, sites: Sites, ids_BT: Tensor) -> None:
    model = plain("gpt2", add_cross_attention=True)
    use_gossamer_attention(model, sites(model))
    with pytest.raises(GossamerError, match="Cross attention"):
        model(ids_BT, encoder_hidden_states=torch.zeros(2, 3, 24).double())


def test_a_module_with_a_gate_of_its_own_is_refused(plain: Make, sites: Sites) -> None:
    model = plain("llama")
    model.model.layers[0].self_attn.gate = nn.Linear(2, 2)
    with pytest.raises(GossamerError, match="has its own `gate`"):
        attach_gates(model, sites(model), GateConfig())


def test_a_flow_gate_needs_to_know_where_things_are(plain: Make, sites: Sites) -> None:
    model = plain("llama")
    bare = [AttentionSite(site.layer, site.module, site.n_heads) for site in sites(model)]
    with pytest.raises(GossamerError, match="flow gate needs the output projection"):
        attach_gates(model, bare, GateConfig("flow"))
    assert not hasattr(model.config, GATE_KEY)


class Bare(nn.Module):
    is_causal = True
    config = None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "'position_bias'"),
        ({"head_mask": torch.ones(1)}, "'head_mask'"),
        ({"cu_seq_lens_q": torch.zeros(1)}, "'cu_seq_lens_q'"),
        ({"is_causal": False}, "sees later tokens"),
    ],
)
def test_unknown_arguments_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    gossamer_attention(Bare(), x, x, x, None, position_ids=torch.arange(3), use_cache=False, head_mask=None)
    with pytest.raises(GossamerError, match=message):
        gossamer_attention(Bare(), x, x, x, None, **extra)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(1, 1, 3, 3, dtype=torch.bool), "see later ones"),
        (torch.ones(1, 1, 3, 3, dtype=torch.long), "boolean, or float"),
        (-torch.arange(9.0).reshape(1, 1, 3, 3), "adds a bias"),
        (torch.ones(1, 3), "four dimensions"),
        (torch.ones(1, 1, 2, 3, dtype=torch.bool), "mask is for 2 queries"),
    ],
)
def test_masks_that_are_not_causal_masks_are_refused(mask: Tensor, message: str) -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(GossamerError, match=message):
        gossamer_attention(Bare(), x, x, x, mask)


def test_no_mask_never_means_everything() -> None:
    x = torch.randn(1, 2, 5, 4)
    out, _ = gossamer_attention(Bare(), x, x, x, None)
    assert torch.allclose(out[:, 0], x[:, :, 0])
    with pytest.raises(GossamerError, match="without a mask"):
        gossamer_attention(Bare(), x[:, :, :2], x, x, None)


def test_rows_without_keys_are_zeros_in_the_dense_path() -> None:
    x = torch.randn(2, 2, 4, 4)
    allowed = torch.ones(4, 4, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    allowed[0, 0, :, :2] = False
    out, _ = gossamer_attention(Bare(), x, x, x, allowed)
    assert (out[0, :2] == 0).all()
    assert torch.isfinite(out).all()


def test_peft_trains_and_keeps_gates(gated: Make, ids_BT: Tensor) -> None:
    peft = pytest.importorskip("peft")
    model = gated("gpt2", "logit", torch.float32)
    before = model(ids_BT).logits.detach()
    lora = peft.LoraConfig(target_modules=["c_attn"], modules_to_save=["gate"], fan_in_fan_out=True)
    wrapped = peft.get_peft_model(model, lora)
    assert torch.allclose(wrapped(ids_BT).logits, before, atol=1e-5)
    gates = gates_of(wrapped)
    assert len(gates) == 2
    assert all(isinstance(gate, Gate) and gate.offset_H.requires_grad for gate in gates)
    with sampled_gates(wrapped, tau=0.5) as run:
        (wrapped(ids_BT).logits.square().mean() + run.expected_open).backward()
    assert all(gate.offset_H.grad is not None for gate in gates)
    assert sum("gate" in name for name in peft.get_peft_model_state_dict(wrapped)) == 2
    with torch.no_grad():
        gates[0].offset_H.fill_(-1e4)
    trained = wrapped(ids_BT).logits
    merged = wrapped.merge_and_unload()
    assert torch.allclose(merged(ids_BT).logits, trained, atol=1e-5)
    assert gates_of(merged)[0].offset_H[0] == -1e4


def test_an_adapter_on_the_output_projection_is_refused_for_flow_gates(gated: Make, ids_BT: Tensor) -> None:
    peft = pytest.importorskip("peft")
    model = gated("llama", "flow", torch.float32)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["o_proj"]))
    with pytest.raises(GossamerError, match="adapter on the attention's output projection"):
        wrapped(ids_BT)


@pytest.mark.parametrize("how", ["as it is", "deepcopy", "peft", "pickle"])
def test_a_gated_model_on_another_attention_function_does_not_run(gated: Make, ids_BT: Tensor, how: str) -> None:
    model: Any = gated("gpt2", "logit", torch.float32)
    model.eval()
    if how == "deepcopy":
        model = copy.deepcopy(model)
    elif how == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif how == "peft":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)).eval()
    host = model.get_base_model() if how == "peft" else model
    before = model(ids_BT).logits
    for other in ("eager", "sdpa"):
        host.set_attn_implementation(other)
        with pytest.raises(GossamerError, match=f"switched to '{other}'.*set_attn_implementation"):
            model(ids_BT)
    host.set_attn_implementation(ATTENTION_NAME)
    assert torch.equal(model(ids_BT).logits, before)


def test_a_detached_model_runs_on_any_attention_function(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "logit")
    detach_gates(model)
    assert not any(module._forward_pre_hooks for module in model.modules())
    dense = model(ids_BT).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(ids_BT).logits, dense)
