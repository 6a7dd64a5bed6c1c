"""The forms of the five behaviours: each makes one clean/corrupt pair from a random generator.

The tasks use the pairs as prompts; the synthetic language writes them out in full, `pair.completed()`.
What must not be shared between training stream and held-out prompts is named by each form's key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupt prompt with the clean prompt's right and wrong next tokens, as strings."""

    clean: str
    corrupt: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]
    template: str
    ending: str = ""

    def completed(self, answer: str | None = None) -> str:
        """The clean prompt with its answer and the rest of its sentence."""
        return self.clean + (answer if answer is not None else self.answers[0]) + self.ending


Form = Callable[[Random, Lexicon, Split], Pair]

COPY_TOKENS = 24


def _spaced(words: list[str]) -> str:
    return "".join(" " + word for word in words)


def random_block(random: Random, lexicon: Lexicon, split: Split, length: int) -> list[str]:
    """A random sequence of distinct words from one side of the split."""

    def propose() -> tuple[list[str], str]:
        block = random.sample(lexicon.words, length)
        return block, "copy " + " ".join(block[:4])

    return split.draw(propose)


def copying(random: Random, lexicon: Lexicon, split: Split) -> Pair:
    """A random sequence, then the same again up to some point; the corrupt prompt repeats another sequence."""
    length = random.randint(13, 18)
    shown = COPY_TOKENS - length
    clean = random_block(random, lexicon, split, length)
    corrupt = random_block(random, lexicon, split, length)
    while corrupt[shown] in clean or clean[shown] in corrupt:
        corrupt = random_block(random, lexicon, split, length)
    return Pair(
        clean=_spaced(clean + clean[:shown]),
        corrupt=_spaced(corrupt + corrupt[:shown]),
        answers=(" " + clean[shown],),
        wrong=(" " + corrupt[shown],),
        template=f"block of {length}",
        ending=_spaced(clean[shown + 1 :]),
    )


IOI_TEMPLATES = (
    "When {a} and {b} went to the {place}, {s} gave a {gift} to",
    "When {a} and {b} were in the {place}, {s} showed the {gift} to",
    "Then {a} and {b} had a long day at the {place}, and {s} handed the {gift} to",
    "After {a} and {b} left the {place}, {s} sold a {gift} to",
    "While {a} and {b} were working at the {place}, {s} brought a {gift} to",
    "Then, {a} and {b} walked to the {place}. Later {s} offered the {gift} to",
)
IOI_CORRUPTIONS = ("fresh", "third", "flip")


def name_pair(random: Random, lexicon: Lexicon, split: Split) -> tuple[str, str]:
    """Two names in random order whose unordered pair is on one side of the split."""

    def propose() -> tuple[tuple[str, str], str]:
        first, second = random.sample(lexicon.names, 2)
        return (first, second), "names " + " ".join(sorted((first, second)))

    return split.draw(propose)


def indirect_object(corruption: str = "third") -> Form:
    """IOI with one of the usual corruptions.

    `third`: the repeated name becomes a third one; `flip`: it becomes the other name, so the answer flips;
    `fresh`: all three names are new and different.
    """

    def form(random: Random, lexicon: Lexicon, split: Split) -> Pair:
        subject, other = name_pair(random, lexicon, split)
        first, second = random.sample((subject, other), 2)
        new = random.sample([name for name in lexicon.names if name not in (subject, other)], 3)
        number = random.randrange(len(IOI_TEMPLATES))
        template = IOI_TEMPLATES[number]
        scene = {"place": random.choice(lexicon.places), "gift": random.choice(lexicon.gifts)}
        names = {
            "third": {"a": first, "b": second, "s": new[0]},
            "flip": {"a": first, "b": second, "s": other},
            "fresh": {"a": new[0], "b": new[1], "s": new[2]},
        }[corruption]
        return Pair(
            clean=template.format(a=first, b=second, s=subject, **scene),
            corrupt=template.format(**names, **scene),
            answers=(" " + other,),
            wrong=(" " + subject,),
            template=f"{number} {'ABBA' if second == subject else 'BABA'}",
            ending=".",
        )

    return form


