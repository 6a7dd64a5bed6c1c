"""The synthetic language's own tokenizer: one token a word, and bytes for everything else.

Words are kept with and without a leading space, numbers in pairs of digits. A text that is not of the language is
spelt out in bytes, so nothing is ever lost: decoding gives the text back.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.corpus import language
from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS = "<|bos|>"
PIECE = r" +(?= )|\n| ?[A-Za-z_]+| ?[0-9]{1,2}| ?[^\sA-Za-z0-9_]+|\s"
SAMPLED_DOCUMENTS = 3_000
PATH = Path(__file__).with_name("tokenizer.json")


def vocabulary() -> list[str]:
    """All pieces of the language in a fixed order: those of the lexicon, then those of a sample of documents."""
    lexicon = Lexicon()
    words: list[str] = []
    for field in fields(lexicon):
        for entry in getattr(lexicon, field.name):
            words += [entry] if isinstance(entry, str) else list(entry)
    pieces = {space + word for word in words for space in ("", " ")}
    pieces |= {f"{number:02d}" for number in range(100)}
    for split in (Split.TRAIN, Split.HELD_OUT):
        for index in range(SAMPLED_DOCUMENTS):
            pieces |= set(re.findall(PIECE, language.document(0, index, split=split)))
    return sorted(pieces)


def build() -> PreTrainedTokenizerFast:
    """The tokenizer, made from the templates and the lexicon."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    ids = {piece: number for number, piece in enumerate([BOS, *bytes_, *vocabulary()])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, ignore_merges=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([BOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, pad_token=BOS, model_max_length=128
    )


def load() -> PreTrainedTokenizerFast:
    """The stored tokenizer."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_file=str(PATH), bos_token=BOS, eos_token=BOS, pad_token=BOS, model_max_length=128
    )
