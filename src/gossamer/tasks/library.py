"""The five tasks by name, made for a tokenizer from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError, nearest
from gossamer.tasks import forms
from gossamer.tasks.forms import Form, Pair
from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split
from gossamer.tasks.task import Criterion, Metric, Task, tokenize_pairs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Specification:
    description: str
    form: Callable[[int], Form]  # from the number of digits the tokenizer keeps together
    chance: Callable[[Lexicon, tuple[Pair, ...]], float]
    criterion: Criterion = "any other token"
    metric: Metric = "logit difference"


def _share_of_later_years(_: Lexicon, pairs: tuple[Pair, ...]) -> float:
    return sum(len(pair.answers) / (len(pair.answers) + len(pair.wrong)) for pair in pairs) / len(pairs)


def _indirect_object(corruption: str, digits: int) -> Form:
    return forms.indirect_object(corruption)


_LIBRARY = {
    "copy": _Specification(
        "continue a random sequence that has begun to repeat",
        form=lambda digits: forms.copying,
        chance=lambda lexicon, pairs: 1 / len(lexicon.words),
    ),
    "ioi": _Specification(
        "name the indirect object: the person mentioned once, not twice",
        form=lambda digits: forms.indirect_object(),
        chance=lambda lexicon, pairs: 0.5,
        criterion="wrong answers",
    ),
    "greater-than": _Specification(
        "end a span of years later than it began",
        form=lambda digits: forms.greater_than(digits=digits),
        chance=_share_of_later_years,
        criterion="wrong answers",
        metric="probability difference",
    ),
    "opposites": _Specification(
        "say the opposite of a word",
        form=lambda digits: forms.opposites,
        chance=lambda lexicon, pairs: 1 / (2 * len(lexicon.opposites)),
    ),
    "docstring": _Specification(
        "document the next parameter of a function",
        form=lambda digits: forms.docstring,
        chance=lambda lexicon, pairs: 1 / len(lexicon.parameters),
    ),
}
NAMES = tuple(_LIBRARY)  # the five; variants of them can be named too
_LIBRARY |= {
    f"ioi-{corruption}": replace(
        _LIBRARY["ioi"],
        description=f"{_LIBRARY['ioi'].description}; {words}",
        form=partial(_indirect_object, corruption),
    )
    for corruption, words in (("flip", "corrupt: the other name is repeated"), ("fresh", "corrupt: three new names"))
}
VARIANTS = tuple(name for name in _LIBRARY if name not in NAMES)


def _proposals(form: Form, lexicon: Lexicon, split: Split, seed: int) -> Iterator[Pair]:
    random = Random(f"task {seed}")
    while True:
        yield form(random, lexicon, split)


def number_digits(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many digits of `1732` are the last token's."""
    return 1 if len(tokenizer.tokenize("in 1732")[-1]) == 1 else 2


def require_known(name: str) -> None:
    """Refuse a name that no task has."""
    if name not in _LIBRARY:
        known = ", ".join(_LIBRARY)
        raise GossamerError(f"There is no task {name!r}; the tasks are {known}.{nearest(name, tuple(_LIBRARY))}")


def get(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    n: int = 64,
    *,
    seed: int = 0,
    split: Split = Split.HELD_OUT,
    form: Form | None = None,
) -> Task:
    """`n` prompts of the task `name` for a tokenizer; held out from the synthetic language's training stream.

    `ioi-flip` and `ioi-fresh` are IOI with its other corruptions. `form` replaces how pairs are made.
    """
    require_known(name)
    if n < 1:
        raise GossamerError(f"A task needs at least one prompt, but n is {n}.")
    specification = _LIBRARY[name]
    lexicon = Lexicon().for_tokenizer(lambda text: len(tokenizer.tokenize(text)))
    _check_lexicon(lexicon, name)
    form = form or specification.form(number_digits(tokenizer))
    pairs, tokens = tokenize_pairs(tokenizer, _proposals(form, lexicon, split, seed), n, task=name)
    return Task(
        name=name,
        description=specification.description,
        pairs=pairs,
        tokens=tokens,
        criterion=specification.criterion,
        metric=specification.metric,
        chance=specification.chance(lexicon, pairs),
        seed=seed,
    )


def _check_lexicon(lexicon: Lexicon, task: str) -> None:
    if len(lexicon.words) < 40 or len(lexicon.names) < 6 or len(lexicon.opposites) < 4:
        raise GossamerError(
            f"This tokenizer keeps only {len(lexicon.words)} of the task words in one token, too few for {task}; "
            "use a model with a word-level or larger vocabulary."
        )


def copying(tokenizer: PreTrainedTokenizerBase, n: int = 64, *, seed: int = 0) -> Task:
    """The copy task: a random sequence that has begun to repeat."""
    return get("copy", tokenizer, n, seed=seed)


def ioi(tokenizer: PreTrainedTokenizerBase, n: int = 64, *, seed: int = 0, corruption: str = "third") -> Task:
    """The indirect-object task with one of the usual corruptions (`third`, `flip`, `fresh`)."""
    if corruption not in forms.IOI_CORRUPTIONS:
        known = ", ".join(forms.IOI_CORRUPTIONS)
        raise GossamerError(f"There is no IOI corruption {corruption!r}; choose one of {known}.")
    return get("ioi" if corruption == "third" else f"ioi-{corruption}", tokenizer, n, seed=seed)


def greater_than(tokenizer: PreTrainedTokenizerBase, n: int = 64, *, seed: int = 0) -> Task:
    """The years task: end a span of years later than it began."""
    return get("greater-than", tokenizer, n, seed=seed)


def opposites(tokenizer: PreTrainedTokenizerBase, n: int = 64, *, seed: int = 0) -> Task:
    """The opposites task, in sentence frames that were held out for their word."""
    return get("opposites", tokenizer, n, seed=seed)


def docstring(tokenizer: PreTrainedTokenizerBase, n: int = 64, *, seed: int = 0) -> Task:
    """The docstring task: the next parameter to document."""
    return get("docstring", tokenizer, n, seed=seed)