YEAR_TEMPLATES = (
    "The {event} lasted from the year {century}{start} to the year {century}",
    "The {event} went on from {century}{start} until {century}",
    "A {event} that began in {century}{start} was over by {century}",
)
CENTURIES = tuple(range(11, 20))


def greater_than(*, digits: int = 2) -> Form:
    """A later year of the same century; the corrupt prompt begins in year 01, after which any year is later.

    With `digits=1`, for tokenizers that split numbers into digits, the answer is the year's tens digit: a larger one
    is right, a smaller one is wrong, and the same one is neither.
    """

    def form(random: Random, lexicon: Lexicon, split: Split) -> Pair:
        def propose() -> tuple[tuple[int, int], str]:
            century, start = random.choice(CENTURIES), random.randint(2, 96)
            return (century, start), f"years {century}{start:02d}"

        century, start = split.draw(propose)
        number = random.randrange(len(YEAR_TEMPLATES))
        template, event = YEAR_TEMPLATES[number], random.choice(lexicon.events)
        tens = start // 10
        later, earlier = range(start + 1, 100), range(2, start + 1)
        return Pair(
            clean=template.format(event=event, century=century, start=f"{start:02d}"),
            corrupt=template.format(event=event, century=century, start="01"),
            answers=tuple(f"{year:02d}" for year in later) if digits == 2 else tuple(map(str, range(tens + 1, 10))),
            wrong=tuple(f"{year:02d}" for year in earlier) if digits == 2 else tuple(map(str, range(tens))),
            template=str(number),
            ending=".",
        )

    return form


OPPOSITE_FRAMES = (
    'The opposite of "{word}" is "',
    'The word "{word}" is the opposite of "',
    '{a} said "{word}" and {b} said the opposite: "',
    'If it is not "{word}", wrote {a}, then it is "',
    'In the book of {a}, the opposite of "{word}" is "',
    '{a} and {b} know that the opposite of "{word}" is "',
)


def opposites(random: Random, lexicon: Lexicon, split: Split) -> Pair:
    """The opposite of a word, between quotation marks; held out are (word, frame) combinations, not words."""
    everything = [word for pair in lexicon.opposites for word in pair]

    def propose() -> tuple[tuple[int, str], str]:
        number, word = random.randrange(len(OPPOSITE_FRAMES)), random.choice(everything)
        return (number, word), f"opposite {number} {word}"

    number, word = split.draw(propose)
    answer = lexicon.opposite_of(word)
    other = random.choice([candidate for candidate in everything if candidate not in (word, answer)])
    first, second = random.sample(lexicon.names, 2)
    frame = OPPOSITE_FRAMES[number]
    return Pair(
        clean=frame.format(word=word, a=first, b=second),
        corrupt=frame.format(word=other, a=first, b=second),
        answers=(answer,),
        wrong=(lexicon.opposite_of(other),),
        template=str(number),
        ending='".',
    )


def _docstring_text(function: str, signature: list[str], documented: list[str], title: str, about: list[str]) -> str:
    lines = [f"def {function}(self, {', '.join(signature)}):", f'    """{title}', ""]
    lines += [f"    :param {name}: the {noun}" for name, noun in zip(documented, about, strict=True)]
    return "\n".join([*lines, "    :param"])


def docstring(random: Random, lexicon: Lexicon, split: Split) -> Pair:
    """The next parameter to document, read off the signature; the corrupt prompt has other parameters."""

    def propose() -> tuple[list[str], str]:
        names = random.sample(lexicon.parameters, 3)
        return names, "parameters " + " ".join(names)

    names = split.draw(propose)
    others = random.sample([name for name in lexicon.parameters if name not in names], 3)
    function = random.choice(lexicon.functions)
    title = f"{random.choice(lexicon.functions)} the {random.choice(lexicon.things)}"
    about = [f"{random.choice(lexicon.colours)} {random.choice(lexicon.things)}" for _ in range(3)]
    return Pair(
        clean=_docstring_text(function, names, names[:2], title, about[:2]),
        corrupt=_docstring_text(function, others, others[:2], title, about[:2]),
        answers=(" " + names[2],),
        wrong=(" " + others[2],),
        template="3 parameters",
        ending=f": the {about[2]}",
    )
