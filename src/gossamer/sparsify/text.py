"""Where a run's text comes from: arrays, files, a dataset, the synthetic language, or the dense model itself."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gossamer import corpus
from gossamer.corpus.text import LANGUAGE, SELF, TEXT_FILES
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.sparsify.data import Sequences

LONGEST_BY_DEFAULT = 256
TIMED_SEQUENCES = 128
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_DATASET_FILES = ("dataset_info.json", "dataset_dict.json")

Text = str | Path | Sequences | np.ndarray


@dataclass(frozen=True)
class TextSource:
    """A description of text that gives the same sequences whenever it is asked: JSON can hold it."""

    name: str
    length: int
    seed: int

    @property
    def is_made(self) -> bool:
        """Whether sequences are made on demand, at a price in time, rather than read."""
        return self.name in (SELF, LANGUAGE)

    def sequences(self, model: LoadedModel, n: int) -> Sequences:
        """The first `n` sequences, or as many as there are."""
        length, tokenizer = self.length, model.tokenizer
        if self.name == SELF:
            return corpus.from_model(model.hf, tokenizer, length=length, n=n, seed=self.seed)
        if self.name == LANGUAGE:
            from gossamer.corpus import language

            return language.sequences(tokenizer, n, length=length, seed=self.seed)
        if self._is_dataset():
            return corpus.from_dataset(self.name, tokenizer, length=length, limit=n)
        return corpus.from_text(self.name, tokenizer, length=length, limit=n)

    def seconds_per_sequence(self, model: LoadedModel) -> float:
        """What a sequence costs to make; reading one is free beside training on it."""
        if not self.is_made:
            return 0.0
        start = time.monotonic()
        self.sequences(model, TIMED_SEQUENCES)
        return (time.monotonic() - start) / TIMED_SEQUENCES

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "length": self.length, "seed": self.seed}

    @classmethod
    def from_dict(cls, data: Any) -> TextSource:
        """The record `to_dict` wrote."""
        if not isinstance(data, dict) or data.keys() != {"name", "length", "seed"}:
            raise GossamerError(f"A text is described by its name, length and seed, not by {data!r}; begin anew.")
        return cls(**data)

    def _is_dataset(self) -> bool:
        path = Path(self.name)
        if path.exists():
            return any((path / file).exists() for file in _DATASET_FILES)
        looks_like_file = path.suffix in TEXT_FILES
        return bool(_HUB_ID.fullmatch(self.name)) and not looks_like_file


def source_of(text: str | Path, *, length: int, seed: int) -> TextSource:
    """The source a user named; a path is made absolute so that a resumed run finds it again."""
    name = str(text)
    if not name:
        raise GossamerError("No text was named; give a file, a folder, a dataset, 'language' or 'self'.")
    if name not in (SELF, LANGUAGE) and Path(name).expanduser().exists():
        name = str(Path(name).expanduser().resolve())
    return TextSource(name, length, seed)


def default_length(model: LoadedModel) -> int:
    """Tokens in a sequence if nothing was said: the model's context, up to a limit."""
    return min(model.context_length or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)


def check_length(model: LoadedModel, length: int) -> None:
    """Refuse sequences the model has no positions for."""
    if model.context_length is not None and length > model.context_length:
        raise GossamerError(
            f"Sequences of {length} tokens do not fit {model.name}'s context of {model.context_length}."
        )
