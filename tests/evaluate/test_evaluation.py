from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from random_pairs import EFFORT, LENGTH, make_dense, make_language, make_sparse
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import gossamer as gs
from gossamer.attention import gates_of
from gossamer.corpus import Sequences
from gossamer.errors import GossamerError
from gossamer.evaluate import Effort, SparsityReport, evaluate
from gossamer.evaluate.task_scores import answer_nats, score
from gossamer.evaluate.texts import held_out_text, left_truncated
from gossamer.models import LoadedModel
from gossamer.sparsify import measure
from gossamer.tasks import accuracy, get

ONLY_LOSS = Effort(shift_sequences=0, baseline_sequences=0, audit_sequences=0)


def test_every_part_is_there(report: SparsityReport) -> None:
    assert report.roles == ("dense", "sparse", "control", "seed 2", "without attention")
    assert report.task_names == gs.tasks.NAMES
    assert [table.role for table in report.heads] == ["dense", "sparse", "seed 2"]
    assert [shift.name for shift in report.shifts] == [
        "stories only",
        "longer copying",
        "left-truncated",
        "longer sequences",
    ]
    assert report.baselines is not None
    assert [part.name for part in report.baselines.each] == ["score threshold", "weight threshold", "local window"]
    assert report.margins is not None
    assert report.skipped == ()


def test_the_figures_fit_together(report: SparsityReport) -> None:
    dense, sparse, without = (report.score(role) for role in ("dense", "sparse", "without attention"))
    assert sparse.difference.value == pytest.approx(sparse.loss.value - dense.loss.value)
    assert sparse.difference.low <= sparse.difference.value <= sparse.difference.high
    assert sparse.perplexity == pytest.approx(math.exp(sparse.loss.value))
    assert dense.difference.value == dense.divergence.value == 0
    assert dense.density is None
    if without.loss.value > dense.loss.value:
        assert sparse.gain_kept is not None
        share = (without.loss.value - sparse.loss.value) / (without.loss.value - dense.loss.value)
        assert sparse.gain_kept.value == pytest.approx(share)
    assert report.above_control == pytest.approx(sparse.loss.value - report.score("control").loss.value)
    open_edges = sum(count or 0 for row in report.head_table("sparse").open_edges for count in row)
    assert report.density.open_edges == pytest.approx(open_edges, rel=1e-3)
    assert report.density.per_token == pytest.approx(open_edges / report.provenance.text.tokens, rel=1e-3)
    assert 0.02 < report.density.of_causal_pairs < 0.6
    assert (1, 3) in report.head_table("sparse").dead_heads


def test_the_text_is_the_held_out_language(report: SparsityReport, dense: LoadedModel, sparse: LoadedModel) -> None:
    text = held_out_text(dense, None, n=EFFORT.sequences, length=LENGTH, seed=0).sequences
    assert report.provenance.text.fingerprint == text.fingerprint()
    measured = measure(sparse.hf, text, batch=4, teacher=dense.hf)
    assert report.score("sparse").loss.value == pytest.approx(measured.loss, abs=1e-5)
    assert report.score("sparse").divergence.value == pytest.approx(measured.divergence, abs=1e-5)


def test_provenance(report: SparsityReport, dense: LoadedModel) -> None:
    models = report.provenance.models
    assert set(models) == {"dense", "sparse", "control", "seed 2"}
    assert models["dense"] == dense.provenance()
    assert models["sparse"]["gate"]["kind"] == "logit"
    assert len({model["weights_sha256"] for model in models.values()}) == 4
    assert report.provenance.gossamer == gs.__version__


def test_open_gates_keep_all_of_attentions_gain(dense: LoadedModel) -> None:
    """On the dense model's own samples its attention must be worth something."""
    with torch.no_grad():
        dense.hf.transformer.wte.weight.normal_(std=0.5)
    half_open = make_sparse(dense)
    wide_open = make_sparse(dense, offset=100.0, spread=0.0)
    gates_of(wide_open.hf)[1].offset_H.data.fill_(100.0)
    report = evaluate(
        dense, wide_open, second_seeds=[half_open], text="self", length=20, n_sequences=32, tasks=[], effort=ONLY_LOSS
    )
    without, opened, half = (report.score(role) for role in ("without attention", "sparse", "seed 2"))
    assert without.difference.low > 0.1
    assert without.gain_kept is not None
    assert opened.gain_kept is not None
    assert half.gain_kept is not None
    assert without.gain_kept.value == 0
    assert opened.gain_kept.value == pytest.approx(1, abs=1e-4)
    assert half.gain_kept.value < 0.95
    expected = 1 - half.difference.value / without.difference.value
    assert half.gain_kept.value == pytest.approx(expected)
    assert report.density.of_causal_pairs == 1
    assert report.baselines is None
    assert report.margins is None


