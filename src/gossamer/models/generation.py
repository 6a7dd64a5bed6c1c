"""Text out of a model, piece by piece as it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.models.loaded import LoadedModel

_UNFINISHED = "�"  # what a tokenizer shows for the first bytes of a character


def stream(
    model: LoadedModel, prompt: str, *, max_tokens: int = 64, temperature: float = 0.0, seed: int = 0
) -> Iterator[str]:
    """Continue `prompt` with a key-value cache; wrong arguments are refused at once, not with the first piece."""
    if max_tokens < 1:
        raise GossamerError(f"max_tokens is {max_tokens}; ask for at least 1.")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise GossamerError(f"temperature is {temperature}; use 0 for greedy decoding or a positive number to sample.")
    prompt_T = model.encode(prompt)
    if not len(prompt_T):
        raise GossamerError("The prompt is empty and this tokenizer has no token to begin with; give some text.")
    room = model.room_after(len(prompt_T))
    if room is not None and room < 1:
        raise GossamerError(f"A prompt of {len(prompt_T)} tokens leaves no room in {model.context_length}; shorten it.")
    steps = max_tokens if room is None else min(max_tokens, room)
    return _pieces(model, prompt_T, _next_tokens(model, prompt_T, steps, temperature, seed))


def _pieces(model: LoadedModel, prompt_T: Tensor, tokens: Iterator[int]) -> Iterator[str]:
    ids = prompt_T.tolist()
    shown = model.decode(ids)
    for token in tokens:
        ids.append(token)
        text = model.decode(ids)
        if len(text) > len(shown) and not text.endswith(_UNFINISHED):
            yield text[len(shown) :]
            shown = text
    if text_left := model.decode(ids)[len(shown) :]:
        yield text_left


def _next_tokens(model: LoadedModel, prompt_T: Tensor, steps: int, temperature: float, seed: int) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    ends = _end_tokens(model)
    cache: Any = None
    feed_BT = prompt_T[None]
    for _ in range(steps):
        logits_V, cache = _forward(model, feed_BT, cache)
        token = _choose(logits_V, temperature, generator)
        if token in ends:
            return
        yield token
        feed_BT = torch.tensor([[token]], device=feed_BT.device)


@torch.no_grad()
def _forward(model: LoadedModel, feed_BT: Tensor, cache: Any) -> tuple[Tensor, Any]:
    out = model.hf(input_ids=feed_BT, past_key_values=cache, use_cache=True)
    return out.logits[0, -1].float().cpu(), out.past_key_values


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator))


def _end_tokens(model: LoadedModel) -> set[int]:
    declared = getattr(model.hf.config, "eos_token_id", None)
    ends = set(declared) if isinstance(declared, list) else {declared}
    ends.add(model.tokenizer.eos_token_id)
    return {end for end in ends if end is not None}
