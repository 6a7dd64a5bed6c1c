"""What the report says, against known answers and slow references."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import log_softmax

from gossamer.corpus.inputs import model_inputs
from gossamer.errors import GossamerError
from gossamer.transcoders import TranscoderReport, TranscoderSet, evaluate, from_mlp, mlp_activity


def test_copied_transcoders_leave_nothing_unexplained(relu_model, text) -> None:
    report = evaluate(relu_model, from_mlp(relu_model), text(4), batch=3)
    assert max(report.unexplained) < 1e-10
    assert max(report.replacement_kl) < 1e-8
    assert report.all_replaced_kl < 1e-8
    assert report.n_positions == 44


def test_a_constant_leaves_all_variance_unexplained(relu_model, text) -> None:
    copied, some_text = from_mlp(relu_model), text(4)
    _, outputs_LND = mlp_activity(relu_model, some_text)
    constant = replace(
        copied.weights(),
        decoder_FTD=[torch.zeros_like(decoder) for decoder in copied.weights().decoder_FTD],
        decoder_bias_LD=outputs_LND.mean(1),
    )
    report = evaluate(relu_model, TranscoderSet(copied.shape, constant, copied.provenance), some_text)
    assert report.unexplained == pytest.approx([1.0, 1.0, 1.0], abs=1e-5)
    assert min(report.replacement_kl) > 1e-4


def test_sparsity_and_dead_features_are_counted(model, transcoders, text) -> None:
    of, some_text = model("gpt2"), text(5)
    some = transcoders(model=of)
    some.encoder_bias_LF[1, 2] = -100.0
    inputs_LND, _ = mlp_activity(of, some_text)
    active = torch.stack([some.encode(layer, inputs_LND[layer]) != 0 for layer in range(3)])
    report = evaluate(of, some, some_text, batch=2)
    assert report.l0 == pytest.approx(active.sum((1, 2)).div(active.shape[1]).tolist())
    assert report.dead_share == pytest.approx((~active.any(1)).double().mean(1).tolist())
    assert report.dead_share[1] >= 1 / 7
    assert report.mean_l0 == pytest.approx(sum(report.l0) / 3)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("kind", ["per-layer", "cross-layer"])
def test_replacement_is_what_it_says(family: str, kind: str, model, transcoders, text) -> None:
    """The slow way: one layer's write is patched at a time, from features computed in a forward of their own."""
    of, some_text = model(family), text(1)
    some = transcoders(kind, model=of, seed=3)
    expected = log_softmax(of.hf(**model_inputs(some_text, "cpu")).logits, -1).detach()
    inputs_LND, _ = mlp_activity(of, some_text)
    report = evaluate(of, some, some_text)
    for layer in range(3):
        features = [some.encode(source, inputs_LND[source]) for source in range(layer + 1)]
        rebuilt_ND = some.reconstruct(features, layer)

        def put(module, args, written_BTD, rebuilt_ND=rebuilt_ND):  # type: ignore[no-untyped-def]
            return torch.cat([written_BTD[:, :1], rebuilt_ND[None]], 1)

        handle = of.anatomy.mlp_writers[layer].register_forward_hook(put)
        with torch.no_grad():
            replaced = log_softmax(of.hf(**model_inputs(some_text, "cpu")).logits, -1)
        handle.remove()
        divergence = (expected.exp() * (expected - replaced)).sum(-1)[0, 1:].mean()
        assert report.replacement_kl[layer] == pytest.approx(float(divergence), rel=1e-4)
    assert report.all_replaced_kl > 0


def test_reports_survive_the_disk(relu_model, text, tmp_path) -> None:
    report = evaluate(relu_model, from_mlp(relu_model), text(2))
    report.save(tmp_path / "report.json")
    assert TranscoderReport.load(tmp_path / "report.json") == report
    (tmp_path / "other.json").write_text('{"format": 99}', encoding="utf-8")
    with pytest.raises(GossamerError, match="format"):
        TranscoderReport.load(tmp_path / "other.json")


def test_transcoders_of_another_model_are_refused(model, transcoders, text) -> None:
    some = transcoders(model=model("gpt2"))
    for other, word in ((model("gpt2", seed=1), "weights differ"), (model("gpt2", n_layer=2), "2 layers")):
        with pytest.raises(GossamerError, match=word):
            evaluate(other, some, text(2))
    some.require_model(model("gpt2", dtype=torch.float64))
