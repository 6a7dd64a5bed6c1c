"""What a user did wrong, said in one sentence; bugs of our own stay assertions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GossamerError(ValueError):
    """A mistake the user can mend: the message says what was wrong and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A closing ` Did you mean 'x'?` for a misspelt name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
