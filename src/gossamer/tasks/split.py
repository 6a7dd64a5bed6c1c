"""What the training stream may contain and what is kept for held-out prompts, decided by a hash of the content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from gossamer.errors import GossamerError

HELD_OUT_SHARE = 10  # per cent
T = TypeVar("T")


class Split(Enum):
    """Which side of the hash split content is drawn from."""

    TRAIN = "train"
    HELD_OUT = "held-out"
    ANY = "any"

    def allows(self, key: str) -> bool:
        """Whether content with this key belongs to this side."""
        if self is Split.ANY:
            return True
        return is_held_out(key) == (self is Split.HELD_OUT)

    def draw(self, propose: Callable[[], tuple[T, str]], *, attempts: int = 2_000) -> T:
        """The first proposal (content, key) on this side."""
        for _ in range(attempts):
            content, key = propose()
            if self.allows(key):
                return content
        raise GossamerError(
            f"No {self.value} content was found in {attempts} attempts: the tokenizer leaves too few words; "
            "use split='any' or a tokenizer with a larger vocabulary."
        )


def is_held_out(key: str) -> bool:
    """A fixed pseudo-random tenth of all keys."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_SHARE
