import re

import pytest

from gossamer.corpus import language, tokenizer
from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load()


def test_the_stored_tokenizer_is_the_one_the_templates_make(tok):
    built = tokenizer.build()
    assert built.get_vocab() == tok.get_vocab()
    text = language.document(8, 0)
    assert built(text)["input_ids"] == tok(text)["input_ids"]


@pytest.mark.parametrize("split", [Split.TRAIN, Split.HELD_OUT])
def test_the_language_has_one_token_a_word_and_decodes_to_itself(tok, split):
    byte_tokens = {tok.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}
    for index in range(50):
        text = language.document(11, index, split=split)
        ids = tok(text)["input_ids"]
        assert not byte_tokens & set(ids)
        assert tok.decode(ids[1:]) == text


@pytest.mark.parametrize("text", ["Hello wörld 🙂", "  two  spaces\n\n\tand a tab", "שלום $x$ <script>", "12345"])
def test_any_other_text_survives_as_bytes(tok, text):
    assert tok.decode(tok(text)["input_ids"][1:]) == text


def test_a_document_is_a_function_of_its_seed_and_number():
    assert language.document(1, 7) == language.document(1, 7)
    assert language.document(1, 7) != language.document(1, 8)
    assert language.document(2, 7) != language.document(1, 7)


def test_sequences_fill_their_length_and_begin_with_the_bos(tok):
    sequences = language.sequences(tok, 40, length=128, seed=4)
    assert sequences.ids_NT.shape == (40, 128)
    assert (sequences.ids_NT[:, 0] == tok.bos_token_id).all()
    assert (sequences.ids_NT[:, 1:] != tok.bos_token_id).all()
    later = language.sequences(tok, 10, length=128, seed=4, start=30)
    assert (later.ids_NT == sequences.ids_NT[30:]).all()


def test_stories_refer_back_to_what_was_said():
    text = "\n".join(language.document(3, index) for index in range(60))
    later = re.findall(r"Later (\w+) looked for the (\w+) (\w+) and (she|he) found it at the (\w+)", text)
    assert len(later) > 20
    women = set(Lexicon().women)
    for name, colour, thing, pronoun, _ in later:
        assert f"{name} has a {colour} {thing}" in text
        assert (pronoun == "she") == (name in women)


def test_animals_agree_with_their_verb():
    text = "\n".join(language.document(3, index) for index in range(60))
    for animal, verb in re.findall(r"The (\w+) of \w+ (is|are) (?:happy|sad|strong|quiet)", text):
        assert (verb == "are") == (animal.endswith("s"))
