"""Which prompts a command looks at: those given one by one, or sequences of a text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.maps.capture import Prompts
    from gossamer.models import LoadedModel

LANGUAGE = "language"


def read_prompts(
    model: LoadedModel,
    prompts: list[str] | None,
    text: str | None,
    *,
    sequences: int,
    length: int | None,
    seed: int = 0,
) -> Prompts | None:
    """Prompts in words, or `sequences` of a text (a file, a folder, 'language', 'self'); None if nothing is given."""
    if prompts and text:
        raise GossamerError("Give prompts or a text, not both.")
    if text is None:
        return prompts or None
    from gossamer.evaluate.texts import held_out_text

    source = None if text == LANGUAGE else text
    return held_out_text(model, source, n=sequences, length=length, seed=seed).sequences
