import re
from random import Random

import pytest
import torch

from gossamer import tasks
from gossamer.corpus import language, tokenizer
from gossamer.errors import GossamerError
from gossamer.tasks import forms
from gossamer.tasks.lexicon import Lexicon
from gossamer.tasks.split import Split, is_held_out
from gossamer.tasks.task import encode


@pytest.fixture(scope="module")
def tok():
    return tokenizer.load()


@pytest.mark.parametrize("name", tasks.NAMES)
def test_prompts_have_partners_of_equal_length_and_single_token_answers(name, tok):
    task = tasks.get(name, tok, 100, seed=3)
    assert len(task) == 100
    assert sorted(row for batch in task.tokens for row in batch.rows) == list(range(100))
    for batch in task.batches(16):
        assert batch.clean_BT.shape == batch.corrupt_BT.shape
        assert (batch.clean_BT != batch.corrupt_BT).any(1).all()
        for row, ids, answers in zip(batch.rows, batch.clean_BT, batch.answers_BA, strict=True):
            pair = task.pairs[row]
            assert tok.decode(ids[1:]) == pair.clean
            assert {tok.decode([i]) for i in answers if i >= 0} == set(pair.answers)
            assert not set(pair.answers) & set(pair.wrong)
    assert 0 < task.chance < 0.6


@pytest.mark.parametrize("name", tasks.NAMES)
def test_the_same_seed_gives_the_same_prompts_and_another_seed_others(name, tok):
    first, again, other = (tasks.get(name, tok, 20, seed=seed) for seed in (1, 1, 2))
    assert first.pairs == again.pairs
    assert {pair.clean for pair in first.pairs} != {pair.clean for pair in other.pairs}


def test_two_thousand_different_prompts_of_each_task(tok):
    for name in tasks.NAMES:
        task = tasks.get(name, tok, 2_000)
        assert len({pair.clean for pair in task.pairs}) == 2_000


def test_a_perfect_and_a_hopeless_model_score_one_and_zero(tok):
    for name in tasks.NAMES:
        task = tasks.get(name, tok, 30)
        for batch in task.tokens:
            right_BV = torch.zeros(len(batch), len(tok))
            wrong_BV = torch.zeros(len(batch), len(tok))
            for row in range(len(batch)):
                right_BV[row, [i for i in batch.answers_BA[row].tolist() if i >= 0]] = 5.0
                wrong_BV[row, [i for i in batch.wrong_BW[row].tolist() if i >= 0]] = 5.0
            assert task.correct(right_BV, batch).all()
            assert not task.correct(wrong_BV, batch).any()
            assert (task.score(right_BV, batch) > 0).all()


def test_the_seed_sentence_is_eight_tokens_behind_the_bos(tok):
    ids = encode(tok, 'The opposite of "large" is "')
    assert ids[0] == tok.bos_token_id
    assert len(ids) == 9
    assert tok.decode([ids[5]]) == "large"
    assert tok.decode([ids[8]]) == ' "'
    assert encode(tok, 'The opposite of "large" is "small')[-1:] == [tok.convert_tokens_to_ids("small")]


NAMES = "|".join(Lexicon().names)


def giving_pairs(text: str) -> set[frozenset[str]]:
    """The pairs of names in the sentences of giving, in any of their templates."""
    found = set()
    for template in forms.IOI_TEMPLATES:
        words = re.sub(r"\\{(\w)\\}", rf"(?P<\1>{NAMES})", re.escape(template))
        sentence = re.sub(r"\\{\w+\\}", r"\\w+", words)
        found |= {frozenset((match["a"], match["b"])) for match in re.finditer(sentence, text)}
    return found


@pytest.fixture(scope="module")
def stream():
    """A part of the training stream."""
    return "\n".join(language.document(5, index) for index in range(400))


