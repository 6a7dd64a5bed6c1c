from __future__ import annotations

from math import log
from pathlib import Path

import numpy as np
import pytest
import torch

from gossamer.attention import ForceOpen, ForceShut, gates_of, tape
from gossamer.corpus import Sequences, from_text
from gossamer.evaluate.losses import (
    TextLosses,
    as_it_is,
    density_on,
    evaluating,
    losses_on,
    rows_at_once,
    without_attention,
)
from gossamer.models import LoadedModel
from gossamer.sparsify import measure
from gossamer.sparsify.forward import model_inputs


def losses(text: Sequences, reference: LoadedModel, **models: LoadedModel) -> dict[str, TextLosses]:
    forwards = {name: as_it_is(model.hf) for name, model in models.items()} | {"dense": as_it_is(reference.hf)}
    vocabulary = reference.hf.config.vocab_size
    return losses_on(text, forwards, reference="dense", device=reference.device, vocabulary=vocabulary)


def test_loss_is_that_of_loss_on(dense: LoadedModel, sparse: LoadedModel, tmp_path: Path) -> None:
    words = "The dog is at the garden. Mary has a red box. " * 40
    ids = dense.tokenizer(words, add_special_tokens=False)["input_ids"][: 23 * 6]
    words = dense.tokenizer.decode(ids)
    (tmp_path / "text.txt").write_text(words)
    text = from_text(tmp_path / "text.txt", dense.tokenizer, length=24)
    assert len(text) == 6
    found = losses(text, dense, sparse=sparse)
    assert found["dense"].loss == pytest.approx(dense.loss_on(words, length=24), abs=1e-5)
    assert found["sparse"].loss == pytest.approx(sparse.loss_on(words, length=24), abs=1e-5)
    assert found["sparse"].loss != pytest.approx(found["dense"].loss, abs=1e-4)


def test_agrees_with_the_trainers_measurement(dense: LoadedModel, sparse: LoadedModel, packed: Sequences) -> None:
    measured = measure(sparse.hf, packed, batch=2, teacher=dense.hf)
    found = losses(packed, dense, sparse=sparse)["sparse"]
    assert found.loss == pytest.approx(measured.loss, abs=1e-5)
    assert found.divergence == pytest.approx(measured.divergence, abs=1e-5)
    assert measured.density is not None
    assert found.open_edges == measured.density.open_edges


def test_divergence_of_identical_models_is_zero(dense: LoadedModel, text: Sequences) -> None:
    found = losses(text, dense, same=dense)["same"]
    assert not found.divergence_N.any()


def test_divergence_by_hand(dense: LoadedModel, sparse: LoadedModel, text: Sequences) -> None:
    found = losses(text, dense, sparse=sparse)["sparse"]
    ids = torch.as_tensor(text.ids_NT[1:2])
    p, q = (model.logits(ids)[0, :-1].double().softmax(-1) for model in (dense, sparse))
    by_hand = sum(p[t, v] * (p[t, v] / q[t, v]).log() for t in range(len(p)) for v in range(p.shape[1]))
    assert by_hand > 1e-3
    assert found.divergence_N[1] == pytest.approx(float(by_hand), rel=1e-4)


def test_targets_across_documents_do_not_count(dense: LoadedModel, packed: Sequences) -> None:
    found = losses(packed, dense)["dense"]
    assert (found.tokens_N == packed.length - 3).all()


def test_density_is_counted_by_a_slow_obvious_loop(dense: LoadedModel, sparse: LoadedModel, packed: Sequences) -> None:
    assert packed.segments_NT is not None
    with tape(sparse.hf, record=("gate",)) as recorded, torch.no_grad():
        sparse.hf(**model_inputs(packed, "cpu"))
    open_edges = causal = inside = 0
    for layer in range(2):
        gate_BHQK = recorded["gate", layer]
        for row, segments in enumerate(packed.segments_NT):
            for head in range(4):
                for query in range(packed.length):
                    for key in range(query + 1):
                        causal += 1
                        inside += int(segments[query] == segments[key])
                        open_edges += int(gate_BHQK[row, head, query, key] > 0)
    assert 0 < open_edges < inside < causal
    found = losses(packed, dense, sparse=sparse)["sparse"]
    density = density_on(packed, found.open_edges, sparse.hf)
    tokens = packed.ids_NT.size
    assert density.open_edges == open_edges
    assert density.of_causal_pairs == open_edges / causal
    assert density.of_document_pairs == open_edges / inside
    assert density.per_token == open_edges / tokens
    assert density.per_query_and_head == open_edges / (tokens * 8)


def test_without_attention_equals_zeroed_values(dense: LoadedModel, text: Sequences) -> None:
    found = without_attention(dense.hf)(model_inputs(text, "cpu"))[0]
    shut = [ForceShut(layer, torch.ones(1, 1, 1, 1, dtype=torch.bool)) for layer in range(2)]
    with torch.no_grad():
        before = dense.hf(torch.as_tensor(text.ids_NT)).logits
        with tape(dense.hf, replace=shut):
            every_edge_shut = dense.hf(torch.as_tensor(text.ids_NT)).logits
        for block in dense.hf.transformer.h:
            block.attn.c_attn.weight[:, 32:] = 0
            block.attn.c_attn.bias[32:] = 0
        zeroed = dense.hf(torch.as_tensor(text.ids_NT)).logits
    torch.testing.assert_close(found, zeroed, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, every_edge_shut, rtol=0, atol=1e-6)
    assert (before - zeroed).abs().max() > 0.1


def test_all_gates_open_is_the_dense_model(dense: LoadedModel, sparse: LoadedModel, text: Sequences) -> None:
    for layer in gates_of(sparse.hf):
        layer.offset_H.data.fill_(200.0)
    found = losses(text, dense, sparse=sparse)
    assert found["sparse"].loss == pytest.approx(found["dense"].loss, abs=1e-5)
    assert found["sparse"].open_edges == 5 * 24 * 25 // 2 * 8
    everything = [ForceOpen(layer, torch.ones(1, 1, 1, 1, dtype=torch.bool)) for layer in range(2)]
    with tape(sparse.hf, replace=everything), torch.no_grad():
        forced = sparse.hf(torch.as_tensor(text.ids_NT)).logits
    torch.testing.assert_close(forced, dense.logits(torch.as_tensor(text.ids_NT)), rtol=0, atol=1e-5)


def test_batches_do_not_change_anything(
    dense: LoadedModel, sparse: LoadedModel, text: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = losses(text, dense, sparse=sparse)["sparse"]
    monkeypatch.setattr("gossamer.evaluate.losses.MOST_NUMBERS", 1)
    assert rows_at_once(24, 1000, copies=2) == 1
    single = losses(text, dense, sparse=sparse)["sparse"]
    np.testing.assert_allclose(whole.nats_N, single.nats_N, rtol=1e-5)
    assert whole.open_edges == single.open_edges


def test_evaluating_switches_dropout_off_and_puts_it_back(dense: LoadedModel) -> None:
    dense.hf.train()
    with evaluating(dense.hf):
        assert not dense.hf.training
    assert dense.hf.training


def test_a_uniform_model_loses_log_of_the_vocabulary(dense: LoadedModel, text: Sequences) -> None:
    dense.hf.lm_head.weight.data.zero_()
    assert losses(text, dense)["dense"].loss == pytest.approx(log(dense.hf.config.vocab_size), abs=1e-5)
