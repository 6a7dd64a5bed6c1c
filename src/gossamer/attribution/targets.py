"""What is attributed: a number made of the logits behind a prompt, about one token that could come next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gossamer.errors import GossamerError, nearest
from gossamer.models import LoadedModel, spelling

Kind = Literal["centred logit", "logit", "logit difference", "probability", "log probability"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Prompt:
    """A text as a model reads it: token ids, the begin token in front if there is one, and each token's spelling."""

    text: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    n_begin: int = 0

    def __len__(self) -> int:
        return len(self.ids)

    def ids_T(self, model: LoadedModel) -> Tensor:
        """The ids on the model's device."""
        return torch.tensor(self.ids, device=model.device)


@dataclass(frozen=True)
class Target:
    """A next token and the number about it that is attributed.

    centred logit      its logit minus the mean over the vocabulary: what a shift of all logits cannot change
    logit              its logit alone
    logit difference   its logit minus the mean logit of `foils`
    probability, log probability
    """

    kind: Kind
    token: int
    text: str
    foils: tuple[int, ...] = ()
    foil_texts: tuple[str, ...] = ()

    def of(self, logits_BV: Tensor) -> Tensor:
        """The number [B] in these logits."""
        logit_B = logits_BV[:, self.token]
        if self.kind == "logit":
            return logit_B
        if self.kind == "centred logit":
            return logit_B - logits_BV.mean(-1)
        if self.kind == "logit difference":
            return logit_B - logits_BV[:, list(self.foils)].mean(-1)
        log_probability_B = logits_BV.log_softmax(-1)[:, self.token]
        return log_probability_B.exp() if self.kind == "probability" else log_probability_B

    def describe(self) -> str:
        """The number in words."""
        against = f" against {', '.join(map(repr, self.foil_texts))}" if self.foils else ""
        return f"{self.kind} of {self.text!r}{against}"


def read_prompt(model: LoadedModel, text: str | Sequence[int]) -> Prompt:
    """A text, or token ids taken as they are, as the model's tokens; one that is too long or empty is refused."""
    ids = model.encode(text).tolist() if isinstance(text, str) else [int(token) for token in text]
    if not ids:
        raise GossamerError("The prompt is empty; give at least one token.")
    room = model.room_after(len(ids))
    if room is not None and room < 0:
        raise GossamerError(
            f"The prompt has {len(ids)} tokens and {model.name} reads at most {model.context_length}; shorten it."
        )
    read = text if isinstance(text, str) else spelling.text_of(model.optional_tokenizer, ids)
    tokens = tuple(spelling.spelled(model.optional_tokenizer, ids))
    return Prompt(read, tuple(ids), tokens, begin_tokens(model, ids))


def begin_tokens(model: LoadedModel, ids: Sequence[int]) -> int:
    """How many begin tokens a prompt opens with, none or one: the same in front of every prompt."""
    tokenizer = model.optional_tokenizer
    return int(tokenizer is not None and len(ids) > 0 and ids[0] == tokenizer.bos_token_id)


def spelled(model: LoadedModel, token: int) -> str:
    """The text a token stands for; without a tokenizer, its number."""
    return spelling.spelled(model.optional_tokenizer, [token])[0]


def next_token(model: LoadedModel, prompt: Prompt, text: str) -> int:
    """The one token that `text` is behind the prompt, or the pieces it has."""
    if not text:
        raise GossamerError("The target is empty; name the token to explain, for example 'small'.")
    longer = model.encode(prompt.text + text).tolist()
    added = longer[len(prompt) :]
    if tuple(longer[: len(prompt)]) == prompt.ids and len(added) == 1:
        return int(added[0])
    alone = model.encode(text, bos=False).tolist()
    pieces = added if tuple(longer[: len(prompt)]) == prompt.ids else alone
    if len(pieces) == 1:
        raise GossamerError(
            f"{text!r} melts into the prompt's last token {prompt.tokens[-1]!r}; begin the target or end the prompt"
            " with other white space."
        )
    offered = ", ".join(repr(spelled(model, piece)) for piece in pieces)
    raise GossamerError(
        f"{text!r} is {len(pieces)} tokens behind this prompt ({offered}); choose one token as the target, such as the"
        f" first, {spelled(model, pieces[0])!r}."
    )


def next_token_target(
    model: LoadedModel, prompt: Prompt, text: str, *, kind: Kind | None = None, instead: Sequence[str] = ()
) -> Target:
    """The target for a token; `instead` names the tokens whose mean logit is taken off for a logit difference."""
    kind = kind or ("logit difference" if instead else "centred logit")
    if kind not in KINDS:
        raise GossamerError(f"There is no target {kind!r}; choose one of {', '.join(KINDS)}.{nearest(kind, KINDS)}")
    if (kind == "logit difference") != bool(instead):
        raise GossamerError("A logit difference, and nothing else, needs the tokens that are said instead.")
    foils = tuple(next_token(model, prompt, other) for other in instead)
    token = next_token(model, prompt, text)
    if token in foils:
        raise GossamerError(f"{text!r} cannot be said instead of itself; name another token.")
    return Target(kind, token, spelled(model, token), foils, tuple(spelled(model, foil) for foil in foils))
