"""Which text a pair of models is judged on, and the texts off their training distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from gossamer.corpus import Sequences, from_model, from_text, language
from gossamer.corpus.stories import story
from gossamer.corpus.text import LANGUAGE, SELF
from gossamer.corpus.tokenizer import load as load_tokenizer
from gossamer.errors import GossamerError
from gossamer.evaluate.report import TextUsed
from gossamer.models import LoadedModel
from gossamer.tasks import Split, forms
from gossamer.tasks.lexicon import Lexicon

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | Path | Sequences | None

DEFAULT_LENGTH = 256
LANGUAGE_LENGTH = 128
LANGUAGE_SEED = 7_001  # of no training stream and of no run's own measurements
LONG_BLOCKS = (25, 40)  # words; the language's own have 4 to 20


@dataclass(frozen=True)
class HeldOutText:
    """Sequences with a name, and how to make longer ones of the same kind, if that is possible."""

    name: str
    sequences: Sequences
    longer: Callable[[int], Sequences] | None = None

    def used(self) -> TextUsed:
        """What a report says of it."""
        return used(self.name, self.sequences)


@dataclass(frozen=True)
class ShiftedText:
    """Text off the training distribution."""

    name: str
    what: str
    sequences: Sequences


def used(name: str, text: Sequences) -> TextUsed:
    """A text's name, size and hash."""
    tokens = text.ids_NT.size if text.segments_NT is None else int((text.segments_NT >= 0).sum())
    return TextUsed(name, len(text), text.length, int(tokens), text.fingerprint())


def speaks_the_language(model: LoadedModel) -> bool:
    """Whether the model's tokenizer is that of the synthetic language."""
    vocabulary: dict[str, int] = load_tokenizer().get_vocab()
    return bool(model.tokenizer.get_vocab() == vocabulary)


def held_out_text(model: LoadedModel, text: Text, *, n: int, length: int | None, seed: int) -> HeldOutText:
    """The text to judge on: as given, or held-out documents of the synthetic language for the models that speak it.

    `text` is a file or folder, `Sequences`, "self" for text sampled from `model`, or "language".
    """
    if isinstance(text, Sequences):
        return HeldOutText("given sequences", _checked(text.rows(slice(0, n)), model))
    length = _length(model, length)
    tokenizer = model.tokenizer
    if text is None or text == LANGUAGE:
        if text is None and not speaks_the_language(model):
            raise GossamerError(
                f"{model.name} was not trained on the bundled language, so give text to evaluate on: a file, a folder, "
                "or 'self' for text sampled from the dense model."
            )

        def documents(length: int) -> Sequences:
            return language.sequences(tokenizer, n, length=length, seed=LANGUAGE_SEED + seed, split=Split.HELD_OUT)

        return HeldOutText("held-out synthetic language", _checked(documents(length), model), documents)
    if text == SELF:
        sampled = from_model(model.hf, tokenizer, length=length, n=n, seed=seed)
        return HeldOutText(f"sampled from {model.name}", _checked(sampled, model))

    def from_files(length: int) -> Sequences:
        return from_text(text, tokenizer, length=length, limit=n)

    return HeldOutText(str(text), _checked(from_files(length), model), from_files)


def _length(model: LoadedModel, asked: int | None) -> int:
    limit = model.context_length
    default = LANGUAGE_LENGTH if speaks_the_language(model) else DEFAULT_LENGTH
    length = min(default, limit or default) if asked is None else asked
    if length < 2:
        raise GossamerError(f"A sequence needs at least 2 tokens to have something to predict, not {length}.")
    if limit is not None and length > limit:
        raise GossamerError(
            f"{model.name} has {limit} positions, so sequences of {length} tokens do not fit; ask for fewer."
        )
    return length


