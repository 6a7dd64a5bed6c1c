"""One step after the other: gradients, accumulation, precision, what is trainable."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from gossamer.attention import ForceOpen, gates_of, tape
from gossamer.models import LoadedModel
from gossamer.sparsify import Sequences, SparsifyConfig, measure
from gossamer.sparsify.calibrate import calibrate, keeping_offsets
from gossamer.sparsify.density import count_pairs, density_of
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.forward import logits_of, model_inputs
from gossamer.sparsify.student import prepare
from gossamer.sparsify.trainer import Trainer


def make_trainer(model: LoadedModel, text: Sequences, config: SparsifyConfig) -> Trainer:
    config = config.replace(length=text.length)
    teacher = model.hf if config.needs_teacher else None
    return Trainer(prepare(model, config), teacher, text, config, dense_loss=3.0, processes=Processes("cpu"))


def weights(model: LoadedModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.hf.state_dict().items()}


def unchanged(before: dict[str, torch.Tensor], model: LoadedModel) -> list[str]:
    return [
        name for name, value in model.hf.state_dict().items() if name in before and torch.equal(value, before[name])
    ]


def test_the_dense_model_is_left_alone(tiny: LoadedModel, text: Sequences, short: SparsifyConfig) -> None:
    before = weights(tiny)
    trainer = make_trainer(tiny, text, short)
    trainer.advance()
    assert len(unchanged(before, tiny)) == len(before)
    assert not tiny.is_sparse
    assert all(parameter.grad is None for parameter in tiny.hf.parameters())


@pytest.mark.parametrize("control", [False, True])
def test_accumulation_equals_a_larger_batch(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, *, control: bool
) -> None:
    segments_NT = np.zeros_like(text.ids_NT)
    segments_NT[::2, 5:] = 1  # micro-batches with different numbers of targets
    segments_NT[::3, 9:] = 2
    text = Sequences(text.ids_NT, segments_NT)
    tiny.hf.double()
    quiet = short.replace(deterministic_share=1.0, control=control)
    whole = make_trainer(tiny, text, quiet.replace(batch=8))
    parts = make_trainer(tiny, text, quiet.replace(batch=2, accumulation=4))
    for trainer in (whole, parts):  # as exact as the arithmetic allows
        trainer.student.hf.double()
    one, many = whole.advance(), parts.advance()
    assert many.loss == pytest.approx(one.loss, rel=1e-9)
    if control:
        assert many.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-6)
    else:
        assert 0 < one.open_share < 1
        assert many.loss - (many.violation or 0) == pytest.approx(one.loss - (one.violation or 0), rel=1e-9)


def test_accumulation_gives_the_same_gradient_as_a_larger_batch(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig
) -> None:
    quiet = short.replace(deterministic_share=1.0)
    whole = make_trainer(tiny, text, quiet.replace(batch=8))
    parts = make_trainer(tiny, text, quiet.replace(batch=2, accumulation=4))
    assert whole.advance().gradient_norm == pytest.approx(parts.advance().gradient_norm, rel=1e-4)
    for (name, one), (_, many) in zip(
        whole.student.hf.named_parameters(), parts.student.hf.named_parameters(), strict=True
    ):
        # AdamW's first step is the sign of the gradient: only where that is tiny may the two differ
        assert (one - many).abs().median() < 1e-6, name


def test_what_is_trainable(tiny: LoadedModel, text: Sequences, short: SparsifyConfig) -> None:
    before = weights(tiny)
    full = make_trainer(tiny, text, short)
    full.advance()
    assert unchanged(before, full.student.model) == []
    attention = make_trainer(tiny, text, short.replace(trainable="attention"))
    attention.advance()
    kept = unchanged(before, attention.student.model)
    assert all(".attn." not in name for name in kept)
    assert "transformer.wte.weight" in kept
    assert len(kept) < len(before)


@pytest.mark.parametrize("gate", ["logit", "flow"])
def test_lora_trains_adapters_and_gates_and_merges(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, gate: str
) -> None:
    trainer = make_trainer(tiny, text, short.replace(trainable="lora", gate=gate))
    names = list(trainer.student.trainable())
    assert any("lora_A" in name for name in names)
    assert sum("gate" in name for name in names) == 2
    assert all("lora_" in name or "gate" in name for name in names)
    assert any("c_proj" in name for name in names) == (gate == "logit")
    for _ in range(3):
        trainer.advance()
    inputs = model_inputs(text.rows(slice(0, 4)), "cpu")
    with torch.no_grad():
        adapted = logits_of(trainer.student.hf, inputs, bf16=False)
        merged = trainer.student.finished()
        assert torch.allclose(adapted, logits_of(merged.hf, inputs, bf16=False), atol=1e-4)
    assert set(weights(merged)) == {*weights(tiny), *(n for n in weights(merged) if "gate" in n)}
    assert [offset.offset_H.requires_grad for offset in gates_of(merged.hf)] == [True, True]


def test_bfloat16_models_train_in_float32_and_return_as_they_came(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig
) -> None:
    tiny.hf.bfloat16()
    trainer = make_trainer(tiny, text, short.replace(bf16=True))
    assert {parameter.dtype for parameter in trainer.parameters} == {torch.float32}
    record = trainer.advance()
    assert np.isfinite(record.loss)
    offsets = [layer.offset_H.detach().clone() for layer in gates_of(trainer.student.hf)]
    finished = trainer.student.finished()
    assert finished.dtype == torch.bfloat16
    for layer, offset_H in zip(gates_of(finished.hf), offsets, strict=True):
        assert torch.equal(layer.offset_H, offset_H)


def test_the_teacher_does_not_leak_into_the_student_under_autocast(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig
) -> None:
    """One autocast block for both would reuse the first model's low-precision weights for the second."""
    other = copy.deepcopy(tiny)
    with torch.no_grad():
        for parameter in other.hf.parameters():
            parameter.mul_(1.5)
    config = short.replace(bf16=True, control=True)
    alone = make_trainer(other, text, config)
    beside = make_trainer(other, text, config)
    beside.teacher = tiny.hf
    assert alone.advance().loss == beside.advance().loss


