"""Tiny random models of every family, with scores large enough that gates at zero are open and closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

N_VOCABULARY = 53
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 24,
    "sliding_window": 16,
}
WITHOUT: dict[str, set[str]] = {"gpt_neox": {"num_key_value_heads", "head_dim"}, "phi3": {"head_dim"}}


def enlarge(model: PreTrainedModel) -> PreTrainedModel:
    """Matrices large enough for attention to be far from uniform, norms and biases away from their neutral values."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.25)
            elif "norm" in name or ".ln_" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.1)
    return model.eval()


def make_tiny(family: str, **changes: Any) -> PreTrainedModel:
    """A random causal LM of `family`."""
    torch.manual_seed(0)
    sizes = GPT2_SIZES if family == "gpt2" else {k: v for k, v in SIZES.items() if k not in WITHOUT.get(family, ())}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(family, **({"vocab_size": N_VOCABULARY} | sizes | ids | changes))
    return enlarge(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def make_words(n_vocabulary: int = N_VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words `<s>`, `w1`, `w2` and so on."""
    vocabulary = {"<s>": 0} | {f"w{i}": i for i in range(1, n_vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<s>")


@pytest.fixture
def ids_BT() -> torch.Tensor:
    return torch.randint(1, N_VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def tiny() -> Callable[..., PreTrainedModel]:
    return make_tiny


@pytest.fixture
def few_words() -> PreTrainedTokenizerFast:
    """A tokenizer that is not the folders' own."""
    return make_words(20)


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """A tiny GPT-2 as plain transformers saves it, with a tokenizer."""
    make_tiny("gpt2").save_pretrained(tmp_path / "plain")
    make_words().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def source_gpt2() -> GPT2LMHeadModel:
    """A tiny GPT-2 with exact GELU, as nanoGPT has it."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=N_VOCABULARY, activation_function="gelu", **GPT2_SIZES)
    model = enlarge(GPT2LMHeadModel(config))
    assert isinstance(model, GPT2LMHeadModel)
    return model
