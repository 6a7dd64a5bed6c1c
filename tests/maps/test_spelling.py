"""Tokens are spelled literally by every kind of tokenizer, parts of characters as bytes; and so they are captured."""

from __future__ import annotations

import pytest
import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import gossamer as gs
from gossamer.attribution.targets import read_prompt
from gossamer.maps.capture import capture
from gossamer.models import LoadedModel
from gossamer.models.spelling import spelled, text_of

TEXT = "hi 😀 שלום 日本 �"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return gs.load("bundled/dense")


def byte_level(*merged: str) -> PreTrainedTokenizerBase:
    """A tokenizer as GPT-2's, with some pieces longer than a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pairs = [(piece[:-1], piece[-1]) for piece in merged]
    vocabulary = {piece: place for place, piece in enumerate([*alphabet, *merged])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_parts_of_characters_are_spelled_as_bytes(model: LoadedModel) -> None:
    """The bundled tokenizer falls back to single bytes."""
    assert spelled(model.tokenizer, model.encode("i 😀ש", bos=False).tolist()) == [
        *("i", " ", "<F0>", "<9F>", "<98>", "<80>", "<D7>", "<A9>")
    ]


def test_a_piece_with_whole_and_broken_characters() -> None:
    """`hi`, the space and the first two bytes of an emoji as one piece, as SmolLM2's vocabulary has them."""
    tokenizer = byte_level("hi", "Ġð", "ĠðŁ", "×©")
    ids = tokenizer("hi 😀ש")["input_ids"]
    assert spelled(tokenizer, ids) == ["hi", " <F0><9F>", "<98>", "<80>", "ש"]
    assert text_of(tokenizer, ids) == "hi 😀ש"


def test_the_sign_for_the_unknown_is_itself_where_the_text_has_it() -> None:
    tokenizer = byte_level("ï¿", "ï¿½")
    assert spelled(tokenizer, tokenizer("�")["input_ids"]) == ["�"]


def test_without_a_tokenizer_tokens_are_numbers() -> None:
    assert spelled(None, [3, 14]) == ["3", "14"]
    assert text_of(None, [3, 14]) == "3 14"


def test_captured_and_attributed_prompts_are_spelled_alike_and_whole(model: LoadedModel) -> None:
    maps = capture(model, TEXT)
    assert not any("�" in token for token in maps.tokens[0])
    assert maps.text() == "<|bos|>" + TEXT
    ids = model.encode(TEXT).tolist()
    assert len(set(maps.tokens[0])) == len(set(ids))
    prompt = read_prompt(model, ids)
    assert (prompt.tokens, prompt.text) == (maps.tokens[0], maps.text())
    assert read_prompt(model, TEXT).text == TEXT
