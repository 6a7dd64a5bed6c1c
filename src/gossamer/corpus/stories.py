"""Ordinary narrative sentences with agreement and with reference across sentences.

A story introduces people, their things and where they are, and comes back to them later in shuffled order: who has
what, what it is like and where it was put can only be known by looking back.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split

_FEELINGS = ("happy", "sad", "strong", "quiet")


@dataclass(frozen=True)
class _Person:
    name: str
    pronoun: str
    possessive: str
    thing: str
    colour: str
    place: str
    animal: str
    number: str


def _person(random: Random, lexicon: Lexicon, taken: set[str]) -> _Person:
    woman = random.random() < 0.5
    return _Person(
        name=random.choice([name for name in (lexicon.women if woman else lexicon.men) if name not in taken]),
        pronoun="she" if woman else "he",
        possessive="her" if woman else "his",
        thing=random.choice([thing for thing in lexicon.things if thing not in taken]),
        colour=random.choice(lexicon.colours),
        place=random.choice([place for place in lexicon.places if place not in taken]),
        animal=random.choice([animal for animal in lexicon.animals if animal not in taken]),
        number=random.choice(("one", "two")),
    )


def _introduction(random: Random, person: _Person) -> list[str]:
    animal = {
        "one": f"{person.name} has a {person.animal} that is often near the {person.place}",
        "two": f"{person.name} has two {person.animal}s that are often near the {person.place}",
    }[person.number]
    facts = [
        f"{person.name} has a {person.colour} {person.thing}",
        random.choice(
            (
                f"{person.name} is at the {person.place}",
                f"{person.name} put the {person.thing} at the {person.place}",
            )
        ),
    ]
    if person.animal not in ("fish", "sheep", "mouse"):
        facts.append(animal)
    return facts


def _return(random: Random, person: _Person) -> list[str]:
    facts = [
        f"Later {person.name} looked for the {person.colour} {person.thing} and {person.pronoun} found it "
        f"at the {person.place}",
        f"The {person.thing} of {person.name} is {person.colour}",
        f"{person.name} went back to the {person.place} because {person.pronoun} left {person.possessive} "
        f"{person.colour} {person.thing} there",
    ]
    if person.animal not in ("fish", "sheep", "mouse"):
        verb, plural = ("is", "") if person.number == "one" else ("are", "s")
        feeling = random.choice(_FEELINGS)
        facts.append(f"The {person.animal}{plural} of {person.name} {verb} {feeling} at the {person.place}")
    return random.sample(facts, 2)


def _proposed_person(random: Random, lexicon: Lexicon, taken: set[str]) -> tuple[_Person, str]:
    person = _person(random, lexicon, taken)
    return person, f"story {person.name} {person.colour} {person.thing} {person.place}"


def story(random: Random, lexicon: Lexicon, split: Split) -> str:
    """One story of two or three people; every sentence that states a fact is on the asked side of the split."""
    people: list[_Person] = []
    taken: set[str] = set()
    for _ in range(random.randint(2, 3)):
        person = split.draw(partial(_proposed_person, random, lexicon, taken))
        people.append(person)
        taken |= {person.name, person.thing, person.place, person.animal}
    opening = [sentence for person in people for sentence in _introduction(random, person)]
    ending = [sentence for person in people for sentence in _return(random, person)]
    random.shuffle(ending)
    return ". ".join(opening + ending) + "."
