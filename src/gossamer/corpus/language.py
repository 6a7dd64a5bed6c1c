"""The synthetic language: documents that mix the tasks' forms with stories, from one seed.

Document number i of a seed is a pure function of (seed, i, split), so the order of the data survives any interruption.
Every document fills its sequence, so the pairs inside one document are all causal pairs of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from gossamer.corpus.sequences import Sequences
from gossamer.corpus.stories import story
from gossamer.tasks import forms
from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = Callable[[Random, Lexicon, Split], str]


def _repeated_sequence(random: Random, lexicon: Lexicon, split: Split) -> str:
    block = forms.random_block(random, lexicon, split, random.randint(4, 20))
    return "".join(" " + word for word in block * 2)


def _exchange(random: Random, lexicon: Lexicon, split: Split) -> str:
    return forms.indirect_object()(random, lexicon, split).completed()


def _years(random: Random, lexicon: Lexicon, split: Split) -> str:
    pair = forms.greater_than()(random, lexicon, split)
    return pair.completed(random.choice(pair.answers))


def _opposite(random: Random, lexicon: Lexicon, split: Split) -> str:
    return forms.opposites(random, lexicon, split).completed()


def _function(random: Random, lexicon: Lexicon, split: Split) -> str:
    return forms.docstring(random, lexicon, split).completed()


ITEMS: tuple[tuple[Item, float], ...] = (
    (_repeated_sequence, 0.27),
    (_exchange, 0.23),
    (_years, 0.10),
    (_opposite, 0.14),
    (_function, 0.10),
    (story, 0.16),
)


def document(seed: int, index: int, *, n_characters: int = 1_400, split: Split = Split.TRAIN) -> str:
    """Document `index` of the stream of `seed`: items one after the other, at least `n_characters` long."""
    random = Random(f"{seed}/{index}/{split.value}")
    lexicon = Lexicon()
    makers, weights = zip(*ITEMS, strict=True)
    items: list[str] = []
    length = 0
    while length < n_characters:
        item = random.choices(makers, weights)[0](random, lexicon, split)
        items.append(item)
        length += len(item)
    return "\n".join(items)


def documents(seed: int, *, split: Split = Split.TRAIN, start: int = 0) -> Iterator[str]:
    """The endless stream of documents of a seed."""
    index = start
    while True:
        yield document(seed, index, split=split)
        index += 1


def sequences(
    tokenizer: PreTrainedTokenizerBase,
    n: int,
    *,
    length: int,
    seed: int,
    start: int = 0,
    split: Split = Split.TRAIN,
) -> Sequences:
    """Documents `start … start + n` as one sequence each, cut to its sequence, the BOS token included."""
    texts = [document(seed, index, n_characters=11 * length, split=split) for index in range(start, start + n)]
    ids = tokenizer(texts, truncation=True, max_length=length)["input_ids"]
    return Sequences(np.array(ids, dtype=np.int64))
