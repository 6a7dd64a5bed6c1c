"""The words: one list for the tasks and for the synthetic language.

Every word is a common one, so that most tokenizers keep it whole; `Lexicon.for_tokenizer` drops the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from gossamer.errors import GossamerError

_WOMEN = "Mary Sarah Anna Lisa Kate Emma Rose Amy Alice Laura Jane Helen Ruth Grace Julia Susan"
_MEN = "John Tom James Dan Paul Mark Peter Jack Adam Ben David Henry George Martin Simon Frank"
_PLACES = "garden kitchen school office market station library church park store house hotel river bridge forest"
_GIFTS = "book drink ring letter basket ball key apple cup hat coat lamp map gift flower"
_THINGS = "box table chair bottle stone coin card knife plate clock door window picture wheel rope bell"
_ANIMALS = "dog cat horse bird fish bear cow duck sheep mouse"
_COLOURS = "red blue green white black yellow brown grey"
_PARAMETERS = (
    "file name size path key value index text node data user item list state time code color count date event "
    "field group image label level line message method mode model number option order page parent point port"
)
_FUNCTIONS = "load save open read write send move find make build check test start stop update create"
_EVENTS = "war trip trade strike drought project contract reign voyage campaign search festival"
_OPPOSITES = (
    "large small,hot cold,good bad,old new,long short,high low,fast slow,rich poor,hard soft,light dark,early late,"
    "happy sad,open closed,full empty,strong weak,clean dirty,wet dry,near far,deep shallow,wide narrow,thick thin,"
    "loud quiet,safe dangerous,sweet bitter,true false,right wrong,first last,up down,left right side,in out,"
    "day night,love hate,life death,win lose,buy sell,push pull,give take,come go,north south,east west,man woman,"
    "king queen,war peace,black white,heavy light weight,begin end,question answer,friend enemy,brother sister,"
    "summer winter"
)


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Pairs in which every word occurs once, so that each word has one opposite."""
    seen: set[str] = set()
    pairs = []
    for entry in text.split(","):
        words = entry.split()
        if len(words) == 2 and not seen & set(words):
            pairs.append((words[0], words[1]))
            seen |= set(words)
    return tuple(pairs)


@dataclass(frozen=True)
class Lexicon:
    """The words that templates draw from; every entry is a tuple of words without spaces."""

    women: tuple[str, ...] = tuple(_WOMEN.split())
    men: tuple[str, ...] = tuple(_MEN.split())
    places: tuple[str, ...] = tuple(_PLACES.split())
    gifts: tuple[str, ...] = tuple(_GIFTS.split())
    things: tuple[str, ...] = tuple(_THINGS.split())
    animals: tuple[str, ...] = tuple(_ANIMALS.split())
    colours: tuple[str, ...] = tuple(_COLOURS.split())
    parameters: tuple[str, ...] = tuple(_PARAMETERS.split())
    functions: tuple[str, ...] = tuple(_FUNCTIONS.split())
    events: tuple[str, ...] = tuple(_EVENTS.split())
    opposites: tuple[tuple[str, str], ...] = _pairs(_OPPOSITES)

    @property
    def names(self) -> tuple[str, ...]:
        """Every first name."""
        return self.women + self.men

    @property
    def adjectives(self) -> tuple[str, ...]:
        """What a thing can be: the first adjectives of the opposites, both sides."""
        return tuple(word for pair in self.opposites[:20] for word in pair)

    @property
    def words(self) -> tuple[str, ...]:
        """All words a random sequence may contain, each once, in a fixed order."""
        groups = (self.names, self.places, self.gifts, self.things, self.animals, self.colours, self.parameters)
        return tuple(dict.fromkeys(word for group in groups for word in group))

    def opposite_of(self, word: str) -> str:
        """The opposite of a word, in either direction."""
        for first, second in self.opposites:
            if word in (first, second):
                return second if word == first else first
        raise GossamerError(f"No opposite of {word!r} is known; choose one of the words of `Lexicon.opposites`.")

    def for_tokenizer(self, n_tokens: Callable[[str], int]) -> Lexicon:
        """The words that this tokenizer keeps whole after a space (opposites: after a quotation mark)."""

        def whole(word: str) -> bool:
            return n_tokens(" " + word) == 1

        def quoted(word: str) -> bool:
            return n_tokens(word) == 1

        kept = {
            field.name: tuple(filter(whole, getattr(self, field.name)))
            for field in fields(self)
            if field.name != "opposites"
        }
        pairs = tuple(pair for pair in self.opposites if all(map(quoted, pair)))
        return replace(self, opposites=pairs, **kept)
