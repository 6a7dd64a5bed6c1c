"""Fixtures of the evaluation's tests: a pair, texts, and one whole report."""

from __future__ import annotations

import pytest
from random_pairs import EFFORT, LENGTH, make_dense, make_language, make_sparse
from transformers import PreTrainedTokenizerBase

from gossamer.corpus import Sequences
from gossamer.corpus.tokenizer import load as load_tokenizer
from gossamer.evaluate import SparsityReport, evaluate
from gossamer.models import LoadedModel


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer()


@pytest.fixture
def dense(tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    return make_dense(tokenizer)


@pytest.fixture
def sparse(dense: LoadedModel) -> LoadedModel:
    return make_sparse(dense)


@pytest.fixture
def text(tokenizer: PreTrainedTokenizerBase) -> Sequences:
    return make_language(tokenizer, 5)


@pytest.fixture
def packed(text: Sequences) -> Sequences:
    """Three documents a sequence, of different lengths."""
    segments_NT = text.ids_NT.copy()
    segments_NT[:, :5], segments_NT[:, 5:16], segments_NT[:, 16:] = 0, 1, 2
    return Sequences(text.ids_NT, segments_NT)


@pytest.fixture(scope="session")
def report(tokenizer: PreTrainedTokenizerBase) -> SparsityReport:
    """A whole evaluation, with a control and a second seed."""
    dense = make_dense(tokenizer)
    control = make_dense(tokenizer, seed=1)
    sparse, second = make_sparse(dense), make_sparse(dense, offset=0.0)
    return evaluate(dense, sparse, control=control, second_seeds=[second], length=LENGTH, effort=EFFORT)
