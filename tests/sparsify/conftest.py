"""A tiny random GPT-2 with a pattern to learn, and short settings for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gossamer.attention import use_gossamer_attention
from gossamer.corpus import tokenizer
from gossamer.models import LoadedModel, anatomy
from gossamer.sparsify import Sequences, SparsifyConfig

N_VOCABULARY, LENGTH = 20, 12


def make_tiny(*, n_vocabulary: int = N_VOCABULARY, n_positions: int = LENGTH, seed: int = 0) -> LoadedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=n_vocabulary, n_positions=n_positions, bos_token_id=0, eos_token_id=0
    )
    hf = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # large enough scores and outputs for the gates to matter
        for block in hf.transformer.h:
            block.attn.c_attn.weight.mul_(20)
            block.attn.c_proj.weight.mul_(10)
        hf.transformer.wte.weight.mul_(5)
    parts = anatomy(hf)
    use_gossamer_attention(hf, parts.sites())
    return LoadedModel("tiny", hf, parts)


def make_text(n: int = 60, *, length: int = LENGTH, n_vocabulary: int = N_VOCABULARY, seed: int = 0) -> Sequences:
    """Each sequence repeats a random block: attention has something to find."""
    random = np.random.default_rng(seed)
    block_NT = random.integers(1, n_vocabulary, (n, length // 2))
    return Sequences(np.concatenate([block_NT, block_NT], axis=1))


@pytest.fixture
def tiny() -> LoadedModel:
    return make_tiny()


@pytest.fixture
def text() -> Sequences:
    return make_text()


@pytest.fixture
def short() -> SparsifyConfig:
    return SparsifyConfig(steps=6, batch=4, evaluate_every=3, checkpoint_every=2, slack=0.05, keep_mass=0.9)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model on disk, with the bundled tokenizer."""
    words = tokenizer.load()
    model = make_tiny(n_vocabulary=len(words), n_positions=16)
    model.optional_tokenizer = words
    return model.save(tmp_path_factory.mktemp("tiny") / "model")
