"""A tiny random model whose gates are open and closed, with its maps as the tape records them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gossamer.attention import GateConfig, tape
from gossamer.models.checkpoint import finish
from gossamer.models.loaded import LoadedModel, gate

Recorded = dict[str, torch.Tensor]


def make_tiny(*, gated: bool, n_positions: int = 48) -> LoadedModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=24, n_layer=2, n_head=3, n_positions=n_positions, bos_token_id=0)
    hf = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.35)
    model = finish(hf, name="tiny", source="test", layout="test", tokenizer=None, device="cpu")
    return gate(model, GateConfig("logit", -0.5)) if gated else model


@pytest.fixture(params=[True, False], ids=["gated", "dense"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return make_tiny(gated=request.param)


@pytest.fixture
def ids_BT() -> torch.Tensor:
    return torch.randint(0, 40, (3, 41), generator=torch.Generator().manual_seed(1))


def record(model: LoadedModel, ids_BT: torch.Tensor) -> Recorded:
    """Weights, softmax and open edges [L, B, H, Q, K] from the reference path."""
    names = ("weights", "softmax", "open")
    with torch.no_grad(), tape(model.hf, record=names) as t:
        model.hf(ids_BT)
    return {name: torch.stack([t[name, layer] for layer in t.layers(name)]) for name in names}


@pytest.fixture
def tiny() -> Callable[..., LoadedModel]:
    return make_tiny


@pytest.fixture
def recorded() -> Callable[[LoadedModel, torch.Tensor], Recorded]:
    return record
