"""Every family through the public function: open gates are dense, fast path = reference, nothing moves the past."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import gossamer.attention.function as function
from gossamer.attention import (
    AttentionSite,
    ForceOpen,
    GateConfig,
    attach_gates,
    detach_gates,
    gated_attention,
    gates_of,
    sampled_gates,
    tape,
    use_gossamer_attention,
)
from gossamer.errors import GossamerError

Make = Callable[..., PreTrainedModel]
Sites = Callable[[PreTrainedModel], list[AttentionSite]]
MAIN = ("gpt2", "gpt_neox", "llama", "qwen3", "olmo2", "mistral")
EXTRA = ("opt", "gemma2", "gpt_oss")
KINDS = ("logit", "mass", "flow")


def reference_instead(call: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    out_BQHE, extras = gated_attention(call)
    return out_BQHE, extras.expected_open_H, extras.open_H


@pytest.mark.parametrize("family", [*MAIN, *EXTRA])
def test_open_or_absent_gates_are_the_librarys_eager_attention(
    plain: Make, gated: Make, sites: Sites, ids_BT: Tensor, family: str
) -> None:
    for dtype in (torch.float64, torch.float32):
        model = plain(family, dtype)
        tolerance = 1e-5 if family in MAIN else 1e-4  # most families' eager softmax is float32, whatever the model is
        if dtype == torch.float64 and family in MAIN:
            model.set_attn_implementation("sdpa")
            tolerance = 1e-10
        with torch.no_grad():
            expected = model(ids_BT).logits
            use_gossamer_attention(model, sites(model))
            assert (model(ids_BT).logits - expected).abs().max() < tolerance
            for kind in KINDS:
                attach_gates(model, sites(model), GateConfig(kind=kind, offset=1e4))
                assert (model(ids_BT).logits - expected).abs().max() < tolerance
                detach_gates(model)
                assert gates_of(model) == []
                assert (model(ids_BT).logits - expected).abs().max() < tolerance


@pytest.mark.parametrize("family", MAIN)
def test_an_ungated_model_trains_like_the_librarys(plain: Make, sites: Sites, ids_BT: Tensor, family: str) -> None:
    model = plain(family)
    gradients = []
    for switch in (lambda: model.set_attn_implementation("sdpa"), lambda: use_gossamer_attention(model, sites(model))):
        switch()
        model.zero_grad()
        model(ids_BT, labels=ids_BT).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).abs().max() < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gpt_oss"])
def test_forcing_every_edge_open_restores_the_dense_model(
    plain: Make, gated: Make, ids_BT: Tensor, family: str
) -> None:
    model = gated(family, "logit")
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with torch.no_grad():
        expected, shut = plain(family)(ids_BT).logits, model(ids_BT).logits
        with tape(model, replace=[ForceOpen(layer, everything) for layer in range(2)]):
            opened = model(ids_BT).logits
    assert (opened - expected).abs().max() < 1e-5
    assert (shut - expected).abs().max() > 1e-3


@pytest.mark.parametrize("sampling", [None, 0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*MAIN, *EXTRA])
def test_fast_path_equals_reference(
    gated: Make, ids_BT: Tensor, family: str, kind: str, sampling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = gated(family, kind)
    fast = outcome(model, ids_BT, sampling)
    with monkeypatch.context() as patch:
        patch.setattr(function, "blocked_attention", reference_instead)
        slow = outcome(model, ids_BT, sampling)
    assert fast.keys() == slow.keys()
    for name, value in slow.items():
        assert torch.isfinite(value).all(), name
        tolerance = 1e-9 if value.dtype == torch.float64 else 1e-4  # offsets' gradients are kept in float32
        assert (fast[name] - value).abs().max() <= tolerance * (1 + value.abs().max()), name
    if sampling is not None:
        assert all(gate.offset_H.grad is not None and gate.offset_H.grad.abs().sum() > 0 for gate in gates_of(model))


def outcome(model: PreTrainedModel, ids_BT: Tensor, sampling: float | None) -> dict[str, Tensor]:
    model.zero_grad()
    found = {}
    if sampling is None:
        logits = model(ids_BT).logits
        logits.square().mean().backward()
    else:
        with sampled_gates(model, tau=sampling, tau_backward=0.6, penalty_tau=1.3, seed=3, step=4) as run:
            logits = model(ids_BT).logits
        (logits.square().mean() + 2.0 * run.expected_open).backward()
        found["expected"] = run.expected_open.detach()
        found["share"] = torch.tensor(run.open_share)
        assert 0 < run.open_share < 1
    found["logits"] = logits.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found | gradients


@pytest.mark.parametrize("family", [*MAIN, "gpt_oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_later_tokens_never_move_earlier_positions(gated: Make, ids_BT: Tensor, family: str, kind: str) -> None:
    model = gated(family, kind)
    changed = ids_BT.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 39 + 1
    runs = []
    for ids in (ids_BT, changed):
        with torch.no_grad(), tape(model, record=["open"]) as t:
            logits = model(ids).logits
        runs.append((logits, torch.stack([t["open", layer] for layer in range(2)])))
    assert (runs[0][0][:, :8] - runs[1][0][:, :8]).abs().max() < 1e-12
    assert (runs[0][0][:, 8:] - runs[1][0][:, 8:]).abs().max() > 1e-3
    assert torch.equal(runs[0][1][..., :8, :], runs[1][1][..., :8, :])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", MAIN)
def test_padding_changes_nothing(gated: Make, ids_BT: Tensor, family: str, side: str) -> None:
    for kind in ("logit", "flow"):
        model = gated(family, kind)
        blank = torch.zeros(2, 3, dtype=ids_BT.dtype)
        parts = [blank, ids_BT] if side == "left" else [ids_BT, blank]
        mask = torch.cat([torch.zeros_like(part) if part is blank else torch.ones_like(part) for part in parts], 1)
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        kept = slice(3, None) if side == "left" else slice(0, -3)
        with torch.no_grad():
            alone = model(ids_BT).logits
            padded = model(torch.cat(parts, 1), attention_mask=mask, position_ids=positions).logits
        assert torch.isfinite(padded).all()
        assert (padded[:, kept] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("family", MAIN)
def test_packed_documents_do_not_see_each_other(gated: Make, ids_BT: Tensor, family: str) -> None:
    model = gated(family, "logit")
    lengths = (5, 7)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    segment = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    same = (segment[:, None] == segment).tril()[None, None]
    floats = torch.zeros(same.shape, dtype=torch.float64).masked_fill(~same, torch.finfo(torch.float64).min)
    with torch.no_grad():
        apart = torch.cat([model(part).logits for part in ids_BT[:1].split(lengths, 1)], 1)
        packed = model(ids_BT[:1], position_ids=positions, use_cache=False).logits
        assert (packed - apart).abs().max() < 1e-10
        if family == "mistral":  # a mask in four dimensions replaces the window too
            floats = floats.masked_fill(segment.new_ones(12, 12).triu(-4) == 0, torch.finfo(torch.float64).min)
        for mask in (floats,) if family == "mistral" else (same, floats):
            masked = model(ids_BT[:1], attention_mask=mask, position_ids=positions, use_cache=False).logits
            assert (masked - apart).abs().max() < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_packed_documents_that_nothing_separates_are_refused(gated: Make, ids_BT: Tensor, family: str) -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with pytest.raises(GossamerError, match="use_cache=False"):
        gated(family, "logit")(ids_BT[:1], position_ids=positions, use_cache=True)


@pytest.mark.parametrize("family", [*MAIN, "gpt_oss", "gemma2"])
@pytest.mark.parametrize("kind", ["logit", "flow"])
def test_the_cache_changes_nothing(gated: Make, ids_BT: Tensor, family: str, kind: str) -> None:
    model = gated(family, kind)
    with torch.no_grad():
        whole = model(ids_BT).logits
        for lengths in ((1,) * 12, (4, 5, 3)):
            cache, pieces = None, []
            for piece in ids_BT.split(lengths, 1):
                result = model(piece, past_key_values=cache, use_cache=True)
                cache = result.past_key_values
                pieces.append(result.logits)
            assert (torch.cat(pieces, 1) - whole).abs().max() < 1e-10


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_generation_with_and_without_cache(gated: Make, ids_BT: Tensor, family: str) -> None:
    model = gated(family, "logit")
    mask = torch.ones_like(ids_BT)
    mask[0, :3] = 0  # one row padded on the left
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    cached = model.generate(ids_BT, **options)
    assert cached.shape[1] == ids_BT.shape[1] + 6
    assert torch.equal(cached, model.generate(ids_BT, use_cache=False, **options))
    assert torch.equal(cached, model.generate(ids_BT, cache_implementation="static", **options))


def test_pre_softmax_upcasting_of_gpt2_is_honoured(plain: Make, sites: Sites, ids_BT: Tensor) -> None:
    model = plain("gpt2", torch.float32, reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True)
    with torch.no_grad():
        expected = model(ids_BT).logits
        use_gossamer_attention(model, sites(model))
        assert (model(ids_BT).logits - expected).abs().max() < 1e-5


def test_output_attentions_gives_the_weights_used(gated: Make, ids_BT: Tensor) -> None:
    model = gated("llama", "logit")
    with torch.no_grad(), tape(model, record=["weights"]) as t:
        result = model(ids_BT, output_attentions=True)
    assert len(result.attentions) == 2
    assert (result.attentions[1] - t["weights", 1]).abs().max() < 1e-12


def test_dropout_is_applied_to_the_weights_that_are_used(gated: Make, ids_BT: Tensor) -> None:
    model = gated("gpt2", "logit", attn_pdrop=0.5).train()
    quiet = model(ids_BT).logits
    model.eval()
    assert (quiet - model(ids_BT).logits).abs().max() > 1e-3