def test_the_same_twice(dense: LoadedModel, sparse: LoadedModel, text: Sequences) -> None:
    least = Effort(sequences=2, prompts=4, shift_sequences=1, baseline_sequences=1, audit_sequences=1)
    arguments = {"text": text, "tasks": ["copy"], "effort": least}
    assert evaluate(dense, sparse, **arguments) == evaluate(dense, sparse, **arguments)  # type: ignore[arg-type]


def test_a_model_beside_itself_with_open_gates_is_the_dense_model(dense: LoadedModel, text: Sequences) -> None:
    sparse = make_sparse(dense, offset=100.0, spread=0.0)
    gates_of(sparse.hf)[1].offset_H.data.fill_(100.0)
    report = evaluate(dense, sparse, text=text, tasks=["copy", "ioi"], n_prompts=20, effort=ONLY_LOSS)
    found = report.score("sparse")
    assert found.difference.value == pytest.approx(0, abs=1e-5)
    assert found.divergence.value == pytest.approx(0, abs=1e-6)
    for name in report.task_names:
        one, two = report.task(name, "dense"), report.task(name, "sparse")
        assert one.accuracy == two.accuracy
        assert one.answer_loss == pytest.approx(two.answer_loss, abs=1e-5)


def test_left_truncation_keeps_the_later_half(packed: Sequences) -> None:
    found = left_truncated(packed)
    assert (found.ids_NT == packed.ids_NT[:, 12:]).all()
    assert found.segments_NT is not None
    assert packed.segments_NT is not None
    assert (found.segments_NT == packed.segments_NT[:, 12:]).all()


def test_longer_sequences_need_positions(tokenizer: PreTrainedTokenizerBase) -> None:
    dense = make_dense(tokenizer, n_positions=LENGTH)
    report = evaluate(dense, make_sparse(dense), tasks=["copy"], n_prompts=2, effort=Effort(2, 2, 1, 0, 0))
    assert report.skipped == (
        "The task copy was not measured: its prompts have up to 25 tokens and dense 0 has 24 positions.",
        "Longer sequences were not measured: dense 0 has 24 positions.",
    )
    assert not report.tasks
    assert report.provenance.text.length == LENGTH


def test_text_of_ones_own(dense: LoadedModel, sparse: LoadedModel, tmp_path: Path) -> None:
    """A little public-domain prose (Lewis Carroll, 1865), which this tokenizer spells in bytes."""
    file = tmp_path / "alice.txt"
    file.write_text("Alice was beginning to get very tired of sitting by her sister on the bank. " * 8, "utf-8")
    report = evaluate(
        dense, sparse, text=file, other_text=file, length=LENGTH, n_sequences=4, n_prompts=2, effort=EFFORT
    )
    assert report.provenance.text.name == str(file)
    assert report.provenance.text.sequences == 4
    assert "other text" in [shift.name for shift in report.shifts]
    assert "longer sequences" in [shift.name for shift in report.shifts]


def test_text_sampled_from_the_dense_model(dense: LoadedModel) -> None:
    found = held_out_text(dense, "self", n=3, length=10, seed=1)
    assert found.sequences.ids_NT.shape == (3, 10)
    assert "sampled" in found.name


def test_task_scores_are_those_of_the_tasks_room(sparse: LoadedModel) -> None:
    task = get("ioi", sparse.tokenizer, 40, seed=3)
    found = score(sparse.hf, task, role="sparse")
    assert found.accuracy.value == pytest.approx(accuracy(sparse.hf, task))
    assert 0 < found.accuracy.value < 1
    assert found.prompts == 40