def test_paired_and_fixed_references(tiny: LoadedModel, text: Sequences, short: SparsifyConfig) -> None:
    fixed = make_trainer(tiny, text, short.replace(reference="fixed")).advance()
    assert fixed.target == pytest.approx(3 + 0.9 * 0.05)  # what training aims at
    paired_trainer = make_trainer(tiny, text, short.replace(gate_offset=1e4, keep_mass=None))
    paired = paired_trainer.advance()
    assert paired.open_share == 1.0  # so that student and dense model are the same
    assert paired.target is not None
    assert paired.target - 0.045 == pytest.approx(paired.loss, abs=1e-4)
    assert paired.divergence == pytest.approx(0, abs=1e-4)
    divergent = make_trainer(tiny, text, short.replace(constraint="kl")).advance()
    assert divergent.target == pytest.approx(0.045)
    assert divergent.divergence is not None
    assert divergent.divergence > 0


def test_the_multiplier_gets_its_way(tiny: LoadedModel, text: Sequences, short: SparsifyConfig) -> None:
    """With nothing but sparsity in the balance gates shut; with nothing but the constraint they stay."""
    last = []
    for start in (0.02, 20.0):
        config = short.replace(steps=30, multiplier_start=start, multiplier_rate=1e-9, constraint="kl", batch=8)
        trainer = make_trainer(tiny, text, config)
        calibrate(trainer.student.hf, text, keep_mass=0.99)
        records = [trainer.advance() for _ in range(30)]
        assert records[0].open_share > 0.3
        last.append(records[-1])
    assert last[0].open_share < 0.85 * last[1].open_share
    assert last[0].divergence > 5 * last[1].divergence  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["logit", "mass", "flow"])
def test_calibration_keeps_the_chosen_mass(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, kind: str
) -> None:
    student = prepare(tiny, short.replace(gate=kind))
    calibrate(student.hf, text, keep_mass=0.9)
    sample = text.rows(slice(0, 8))
    everything = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    opened = [ForceOpen(layer, everything) for layer in range(2)]
    with torch.no_grad(), tape(student.hf, record=("gate", "softmax"), replace=opened) as recorded:
        student.hf(**model_inputs(sample, "cpu"))
    for layer in range(2):
        open_BHQK = recorded["gate", layer] > 0
        kept_H = (recorded["softmax", layer] * open_BHQK).sum((0, 2, 3)) / recorded["softmax", layer].sum((0, 2, 3))
        assert (kept_H >= 0.9 - 1e-6).all()
        assert (kept_H < 0.97).all()  # no more than needed: one edge, or edges that tie
        assert 0 < open_BHQK.float().mean() < 1


def test_offsets_by_hand() -> None:
    mass_BHQK = torch.tensor([0.5, 0.3, 0.15, 0.05]).reshape(1, 1, 1, 4)
    logits_BHQK = torch.tensor([2.0, 1.0, 0.0, -4.0]).reshape(1, 1, 1, 4)
    assert keeping_offsets(logits_BHQK, mass_BHQK, 0.6).tolist() == [-0.5]
    assert keeping_offsets(logits_BHQK, mass_BHQK, 0.95).tolist() == [2.0]
    tied_BHQK = torch.zeros(1, 1, 1, 4)
    assert keeping_offsets(tied_BHQK, mass_BHQK, 0.6).item() > 0  # ties stay open together


def test_density_four_ways_by_hand() -> None:
    ids_NT = np.zeros((2, 4), dtype=int)
    packed = Sequences(ids_NT, np.array([[0, 0, 1, 1], [0, 0, 0, 0]]))
    assert count_pairs(packed) == (20, 3 + 3 + 10)
    density = density_of(packed, open_edges=24, n_layers=2, n_heads=3)
    assert density.of_causal_pairs == 24 / 120
    assert density.of_document_pairs == 24 / 96
    assert density.per_query_and_head == 24 / 48
    assert density.per_token == 3.0


def test_measuring_counts_open_edges(tiny: LoadedModel, text: Sequences, short: SparsifyConfig) -> None:
    student = prepare(tiny, short.replace(gate_offset=0.0))
    with torch.no_grad(), tape(student.hf, record=("open",)) as recorded:
        student.hf(**model_inputs(text, "cpu"))
    expected = sum(int(recorded["open", layer].sum()) for layer in range(2))
    measurement = measure(student.hf, text, batch=7, teacher=tiny.hf)
    assert measurement.density is not None
    assert measurement.density.open_edges == expected
    assert 0 < measurement.density.of_causal_pairs < 1
    assert measurement.divergence is not None
    assert measurement.divergence > 0
    assert measure(tiny.hf, text, batch=7).density is None


def test_documents_do_not_see_each_other(tiny: LoadedModel, text: Sequences) -> None:
    """Packed with segments, a document's logits are those it has alone."""
    ids_NT = text.ids_NT[:1]
    packed = Sequences(ids_NT, np.array([[0] * 5 + [1] * 7]))
    with torch.no_grad():
        together = logits_of(tiny.hf, model_inputs(packed, "cpu"), bf16=False)
        alone = logits_of(tiny.hf, model_inputs(Sequences(ids_NT[:, 5:]), "cpu"), bf16=False)
    assert torch.allclose(together[:, 5:], alone, atol=1e-5)
    assert (packed.targets() == -100).sum() == 2
