"""The frozen model: equal to the run it came from, linear, and refused where it would be neither."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from edge_models import FAMILIES, gated, tiny
from torch import Tensor, nn

from gossamer import GossamerError, LoadedModel
from gossamer.attribution.frozen import FrozenModel, freeze
from gossamer.attribution.frozen_norm import freeze_norm
from gossamer.models.micro import micro

IDS = torch.tensor([3, 5, 9, 2, 7, 1, 4])
MODELS = [(family, make) for family in FAMILIES for make in (tiny, gated)]


def random_like(frozen: FrozenModel, n: int = 3) -> Tensor:
    return torch.randn(n, *frozen.embedding_QD.shape, dtype=frozen.embedding_QD.dtype)


@pytest.mark.parametrize(("family", "make"), MODELS, ids=lambda value: getattr(value, "__name__", value))
def test_the_frozen_model_gives_the_runs_own_logits(family: str, make: Callable[[str], LoadedModel]) -> None:
    model = make(family)
    frozen = freeze(model, IDS)
    logits_V = model.logits(IDS)[0, -1]
    cap = getattr(model.hf.config, "final_logit_softcapping", None)
    ours_V = frozen.forward()
    torch.testing.assert_close(torch.tanh(ours_V / cap) * cap if cap else ours_V, logits_V, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_sum_to_the_attention_and_pulling_back_is_the_transpose(family: str) -> None:
    frozen = freeze(gated(family), IDS)
    layer = frozen.layers[1]
    resid, cotangent = random_like(frozen), random_like(frozen)
    by_head = [frozen.apply_head(1, head, resid) for head in range(len(layer.pattern_HQK))]
    torch.testing.assert_close(sum(by_head), layer.apply(resid), rtol=1e-12, atol=1e-12)
    for head, written in enumerate(by_head):
        pulled = frozen.pull_back_head(1, head, cotangent)
        torch.testing.assert_close((written * cotangent).sum(), (resid * pulled).sum(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(layer.pull_back(cotangent) + cotangent, frozen.pull_back_block(1, cotangent))


@pytest.mark.parametrize("family", FAMILIES)
def test_pulling_logits_back_to_the_tokens_equals_autograd_and_does_not_depend_on_the_tokens(family: str) -> None:
    """Gradients stay where they are when the token vectors are scrambled, and second derivatives are zero."""
    frozen = freeze(gated(family), IDS)

    def logit(embedding_QD: Tensor) -> Tensor:
        return frozen.forward(embedding_QD)[5]

    pulled_NQD = frozen.logit_cotangents(torch.eye(len(frozen.logits_V), dtype=torch.float64)[5:6])
    for layer in reversed(range(frozen.n_layers)):
        pulled_NQD = frozen.pull_back_block(layer, pulled_NQD)
    for embedding_QD in (frozen.embedding_QD, frozen.embedding_QD[torch.randperm(len(IDS))]):
        gradient_QD = torch.func.grad(logit)(embedding_QD)
        torch.testing.assert_close(gradient_QD, pulled_NQD[0], rtol=1e-10, atol=1e-13)
    directional = torch.func.jvp(torch.func.grad(logit), (embedding_QD,), (torch.randn_like(embedding_QD),))[1]
    assert not directional.any()


def test_freezing_leaves_the_model_as_it_was_and_matches_the_micro_models_answers() -> None:
    model = micro(gated=True)
    model.hf.train()
    frozen = freeze(model, model.encode("a b a"))
    assert model.hf.training
    torch.testing.assert_close(frozen.forward(), torch.tensor([0.0, 0.0, 4.0, 1.0], dtype=torch.float64))
    assert frozen.pattern_LHQK.shape == (2, 2, 4, 4)
    assert int((frozen.pattern_LHQK > 0).sum()) == 8


def test_norms_are_read_off_whatever_their_width_and_family() -> None:
    for norm in (nn.LayerNorm(7), nn.LayerNorm(8, elementwise_affine=False), nn.RMSNorm(5), nn.LayerNorm(6)):
        norm = norm.double()
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        read_QD = torch.randn(4, norm.normalized_shape[0], dtype=torch.float64)
        frozen = freeze_norm(norm, read_QD, norm(read_QD))
        assert frozen.centred == isinstance(norm, nn.LayerNorm)
        torch.testing.assert_close(frozen.linear(read_QD) + frozen.bias_D, norm(read_QD), rtol=1e-9, atol=1e-9)
        one, two = torch.randn(2, 4, read_QD.shape[1], dtype=torch.float64)
        torch.testing.assert_close((frozen.linear(one) * two).sum(), (one * frozen.transposed(two)).sum())


def test_what_is_not_a_norm_is_refused() -> None:
    read_QD = torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(GossamerError, match="more than centre, scale and shift"):
        freeze_norm(nn.Softmax(-1), read_QD, read_QD.softmax(-1))


def test_a_model_that_does_more_than_the_frozen_one_is_refused() -> None:
    model = tiny("llama")
    model.hf.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
    with pytest.raises(GossamerError, match="does more than the frozen model knows of: the logits"):
        freeze(model, IDS)


def test_prompts_that_cannot_be_attributed_are_refused() -> None:
    model = tiny("gpt2")
    with pytest.raises(GossamerError, match="has 17 tokens and gpt2 reads at most 16; shorten it"):
        freeze(model, torch.ones(17, dtype=torch.long))
    with pytest.raises(GossamerError, match="at least one token"):
        freeze(model, torch.ones(0, dtype=torch.long))
    model.hf.bfloat16()
    with pytest.raises(GossamerError, match=r"too fine for bfloat16; load gpt2 with dtype=torch\.float32"):
        freeze(model, IDS)