def test_held_out_pairs_of_names_are_in_no_giving_sentence_of_the_training_stream(tok, stream):
    """Exactly that: two such names may still meet elsewhere, in a frame of opposites or in a story."""
    held = {frozenset(re.findall(rf"\b({NAMES})\b", pair.clean)) for pair in tasks.get("ioi", tok, 2_000).pairs}
    seen = giving_pairs(stream)
    assert len(seen) > 100
    assert not held & seen
    assert all(is_held_out("names " + " ".join(sorted(pair))) for pair in held)
    assert not any(is_held_out("names " + " ".join(sorted(pair))) for pair in seen)


def test_a_held_out_pair_in_a_giving_sentence_would_be_noticed(tok, stream):
    for pair in tasks.get("ioi", tok, 50).pairs:
        [added] = giving_pairs(stream + "\n" + pair.completed()) - giving_pairs(stream)
        assert added == frozenset(re.findall(rf"\b({NAMES})\b", pair.clean))


def test_other_held_out_prompts_share_with_the_training_stream_nothing_of_their_own_form(tok, stream):
    """First years, parameters, sequences, and words in their frames; a first year may be the last year of another."""
    held = {name: tasks.get(name, tok, 200) for name in tasks.NAMES}
    seen_years = set(re.findall(r"(?:from the year|from|in) (\d{4})", stream))
    assert len(seen_years) > 50
    for pair in held["greater-than"].pairs:
        assert not set(re.findall(r"\d{4}", pair.clean)) & seen_years
    seen_signatures = set(re.findall(r"self, (\w+, \w+, \w+)\)", stream))
    assert len(seen_signatures) > 50
    for pair in held["docstring"].pairs:
        assert re.search(r"self, (\w+, \w+, \w+)\)", pair.clean).group(1) not in seen_signatures
    for pair in held["opposites"].pairs:
        assert pair.clean not in stream
    for pair in held["copy"].pairs:
        assert pair.clean[:40] not in stream


def test_opposites_are_held_out_by_frame_not_by_word():
    lexicon = Lexicon()
    words = [word for pair in lexicon.opposites for word in pair]
    frames = range(len(forms.OPPOSITE_FRAMES))
    shares = [sum(is_held_out(f"opposite {frame} {word}") for frame in frames) for word in words]
    assert max(shares) < len(forms.OPPOSITE_FRAMES)
    assert sum(shares) > 20


@pytest.mark.parametrize("corruption", forms.IOI_CORRUPTIONS)
def test_ioi_corruptions_change_what_they_say(corruption, tok):
    task = tasks.ioi(tok, 40, corruption=corruption)
    names = "|".join(Lexicon().names)
    for pair in task.pairs:
        clean, corrupt = (re.findall(rf"\b({names})\b", text) for text in (pair.clean, pair.corrupt))
        assert len(clean) == len(corrupt) == 3
        if corruption == "flip":
            assert set(clean) == set(corrupt)
            assert clean[2] != corrupt[2]
        elif corruption == "third":
            assert clean[:2] == corrupt[:2]
            assert corrupt[2] not in clean
        else:
            assert len(set(clean) | set(corrupt)) == 5


def test_greater_than_by_digits_leaves_the_same_tens_digit_undecided():
    random, lexicon = Random(0), Lexicon()
    for _ in range(50):
        pair = forms.greater_than(digits=1)(random, lexicon, Split.ANY)
        tens = re.findall(r"\d{4}", pair.clean)[0][2]
        assert tens not in pair.answers + pair.wrong
        assert all(answer > tens for answer in pair.answers)


def test_unknown_names_and_numbers_are_refused(tok):
    with pytest.raises(GossamerError, match="Did you mean 'copy'"):
        tasks.get("copyy", tok)
    with pytest.raises(GossamerError, match="at least one prompt"):
        tasks.get("copy", tok, 0)
    with pytest.raises(GossamerError, match="corruption"):
        tasks.ioi(tok, 4, corruption="none")


def test_a_task_with_too_few_different_prompts_says_so(tok):
    def always_the_same(random, lexicon, split):
        return forms.copying(Random(0), lexicon, split)

    with pytest.raises(GossamerError, match=r"Only 1 of 5 .*repeat"):
        tasks.get("copy", tok, 5, form=always_the_same)
