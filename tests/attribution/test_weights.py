"""Contributions of single attention edges: exact where the model is linear, derivatives where it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from edge_models import gated, tiny

import gossamer as gs
from gossamer.attention import ForceShut, FrozenGates, Weights, tape
from gossamer.attribution.held import LINEAR, Held
from gossamer.attribution.hops import Hop
from gossamer.attribution.result import TokenAttribution
from gossamer.attribution.targets import Target, next_token, next_token_target, read_prompt
from gossamer.attribution.weights import REAL, token_attribution
from gossamer.models.micro import micro

IDS = [3, 17, 8, 25, 8, 11]
LOGIT = Target("logit", 5, "five")
FAMILIES = ["gpt2", "gpt_neox", "gpt_neox in sequence", "llama", "olmo2", "gemma2", "qwen3"]
KINDS = [LOGIT, Target("centred logit", 5, "five"), Target("logit difference", 5, "five", (7, 9), ("seven", "nine"))]


def attribute(model, target: Target = LOGIT, **settings) -> TokenAttribution:
    return token_attribution(model, read_prompt(model, IDS), target, **settings)


@pytest.mark.parametrize("make", [tiny, gated])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_frozen_model_contributions_are_exact(family, make) -> None:
    model = make(family)
    # a soft-cap bends the logit itself, which no frozen model can make straight
    model.hf.config.final_logit_softcapping = None
    for target in KINDS:
        found = attribute(model, target, held=LINEAR, ablate=LINEAR)
        assert found.ablation is not None
        np.testing.assert_allclose(found.contribution_E, found.ablation.lost_E, rtol=1e-9, atol=1e-12)
        assert np.abs(found.contribution_E).max() > 1e-3
    every = model.anatomy.n_layers * model.anatomy.n_heads * 21
    fewer = model.is_sparse or family == "gemma2"  # gates, or a window of four
    assert (len(found) < every) if fewer else (len(found) == every)


@pytest.mark.parametrize("held", [Held(True, True, False), Held(True, False, False), REAL, Held(False, True, False)])
@pytest.mark.parametrize("family", ["gpt2", "llama", "olmo2"])
def test_a_contribution_is_the_derivative_of_scaling_its_edge(family, held) -> None:
    """By finite differences of one weight, with the same parts held and every gate frozen."""
    model = gated(family)
    found = attribute(model, held=held)
    assert derivative_errors(model, found, held) < 1e-6


def derivative_errors(model, found: TokenAttribution, held: Held) -> float:
    from gossamer.attribution.frozen import freeze
    from gossamer.attribution.held import holding

    ids_BT = torch.tensor([IDS])
    frozen = freeze(model, ids_BT[0])
    with tape(model.hf, record=("weights", "open")) as heard:
        model.logits(ids_BT)
    layers = range(model.anatomy.n_layers)
    gates = [FrozenGates(layer, heard["open", layer]) for layer in layers]
    errors = []
    for index in np.argsort(-np.abs(found.contribution_E))[:6]:
        at = (0, found.head_E[index], found.query_E[index], found.key_E[index])
        values = []
        for step in (1e-5, -1e-5):
            changed = heard["weights", int(found.layer_E[index])].clone()
            changed[at] *= 1 + step
            others = [Weights(layer, heard["weights", layer]) for layer in layers] if held.patterns else []
            edits = [*gates, *others, Weights(int(found.layer_E[index]), changed)]
            with holding(frozen, held), tape(model.hf, replace=edits):
                values.append(float(found.target.of(model.logits(ids_BT)[:, -1])[0]))
        errors.append(abs(found.contribution_E[index] - (values[0] - values[1]) / 2e-5))
    return max(errors)


def test_integrated_contributions_sum_to_what_attention_does() -> None:
    model = tiny("gpt2", size=0.2)
    ids_BT = torch.tensor([IDS])
    nothing = [Weights(layer, torch.zeros(1, 3, 6, 6)) for layer in range(2)]
    with tape(model.hf, replace=nothing):
        without = float(model.logits(ids_BT)[0, -1, 5])
    held = Held(norms=False)
    errors = {}
    for steps in (2, 64):
        found = attribute(model, method="integrated", held=held, steps=steps)
        errors[steps] = abs(found.contribution_E.sum() - (found.value - without))
    assert errors[64] < 1e-3 * abs(found.value - without)
    assert errors[64] < errors[2]


def test_probabilities_follow_from_logits_by_the_chain_rule() -> None:
    model = tiny("llama")
    log, plain = (attribute(model, replace(LOGIT, kind=kind)) for kind in ("log probability", "probability"))
    np.testing.assert_allclose(plain.contribution_E, plain.value * log.contribution_E, rtol=1e-9, atol=1e-14)
    assert np.exp(log.value) == pytest.approx(plain.value)
    assert plain.value == pytest.approx(plain.probability)
    several = attribute(model, Target("logit difference", 5, "five", (7, 9), ("", "")))
    one, two = (attribute(model, Target("logit difference", 5, "five", (other,), ("",))) for other in (7, 9))
    np.testing.assert_allclose(several.contribution_E, (one.contribution_E + two.contribution_E) / 2, atol=1e-12)


def test_the_micro_models_induction_edge() -> None:
    """Worked by hand: the induction edge alone writes 4 b, copied over one hop into the answer's position."""
    model = micro(gated=True)
    prompt = read_prompt(model, "a b a")
    target = next_token_target(model, prompt, " b", instead=[" a"])
    found = token_attribution(model, prompt, target, held=LINEAR, ablate=REAL)
    assert found.answer_hop == Hop(key=2, query=3)
    assert found.carriers().places == [(1, 0)]
    assert found.carriers().total == pytest.approx(4)
    assert found.carriers().signed_share == pytest.approx(1)
    # shutting the edge that copies one token back shuts the induction edge too, which no gradient sees
    assert found.agreement().same_sign == pytest.approx(0.5)
    assert next(hop for hop, _ in found.hops(3)) == found.answer_hop
    # without what it reads from position 2, the last token has the logits that position 1 gave it: none for either
    assert found.lost_K[found.answer_hop.key] == pytest.approx(4)


