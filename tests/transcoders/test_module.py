"""Activations and reconstructions, against loops over their definition."""

from __future__ import annotations

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.transcoders import TranscoderSet, TranscoderShape, Weights
from gossamer.transcoders.module import activate

PRE = torch.tensor([[-1.0, 0.5, 2.0, 3.0], [0.2, 0.1, 4.0, -2.0]])


def test_a_jumprelu_passes_what_exceeds_its_threshold_unchanged() -> None:
    threshold = torch.tensor([0.0, 0.5, 1.0, 3.5])
    passed = activate(PRE, "jumprelu", threshold_F=threshold, k=None)
    assert passed.tolist() == [[0, 0, 2, 0], [PRE[1, 0], 0, 4, 0]]


def test_a_relu_passes_what_is_positive() -> None:
    assert activate(PRE, "relu", threshold_F=None, k=None).tolist() == PRE.clamp(min=0).tolist()


def test_topk_keeps_the_largest_but_nothing_below_zero() -> None:
    kept = activate(PRE, "topk", threshold_F=None, k=2)
    assert kept.tolist() == [[0, 0, 2, 3], [PRE[1, 0], 0, 4, 0]]
    kept = activate(PRE, "topk", threshold_F=None, k=9)
    assert torch.equal(kept, PRE.clamp(min=0))


@pytest.mark.parametrize("kind", ["per-layer", "cross-layer"])
@pytest.mark.parametrize("skip", [False, True])
def test_reconstructions_are_the_sums_they_are_defined_as(kind: str, skip: bool, transcoders) -> None:
    of = transcoders(kind, skip=skip).double()
    inputs = torch.randn(3, 5, 12, dtype=torch.float64)
    features = [of.encode(layer, inputs[layer]) for layer in range(3)]
    assert all(0 < (feature_NF != 0).double().mean() < 1 for feature_NF in features)
    for target in range(3):
        for n in range(5):
            expected = of.decoder_bias_LD[target].clone()
            for source in range(target + 1):
                if kind == "per-layer" and source != target:
                    continue
                for f in range(7):
                    expected += features[source][n, f] * of.decoder(source, target)[f]
            if skip:
                expected += of.skip_LDD[target] @ inputs[target, n]
            rebuilt_ND = of.reconstruct(features, target, inputs[target])
            torch.testing.assert_close(rebuilt_ND[n], expected, rtol=1e-12, atol=1e-12)


def test_leading_axes_are_free(transcoders) -> None:
    of = transcoders()
    inputs_BTD = torch.randn(2, 4, 12)
    features_BTF = of.encode(1, inputs_BTD)
    torch.testing.assert_close(features_BTF[1, 2], of.encode(1, inputs_BTD[1, 2]))


def test_targets_and_sources(transcoders) -> None:
    assert [list(transcoders("cross-layer").targets(layer)) for layer in range(3)] == [[0, 1, 2], [1, 2], [2]]
    assert [list(transcoders("cross-layer").sources(layer)) for layer in range(3)] == [[0], [0, 1], [0, 1, 2]]
    assert [list(transcoders("per-layer").targets(layer)) for layer in range(3)] == [[0], [1], [2]]
    assert [list(transcoders("per-layer").sources(layer)) for layer in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize(("kind", "source", "target"), [("cross-layer", 2, 1), ("per-layer", 0, 1)])
def test_a_decoder_that_does_not_exist_is_refused(kind: str, source: int, target: int, transcoders) -> None:
    with pytest.raises(GossamerError, match=f"layer {source} .* do not write to {target}"):
        transcoders(kind).decoder(source, target)


def test_a_skip_connection_needs_the_input(transcoders) -> None:
    of = transcoders("per-layer", skip=True)
    features = [of.encode(layer, torch.randn(2, 12)) for layer in range(3)]
    with pytest.raises(GossamerError, match="input"):
        of.reconstruct(features, 1)


def test_moving_a_set_moves_all_of_it(transcoders) -> None:
    of = transcoders(skip=True).to(torch.float64)
    assert {tensor.dtype for tensor in of.buffers()} == {torch.float64}
    assert of.decoder(0, 2).dtype == torch.float64


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sideways"},
        {"activation": "gelu"},
        {"activation": "topk"},
        {"k": 3},
    ],
)
def test_impossible_shapes_are_refused(wrong: dict) -> None:
    settings = {"kind": "per-layer", "n_layers": 1, "n_features": 2, "width": 3, "activation": "relu"} | wrong
    with pytest.raises(GossamerError):
        TranscoderShape(**settings)


def test_tensors_that_do_not_fit_are_refused() -> None:
    shape = TranscoderShape("cross-layer", 2, 4, 3, "relu")
    fitting = [torch.zeros(4, 2, 3), torch.zeros(4, 1, 3)]
    zeros = (torch.zeros(2, 4, 3), torch.zeros(2, 4))
    TranscoderSet(shape, Weights(*zeros, fitting, torch.zeros(2, 3)))
    for weights, word in (
        (Weights(*zeros, fitting[:1], torch.zeros(2, 3)), "decoders"),
        (Weights(*zeros, fitting[::-1], torch.zeros(2, 3)), "decoder of layer 0"),
        (Weights(*zeros, fitting, torch.zeros(3, 3)), "decoder bias"),
        (Weights(*zeros, fitting, torch.zeros(2, 3), threshold_LF=torch.ones(2, 4)), "thresholds"),
    ):
        with pytest.raises(GossamerError, match=word):
            TranscoderSet(shape, weights)
