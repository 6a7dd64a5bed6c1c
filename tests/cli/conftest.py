"""A tiny random pair in folders of their own, standing in for the bundled one, and a way to run the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gossamer.attention import GateConfig
from gossamer.cli.app import run
from gossamer.corpus import tokenizer as own_tokenizer
from gossamer.models import gate, load


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a dense and a gated tiny random GPT-2 with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(0)
    tokenizer = own_tokenizer.load()
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder / "plain")
    tokenizer.save_pretrained(folder / "plain")
    load(folder / "plain").save(folder / "dense")
    gate(load(folder / "dense"), GateConfig(offset=0.0)).save(folder / "sparse")
    return str(folder / "dense"), str(folder / "sparse")


@pytest.fixture
def gossamer(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command in this process, output caught."""

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capfd.readouterr())

    return call