def test_the_loss_on_answers_counts_all_right_answers() -> None:
    logits_BV = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]]))
    nats_B = answer_nats(logits_BV, torch.tensor([[1, 3], [0, -1]]))
    torch.testing.assert_close(nats_B, -torch.tensor([0.6, 0.1], dtype=torch.float64).log(), rtol=0, atol=1e-6)


def with_words(model: LoadedModel) -> LoadedModel:
    vocabulary = {"<s>": 0, "a": 1, "b": 2}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    model.optional_tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
    return model


class TestBadInput:
    def test_a_pair_that_does_not_share_a_tokenizer(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        with pytest.raises(GossamerError, match="do not share a tokenizer"):
            evaluate(dense, with_words(sparse))

    def test_a_pair_with_other_vocabularies(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        sparse.hf.resize_token_embeddings(dense.hf.config.vocab_size + 5)
        with pytest.raises(GossamerError, match="different vocabularies"):
            evaluate(dense, sparse)

    def test_models_in_the_wrong_places(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        with pytest.raises(GossamerError, match="give the dense model first"):
            evaluate(sparse, dense)
        with pytest.raises(GossamerError, match="has no gates"):
            evaluate(dense, dense)
        with pytest.raises(GossamerError, match="no dense control"):
            evaluate(dense, sparse, control=sparse)

    def test_an_empty_text(self, dense: LoadedModel, sparse: LoadedModel, tmp_path: Path) -> None:
        (tmp_path / "empty.txt").write_text("")
        with pytest.raises(GossamerError, match="empty"):
            evaluate(dense, sparse, text=tmp_path / "empty.txt", length=LENGTH)
        with pytest.raises(GossamerError, match="empty"):
            evaluate(dense, sparse, text=Sequences(np.empty((0, 8), dtype=np.int64)))

    def test_a_text_shorter_than_one_sequence(self, dense: LoadedModel, sparse: LoadedModel, tmp_path: Path) -> None:
        (tmp_path / "short.txt").write_text("The dog is here.")
        with pytest.raises(GossamerError, match="shorter than one sequence of 24 tokens"):
            evaluate(dense, sparse, text=tmp_path / "short.txt", length=LENGTH)

    def test_a_text_that_is_not_there(self, dense: LoadedModel, sparse: LoadedModel, tmp_path: Path) -> None:
        with pytest.raises(GossamerError, match="no text at"):
            evaluate(dense, sparse, text=tmp_path / "missing.txt", length=LENGTH)

    def test_sequences_that_do_not_fit(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        with pytest.raises(GossamerError, match="48 positions"):
            evaluate(dense, sparse, length=64)
        with pytest.raises(GossamerError, match="48 positions"):
            evaluate(dense, sparse, text=make_language(dense.tokenizer, 2, length=60))
        with pytest.raises(GossamerError, match="at least 2 tokens"):
            evaluate(dense, sparse, length=1)

    def test_tokens_of_another_vocabulary(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        with pytest.raises(GossamerError, match="use its tokenizer"):
            evaluate(dense, sparse, text=Sequences(np.full((2, 8), 5_000)))

    def test_nothing_to_predict(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        alone = Sequences(np.ones((2, 8), dtype=np.int64), np.arange(16).reshape(2, 8))
        with pytest.raises(GossamerError, match="nothing to predict"):
            evaluate(dense, sparse, text=alone)

    def test_a_model_of_another_language_needs_text(self, dense: LoadedModel, sparse: LoadedModel) -> None:
        with_words(sparse)
        dense.optional_tokenizer = sparse.optional_tokenizer
        with pytest.raises(GossamerError, match="give text to evaluate on"):
            evaluate(dense, sparse)

    def test_an_unknown_task(self, dense: LoadedModel, sparse: LoadedModel, text: Sequences) -> None:
        with pytest.raises(GossamerError, match="Did you mean 'copy'"):
            evaluate(dense, sparse, text=text, tasks=["copie"])

    @pytest.mark.parametrize("wrong", [{"n_prompts": 0}, {"n_sequences": 0}])
    def test_too_little_work(self, dense: LoadedModel, sparse: LoadedModel, wrong: dict[str, int]) -> None:
        with pytest.raises(GossamerError, match="at least one"):
            evaluate(dense, sparse, **wrong)  # type: ignore[arg-type]
