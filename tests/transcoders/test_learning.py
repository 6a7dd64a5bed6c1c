"""The learner's arithmetic, the jump's gradient, the controller and the pull on dead features."""

from __future__ import annotations

import math

import pytest
import torch

from gossamer.errors import GossamerError
from gossamer.transcoders import TranscoderConfig, TranscoderShape, evaluate, mlp_activity
from gossamer.transcoders.activations import OnTheFly, scales_of
from gossamer.transcoders.belonging import belonging_to
from gossamer.transcoders.control import SparsityController
from gossamer.transcoders.learner import Learner, Scales, _Step
from gossamer.transcoders.trainer import Trainer


def random_learner(kind: str, activation: str, *, n_layers: int = 3, n_features: int = 7, width: int = 12) -> Learner:
    k = 3 if activation == "topk" else None
    shape = TranscoderShape(kind, n_layers, n_features, width, activation, k)  # type: ignore[arg-type]
    learner = Learner(shape, bandwidth=0.5, seed=0)
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.normal_(0, 0.5)
    return learner


@pytest.mark.parametrize("kind", ["per-layer", "cross-layer"])
@pytest.mark.parametrize("activation", ["jumprelu", "topk", "relu"])
def test_folded_transcoders_do_what_was_trained(kind: str, activation: str, model, text) -> None:
    """Unexplained variance of the normalised learner is the report's, and so is the number of active features."""
    of, some_text = model("gpt2", dtype=torch.float64), text(6)
    inputs_LND, outputs_LND = mlp_activity(of, some_text)
    scales = Scales.of([(inputs_LND[:, :20], outputs_LND[:, :20]), (inputs_LND[:, 20:], outputs_LND[:, 20:])])
    normal_inputs, normal_outputs = scales.normalise(inputs_LND, outputs_LND)
    for seen_LND in (normal_inputs, normal_outputs):
        torch.testing.assert_close(seen_LND.mean(1), torch.zeros(3, 12, dtype=torch.float64))
        torch.testing.assert_close(seen_LND.square().mean((1, 2)), torch.ones(3, dtype=torch.float64))
    learner = random_learner(kind, activation).double()
    forward = learner(normal_inputs, normal_outputs)
    report = evaluate(of, learner.fold(scales, belonging_to(of)), some_text)
    assert report.unexplained == pytest.approx(forward.unexplained_L.tolist(), rel=1e-9)
    assert report.l0 == pytest.approx(forward.l0_L.tolist(), rel=1e-9)
    assert 0 < report.mean_l0 < 7


@pytest.mark.parametrize("kind", ["per-layer", "cross-layer"])
@pytest.mark.parametrize("activation", ["jumprelu", "topk", "relu"])
def test_training_may_start_from_folded_transcoders(kind: str, activation: str, model, text) -> None:
    of = model("gpt2", dtype=torch.float64)
    scales = Scales.of([mlp_activity(of, text(6))])
    learner, other = random_learner(kind, activation).double(), random_learner(kind, activation).double()
    with torch.no_grad():
        other.encoder_LFD.zero_()
    other.take_over(learner.fold(scales, {}), scales)
    for name in (name for name, parameter in learner.named_parameters() if parameter.requires_grad):
        torch.testing.assert_close(other.get_parameter(name), learner.get_parameter(name))
    with pytest.raises(GossamerError, match="cannot start from"):
        random_learner(kind, activation, n_features=9).double().take_over(learner.fold(scales, {}), scales)


