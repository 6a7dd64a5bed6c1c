"""A tiny random dense model that speaks the bundled language, and gated copies with edges open and shut."""

from __future__ import annotations

import copy

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from gossamer.attention import GateConfig, gates_of
from gossamer.corpus import Sequences, language
from gossamer.evaluate import Effort
from gossamer.models import LoadedModel, gate
from gossamer.models.checkpoint import finish
from gossamer.tasks import Split

LENGTH = 24
EFFORT = Effort(sequences=6, prompts=12, shift_sequences=4, baseline_sequences=3, audit_sequences=2)


def make_dense(tokenizer: PreTrainedTokenizerBase, *, seed: int = 0, n_positions: int = 48) -> LoadedModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=n_positions,
        n_embd=16,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    hf = GPT2LMHeadModel(config)
    with torch.no_grad():
        for block in hf.transformer.h:
            block.attn.c_attn.weight.normal_(std=0.6)
            block.attn.c_proj.weight.normal_(std=0.6)
    return finish(hf, name=f"dense {seed}", source="a test", tokenizer=tokenizer, device="cpu")


def make_sparse(dense: LoadedModel, *, offset: float = -1.0, spread: float = 1.0) -> LoadedModel:
    """Offsets differ from head to head; the last head of layer 1 is dead."""
    model = gate(copy.deepcopy(dense), GateConfig())
    model.name = f"sparse of {dense.name}"
    generator = torch.Generator().manual_seed(1)
    for layer in gates_of(model.hf):
        layer.offset_H.data = offset + spread * torch.randn(layer.offset_H.shape, generator=generator)
    gates_of(model.hf)[1].offset_H.data[-1] = -1000.0
    return model


def make_language(tokenizer: PreTrainedTokenizerBase, n: int, *, length: int = LENGTH, seed: int = 5) -> Sequences:
    return language.sequences(tokenizer, n, length=length, seed=seed, split=Split.HELD_OUT)