def _checked(text: Sequences, model: LoadedModel) -> Sequences:
    if len(text) == 0:
        raise GossamerError("The text to evaluate on is empty; give at least one sequence.")
    _length(model, text.length)
    vocabulary = int(model.hf.config.vocab_size)
    if text.ids_NT.min() < 0 or text.ids_NT.max() >= vocabulary:
        raise GossamerError(
            f"The text has token ids outside {model.name}'s vocabulary of {vocabulary:,}; use its tokenizer."
        )
    if not (text.targets() >= 0).any():
        raise GossamerError("The text has nothing to predict: its documents are single tokens; give other text.")
    return text


def shifted_texts(
    model: LoadedModel, text: HeldOutText, other_text: str | Path | None, *, n: int, seed: int
) -> tuple[list[ShiftedText], list[str]]:
    """Texts off the training distribution, and one sentence for each kind that this model or text does not allow."""
    length = text.sequences.length
    found: list[ShiftedText] = []
    skipped: list[str] = []
    if speaks_the_language(model):
        found += language_shifts(model.tokenizer, n=n, length=length, seed=LANGUAGE_SEED + seed)
    if other_text is not None:
        other = _checked(from_text(other_text, model.tokenizer, length=length, limit=n), model)
        found.append(ShiftedText("other text", f"text of {Path(other_text).name}", other))
    elif not found:
        skipped.append("Other text was not measured: give some with other_text.")
    if length >= 4:
        what = f"the last {length - length // 2} tokens of each sequence alone, their beginning cut off"
        found.append(ShiftedText("left-truncated", what, left_truncated(text.sequences.rows(slice(0, n)))))
    longer, reason = _longer(model, text, n)
    found += longer
    return found, skipped + ([reason] if reason else [])


def left_truncated(text: Sequences) -> Sequences:
    """The later half of every sequence; what it refers to is gone, and so is the begin token."""
    half = text.length // 2
    segments = text.segments_NT
    return Sequences(text.ids_NT[:, half:], None if segments is None else segments[:, half:])


def _longer(model: LoadedModel, text: HeldOutText, n: int) -> tuple[list[ShiftedText], str | None]:
    length, limit = text.sequences.length, model.context_length
    longer = 2 * length if limit is None else min(2 * length, limit)
    if longer <= length:
        return [], f"Longer sequences were not measured: {model.name} has {limit} positions."
    if text.longer is None:
        return [], f"Longer sequences were not measured: {text.name} cannot be made longer."
    try:
        sequences = text.longer(longer).rows(slice(0, max(1, n // 2)))
    except GossamerError as too_short:
        return [], f"Longer sequences were not measured: {too_short}"
    return [ShiftedText("longer sequences", f"{longer} tokens a sequence instead of {length}", sequences)], None


def language_shifts(tokenizer: PreTrainedTokenizerBase, *, n: int, length: int, seed: int) -> list[ShiftedText]:
    """The language with another mix of items than in training."""
    low, high = LONG_BLOCKS
    return [
        ShiftedText("stories only", "documents of nothing but stories", _documents(tokenizer, story, n, length, seed)),
        ShiftedText(
            "longer copying",
            f"repeated sequences of {low} to {high} words (in training 4 to 20) and nothing else",
            _documents(tokenizer, _long_copy, n, length, seed),
        ),
    ]


def _long_copy(random: Random, lexicon: Lexicon, split: Split) -> str:
    block = forms.random_block(random, lexicon, split, random.randint(*LONG_BLOCKS))
    return "".join(" " + word for word in block * 2)


def _documents(tokenizer: PreTrainedTokenizerBase, item: language.Item, n: int, length: int, seed: int) -> Sequences:
    def texts() -> Iterator[str]:
        lexicon = Lexicon()
        for index in range(n):
            random = Random(f"{item.__name__}/{seed}/{index}")
            parts: list[str] = []
            while sum(map(len, parts)) < 11 * length:
                parts.append(item(random, lexicon, Split.HELD_OUT))
            yield "\n".join(parts)

    ids = tokenizer(list(texts()), truncation=True, max_length=length)["input_ids"]
    return Sequences(np.array(ids, dtype=np.int64))