def test_the_jumps_gradient_is_the_kernels() -> None:
    pre = torch.tensor([[[0.1, 0.9, 1.2, 2.0]]], requires_grad=True)
    threshold = torch.tensor([[[1.0, 1.0, 1.0, 1.0]]], requires_grad=True)
    on = _Step.apply(pre, threshold, 0.5)
    assert on.tolist() == [[[0, 0, 1, 1]]]
    (on * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
    assert pre.grad is not None
    assert threshold.grad is not None
    assert pre.grad.flatten().tolist() == [0, 4, 6, 0]
    assert threshold.grad.flatten().tolist() == [0, -4, -6, 0]


def test_the_kernel_estimates_the_slope_of_the_expected_number_of_active_features() -> None:
    """d E[1(pre > threshold)] / d threshold is minus the density at the threshold."""
    pre = torch.randn(1, 200_000, 1)
    threshold = torch.full((1, 1, 1), 0.3, requires_grad=True)
    _Step.apply(pre, threshold, 0.2).mean().backward()
    density = math.exp(-(0.3**2) / 2) / math.sqrt(2 * math.pi)
    assert threshold.grad is not None
    assert float(threshold.grad) == pytest.approx(-density, rel=0.03)


def test_the_controller_reaches_its_target_on_a_system_that_answers_late() -> None:
    controller = SparsityController(2, rate=0.02, gain=1.0)
    l0_L = torch.tensor([500.0, 400.0])
    pressure = torch.tensor([0.3, 3.0])  # the coefficient at which the system rests at 32
    for _ in range(1500):
        coefficient_L = controller.coefficients(l0_L, 32)
        wanted_L = (32 * pressure / coefficient_L).clamp(1, 600)
        l0_L = l0_L + 0.05 * (wanted_L - l0_L)
    torch.testing.assert_close(l0_L, torch.full((2,), 32.0), rtol=0.02, atol=0)
    torch.testing.assert_close(coefficient_L, pressure, rtol=0.05, atol=0)


def trainer_of(of, some_text, **settings) -> Trainer:  # type: ignore[no-untyped-def]
    config = TranscoderConfig.from_dict(
        {"n_features": 24, "target_l0": 5, "batch": 8, "learning_rate": 5e-3} | settings
    )
    k = config.target_l0 if config.activation == "topk" else None
    shape = TranscoderShape(config.kind, 3, config.n_features, 12, config.activation, k)
    source = OnTheFly(of, some_text, batch=config.batch, seed=0)
    return Trainer(source, config, shape, scales_of(source))


@pytest.mark.parametrize("activation", ["jumprelu", "topk"])
def test_training_explains_variance_with_as_many_features_as_wanted(activation: str, relu_model, text) -> None:
    trainer = trainer_of(relu_model, text(64), activation=activation, steps=800, control_rate=0.03)
    trainer.advance()
    first = trainer.record()
    while trainer.step < 800:
        trainer.advance()
    last = trainer.record()
    assert first.unexplained > 0.8
    assert last.unexplained < 0.4
    assert last.l0 == pytest.approx(5, abs=0.6)
    assert last.dead_share < 0.2


def test_products_in_bfloat16_change_little(relu_model, text) -> None:
    ends = {}
    for precision in ("float32", "bfloat16"):
        trainer = trainer_of(relu_model, text(64), steps=60, precision=precision)
        while trainer.step < 60:
            trainer.advance()
        ends[precision] = trainer.record()
        assert {parameter.dtype for parameter in trainer.learner.parameters()} == {torch.float32}
    assert ends["bfloat16"] != ends["float32"]
    assert ends["bfloat16"].unexplained == pytest.approx(ends["float32"].unexplained, abs=0.02)


def test_dead_features_are_pulled_back(relu_model, text) -> None:
    revived = {}
    for pull in (0.0, 1e-2):
        trainer = trainer_of(
            relu_model, text(64), steps=10_000, dead_after=5, dead_pull=pull, warmup_share=0.0, learning_rate=0.05
        )
        with torch.no_grad():
            trainer.learner.encoder_bias_LF[:, :6] = -12.0
        for _ in range(15):
            trainer.advance()
        assert trainer.dead_features()[:, :6].all()
        for _ in range(285):
            trainer.advance()
        revived[pull] = (trainer.last_active_LF[:, :6] > 15).float().mean()
    assert revived == {0.0: 0, 1e-2: 1}


def test_the_schedules() -> None:
    config = TranscoderConfig(
        steps=100, warmup_share=0.1, decay_share=0.5, sparsity_share=0.4, n_features=64, target_l0=8
    )
    factors = [config.rate_factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert max(factors) == 1
    assert factors[-1] == pytest.approx(0.02)
    targets = [config.l0_target(step) for step in (0, 20, 40, 99)]
    assert targets == pytest.approx([32, 16, 8, 8])


@pytest.mark.parametrize(
    "wrong",
    [
        {"n_features": 0},
        {"target_l0": 5000},
        {"steps": 0},
        {"learning_rate": 0},
        {"learning_rat": 1},
        {"activation": "relu"},
        {"precision": "float16"},
    ],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(GossamerError):
        TranscoderConfig.from_dict(wrong)


def test_a_loss_that_is_not_a_number_is_said(relu_model, text) -> None:
    trainer = trainer_of(relu_model, text(8))
    with torch.no_grad():
        trainer.learner.decoder_bias_LD[:] = math.nan
    trainer.advance()
    with pytest.raises(GossamerError, match="not a number"):
        trainer.record()
