"""Tiny random models of several families in exact double precision, with a task, for the tests of edges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from gossamer import GateConfig, LoadedModel, gate
from gossamer.attention import gates_of, tape
from gossamer.models.anatomy import anatomy
from gossamer.models.checkpoint import finish
from gossamer.tasks import Pair, Task, TokenBatch

N_VOCABULARY = 31
GPT2 = {"n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16, "n_inner": 20}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
}
NEOX = {name: SIZES[name] for name in SIZES if name not in ("num_key_value_heads", "head_dim")}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": NEOX | {"use_parallel_residual": True},
    "gpt_neox in sequence": NEOX | {"use_parallel_residual": False},
    "llama": SIZES,
    "olmo2": {name: SIZES[name] for name in SIZES if name != "head_dim"},
    "qwen3": SIZES,
    "phi3": {name: SIZES[name] for name in SIZES if name != "head_dim"},
    "gemma2": SIZES | {"sliding_window": 4, "query_pre_attn_scalar": 4},
}


class RootMeanSquare(nn.Module):
    """The RMS norm of Llama or Gemma without its detour over float32."""

    def __init__(self, weight_D: Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_D)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def make_precise(hf: nn.Module) -> None:
    for parent in list(hf.modules()):
        for name, norm in list(parent.named_children()):
            if "RMSNorm" in type(norm).__name__:
                shift = 1.0 if "Gemma" in type(norm).__name__ else 0.0
                epsilon = getattr(norm, "variance_epsilon", None) or norm.eps
                setattr(parent, name, RootMeanSquare(norm.weight.detach() + shift, float(epsilon)))


def tiny(family: str, *, seed: int = 0, size: float = 0.3, **changes: Any) -> LoadedModel:
    """A dense model of a family; attention far from uniform, norms and biases away from their neutral values."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": N_VOCABULARY}
    sizes = FAMILIES[family] | ids | changes
    config = AutoConfig.for_model(family.split()[0], **sizes)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, size)
            elif "norm" in name or ".ln_" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.2)
    make_precise(hf)
    return finish(hf.eval(), name=family, source="test", layout="test", tokenizer=None, device="cpu")


def gated(family: str, *, seed: int = 0, offset: float = 0.2, **changes: Any) -> LoadedModel:
    """The same with gates, some open and some closed."""
    model = gate(tiny(family, seed=seed, **changes), GateConfig("logit", offset))
    with torch.no_grad():
        for found in gates_of(model.hf):
            found.offset_H.add_(0.2 * torch.randn_like(found.offset_H))
    task = make_task()
    with tape(model.hf, record=["open", "allowed"]) as heard:
        model.logits(task.tokens[0].clean_BT)
    for layer in heard.layers("open"):
        allowed = heard["allowed", layer].expand_as(heard["open", layer])
        share = heard["open", layer][allowed].double().mean()
        assert 0.1 < share < 0.9, "a test of gates needs open and closed edges"
    return model


def make_task(n: int = 3, length: int = 6, *, metric: Any = "logit difference", seed: int = 0) -> Task:
    """Random prompts that differ in two places, one of them the first."""
    generator = torch.Generator().manual_seed(seed)
    clean_BT = torch.randint(1, N_VOCABULARY, (n, length), generator=generator)
    corrupt_BT = clean_BT.clone()
    corrupt_BT[:, [0, 3]] = 1 + (clean_BT[:, [0, 3]] + 7) % (N_VOCABULARY - 1)
    answers = torch.randint(1, N_VOCABULARY, (n, 2), generator=generator)
    answers[:, 1] = 1 + (answers[:, 0] + 3) % (N_VOCABULARY - 1)
    pairs = tuple(Pair(f"clean {i}", f"corrupt {i}", ("a",), ("b",), "t") for i in range(n))
    tokens = TokenBatch(tuple(range(n)), clean_BT, corrupt_BT, answers[:, :1], answers[:, 1:])
    return Task("random", "random tokens", pairs, (tokens,), "wrong answers", metric, 0.5, seed)


def again(model: LoadedModel) -> LoadedModel:
    """The same model with its anatomy named anew, after a test has exchanged some of its modules."""
    return replace(model, anatomy=anatomy(model.hf))
