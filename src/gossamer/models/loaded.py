"""A model with its tokenizer and anatomy: what `gossamer.load` returns and every other room takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import gossamer
from gossamer.attention import ATTENTION_NAME, GATE_KEY, GateConfig, attach_gates, detach_gates, gates_of
from gossamer.errors import GossamerError
from gossamer.models import generation
from gossamer.models.anatomy import Anatomy

SAVED_IMPLEMENTATION_KEY = "attn_implementation"  # the key plain transformers reads, and stumbles over, in config.json


@dataclass
class LoadedModel:
    """A causal LM on the gossamer attention function, dense or gated."""

    name: str
    hf: PreTrainedModel
    anatomy: Anatomy
    source: str = ""
    layout: str = "transformers folder"
    optional_tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; a model that came without one says how to give it one."""
        if self.optional_tokenizer is None:
            raise GossamerError(
                f"{self.name} came without a tokenizer; give a folder that has one: load(..., tokenizer=FOLDER), or "
                f"`gossamer models {self.name} --tokenizer FOLDER --save FOLDER`."
            )
        return self.optional_tokenizer

    @property
    def gate(self) -> GateConfig | None:
        """The specification of the gates, or None for a dense model."""
        return GateConfig.from_dict(getattr(self.hf.config, GATE_KEY)) if self.is_sparse else None

    @property
    def is_sparse(self) -> bool:
        """Whether the attention is gated."""
        return bool(gates_of(self.hf))

    @property
    def context_length(self) -> int | None:
        """The most positions the model can take; None where the family sets no limit."""
        length = getattr(self.hf.config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.anatomy.embedding.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights (gates are always float32)."""
        return self.anatomy.embedding.weight.dtype  # type: ignore[return-value]

    @property
    def n_parameters(self) -> int:
        """All parameters, shared ones once."""
        return sum(parameter.numel() for parameter in self.hf.parameters())

    def room_after(self, n_tokens: int) -> int | None:
        """How many positions are left after `n_tokens`; None without a limit."""
        return None if self.context_length is None else self.context_length - n_tokens

    def encode(self, text: str, *, bos: bool = True) -> Tensor:
        """Token ids [T] on the model's device, with the tokenizer's begin token in front if it has one."""
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        begin = self.tokenizer.bos_token_id if bos else None
        return torch.tensor(([] if begin is None else [begin]) + list(ids), dtype=torch.long, device=self.device)

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Text of the token ids, special tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    @torch.no_grad()
    def logits(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] of token ids [B, T] (or [T], taken as a batch of one), without gradients."""
        ids_BT = ids_BT[None] if ids_BT.ndim == 1 else ids_BT
        room = self.room_after(ids_BT.shape[1])
        if room is not None and room < 0:
            raise GossamerError(f"{ids_BT.shape[1]} tokens do not fit {self.name}'s context of {self.context_length}.")
        return self.hf(input_ids=ids_BT.to(self.device), use_cache=False).logits

    def loss_on(self, text: str, *, length: int = 256, batch: int = 4) -> float:
        """Mean next-token cross-entropy in nats over windows of `length` positions, each begun anew (with BOS)."""
        windows = self._windows(text, min(length, self.context_length or length))
        total, count = 0.0, 0
        for ids_BT in _batches(windows, batch):
            nats = _next_token_nats(self.logits(ids_BT), ids_BT)
            total, count = total + float(nats.double().sum()), count + nats.numel()
        return total / count

    def _windows(self, text: str, length: int) -> list[Tensor]:
        ids_N = self.encode(text, bos=False)
        begin = self.tokenizer.bos_token_id
        step = length if begin is None else length - 1
        if step < 1:
            raise GossamerError(f"A window of {length} positions has nothing to predict; use a length of 2 or more.")
        pieces = [ids_N[start : start + step] for start in range(0, len(ids_N), step)]
        if begin is not None:
            pieces = [torch.cat([ids_N.new_tensor([begin]), piece]) for piece in pieces]
        windows = [piece for piece in pieces if len(piece) > 1]
        if not windows:
            raise GossamerError("The text is too short to predict anything in it; give at least two tokens of text.")
        return windows

    def generate(self, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
        """Pieces of text that continue `prompt`, as they are made; greedy at temperature 0, else sampled by `seed`."""
        return generation.stream(self, prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)

    def save(self, folder: str | Path, *, dtype: torch.dtype | str | None = None) -> Path:
        """Write an ordinary transformers folder; gates stay float32 whatever `dtype` the other weights are given."""
        from gossamer.models.checkpoint import save_model

        return save_model(self, folder, dtype=dtype)

    def describe(self) -> str:
        """One line: name, family, size, precision, gates."""
        parts = self.anatomy
        gate = self.gate
        return (
            f"{self.name}: {parts.family}, {parts.n_layers} layers × {parts.n_heads} heads, width {parts.d_model}, "
            f"{self.n_parameters / 1e6:.1f} M parameters, context {self.context_length or 'unlimited'}, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}, "
            + (f"{gate.kind} gates" if gate else "dense attention")
        )

    def provenance(self) -> dict[str, Any]:
        """What a result made with this model should carry: where it came from, its gates and a hash of its weights."""
        return {
            "name": self.name,
            "source": self.source,
            "layout": self.layout,
            "family": self.anatomy.family,
            "gate": self.gate.to_dict() if self.gate else None,
            "weights_sha256": weights_sha256(self.hf),
            "gossamer": gossamer.__version__,
        }


def weights_sha256(hf: torch.nn.Module) -> str:
    """A hash of every tensor's name, type, shape and bytes; equal only for the same weights in the same precision."""
    digest = hashlib.sha256()
    for name, tensor in sorted(hf.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def gate(model: LoadedModel, config: GateConfig | None = None) -> LoadedModel:
    """Give every attention head of a dense model a gate, in place, so that it also survives a plain re-save."""
    if model.is_sparse:
        raise GossamerError(f"{model.name} already has gates; load the dense model, or ungate this one first.")
    attach_gates(model.hf, model.anatomy.sites(), config or GateConfig())
    setattr(model.hf.config, SAVED_IMPLEMENTATION_KEY, ATTENTION_NAME)
    return model


def ungate(model: LoadedModel) -> LoadedModel:
    """Take the gates off again, in place; what was trained into the other weights stays."""
    detach_gates(model.hf)
    vars(model.hf.config).pop(SAVED_IMPLEMENTATION_KEY, None)
    return model


def same_tokenizer(first: LoadedModel, second: LoadedModel) -> bool:
    """Whether both models give every text the same token ids."""
    one, two = first.tokenizer, second.tokenizer
    if one is two:
        return True
    probe = "The 12 naïve\n\tdogs' tails, twice:  wag-wag 3.14!"
    return (
        one.get_vocab() == two.get_vocab()
        and one.bos_token_id == two.bos_token_id
        and one(probe, add_special_tokens=False)["input_ids"] == two(probe, add_special_tokens=False)["input_ids"]
    )


def require_same_tokenizer(first: LoadedModel, second: LoadedModel) -> None:
    """Refuse a pair whose members do not share their tokens."""
    if not same_tokenizer(first, second):
        raise GossamerError(
            f"{first.name} ({len(first.tokenizer):,} tokens) and {second.name} ({len(second.tokenizer):,} tokens) do"
            " not share a tokenizer; compare a sparse model with the dense model it was made from."
        )


def _next_token_nats(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten(), reduction="none"
    )


def _batches(windows: list[Tensor], batch: int) -> Iterator[Tensor]:
    """Stack windows of equal length; only the last window can be shorter and goes alone."""
    full = [window for window in windows if len(window) == len(windows[0])]
    for start in range(0, len(full), batch):
        yield torch.stack(full[start : start + batch])
    for window in windows[len(full) :]:
        yield window[None]
