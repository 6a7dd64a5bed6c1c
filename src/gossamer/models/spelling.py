"""Token ids as text, literally: each token's own text, and a prompt's as a whole."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from transformers import PreTrainedTokenizerBase

UNKNOWN = "\ufffd"  # what a decoder writes for bytes that are no character


def spelled(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int]) -> list[str]:
    """Each token as the text it stands for; without a tokenizer, its number.

    A token may be only part of a character: such bytes are spelled in hexadecimal, `<F0><9F>`, so that tokens that
    differ look different.
    """
    if tokenizer is None:
        return [str(token) for token in ids]
    return [_spelled(tokenizer, int(token)) for token in ids]


def text_of(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int]) -> str:
    """The text of all tokens together, special ones included; without a tokenizer, their numbers."""
    if tokenizer is None:
        return " ".join(str(token) for token in ids)
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def _spelled(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if UNKNOWN not in text:
        return text
    content = _bytes_of(tokenizer.convert_ids_to_tokens(token))
    return text if content is None else _with_hexadecimal(content)


def _bytes_of(piece: str) -> bytes | None:
    """The bytes behind a piece of a vocabulary, whether it spells a byte as `<0xF0>` or as GPT-2 does, in letters."""
    if fallback := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(fallback[1])
    letters = _byte_of_letter()
    return bytes(letters[letter] for letter in piece) if all(letter in letters for letter in piece) else None


def _with_hexadecimal(content: bytes) -> str:
    decoded = content.decode("utf-8", errors="surrogateescape")
    return "".join(f"<{ord(one) - 0xDC00:02X}>" if "\udc80" <= one <= "\udcff" else one for one in decoded)


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable ones stand for themselves, the others for the letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