@pytest.mark.parametrize("make", [tiny, gated])
def test_what_a_hop_is_worth_is_what_is_lost_without_it(make) -> None:
    model = make("llama")
    found = attribute(model)
    prompt, n_heads = found.prompt, found.n_heads
    clean = found.target.of(model.logits(prompt.ids_T(model))[:, -1])
    for key in range(len(prompt)):
        shut_HQK = torch.zeros(1, n_heads, len(prompt), len(prompt), dtype=torch.bool)
        shut_HQK[:, :, -1, key] = True
        with tape(model.hf, replace=[ForceShut(layer, shut_HQK) for layer in range(found.n_layers)]):
            without = found.target.of(model.logits(prompt.ids_T(model))[:, -1])
        assert found.lost_K[key] == pytest.approx(float(clean - without), abs=1e-12)
    assert np.abs(found.lost_K).max() > 1e-3


def test_hops_and_heads_add_up() -> None:
    found = attribute(gated("llama"))
    assert found.total_QK.sum() == pytest.approx(found.contribution_E.sum())
    assert found.heads_LH().sum() == pytest.approx(found.contribution_E.sum())
    for hop, carried in found.hops():
        assert carried.total == pytest.approx(found.heads_LH(hop).sum())
    assert {hop.query for hop, _ in found.hops(2)} == {2}
    with pytest.raises(gs.GossamerError, match="no hop 4 → 2"):
        found.heads_LH(Hop(4, 2))


def test_files_keep_everything(tmp_path: Path) -> None:
    found = attribute(gated("gpt2"), held=LINEAR, ablate=REAL)
    again = TokenAttribution.load(found.save(tmp_path / "attribution.safetensors"))
    assert again.ablation is not None
    assert again.held == LINEAR
    assert again.prompt == found.prompt
    assert again.target == found.target
    assert again.provenance["model"]["family"] == "gpt2"
    np.testing.assert_array_equal(again.contribution_E, found.contribution_E)
    assert again.agreement() == found.agreement()


def test_what_cannot_be_attributed_is_refused() -> None:
    model = gs.load("bundled/dense")
    prompt = read_prompt(model, 'The opposite of "large" is "')
    refusals = {
        "small house": "2 tokens behind this prompt ('small', ' house')",
        "zebra": "5 tokens",
        "": "empty",
    }
    for text, sentence in refusals.items():
        with pytest.raises(gs.GossamerError) as refused:
            next_token(model, prompt, text)
        assert sentence in str(refused.value)
    with pytest.raises(gs.GossamerError, match="136 tokens and bundled/dense reads at most 128"):
        read_prompt(model, "The opposite" + " of" * 133)
    with pytest.raises(gs.GossamerError, match="Did you mean 'logit'"):
        next_token_target(model, prompt, "small", kind="logits")  # type: ignore[arg-type]
    with pytest.raises(gs.GossamerError, match="instead of itself"):
        next_token_target(model, prompt, "small", instead=["small"])
    with pytest.raises(gs.GossamerError, match="patterns are held"):
        token_attribution(model, prompt, LOGIT, method="integrated", held=REAL)
