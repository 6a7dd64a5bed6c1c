"""Schedules and settings are pure functions and plain data."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import get_args, get_type_hints

import numpy as np
import pytest

from gossamer.errors import GossamerError
from gossamer.sparsify import Sequences, SparsifyConfig
from gossamer.sparsify.config import RANGES
from gossamer.sparsify.data import split_held_out, step_rows
from gossamer.sparsify.schedule import LearningRateSchedule, NoiseSchedule, SlackSchedule


def test_noise_falls_geometrically_and_then_there_is_none() -> None:
    noise = NoiseSchedule(steps=100, start=1.0, end=0.1, deterministic_share=0.1)
    taus = [noise.tau(step) for step in range(100)]
    assert taus[0] == 1.0
    assert taus[89] == pytest.approx(0.1)
    assert taus[1] / taus[0] == pytest.approx(taus[60] / taus[59])
    assert set(taus[90:]) == {0.0}
    assert noise.backward_tau(0) == 1.0
    assert noise.backward_tau(99) == 0.3


def test_rate_warms_up_and_decays() -> None:
    rate = LearningRateSchedule(steps=100, warmup_steps=9, decay_share=0.3, final_share=0.1)
    factors = [rate.factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert set(factors[9:70]) == {1.0}
    assert factors[99] == pytest.approx(0.1)
    assert factors == sorted(factors[:70]) + sorted(factors[70:], reverse=True)


def test_slack_narrows_down_and_keeps_its_promise() -> None:
    slacks = [SlackSchedule(steps=100, start=0.05, end=0.01, share=0.6).slack(step) for step in range(100)]
    assert slacks[0] == 0.05
    assert all(later <= earlier for earlier, later in pairwise(slacks))
    assert slacks[30] == pytest.approx(0.03)
    assert slacks[60:] == pytest.approx([0.01] * 40)
    with pytest.raises(GossamerError, match="cannot start at"):
        SparsifyConfig(steps=1, slack=0.01, slack_start=0.005)
    assert SparsifyConfig(steps=10, slack=0.02, aim=0.5).slacks().slack(0) == 0.01
    below = SparsifyConfig(steps=10, slack=0.02, slack_start=0.1, aim=-0.5).slacks()
    assert (below.slack(0), below.slack(10)) == pytest.approx((0.1, -0.01))


def test_one_step_runs_have_schedules_too() -> None:
    config = SparsifyConfig(steps=1)
    assert config.noise().tau(0) in (0.0, config.noise_start)
    assert 0 < config.rate().factor(0) <= 1


def test_settings_round_trip_and_refuse_the_unknown() -> None:
    config = SparsifyConfig(steps=5, slack=0.02, trainable="lora")
    assert SparsifyConfig.from_dict(config.to_dict()) == config
    with pytest.raises(GossamerError, match="Did you mean 'slack'"):
        SparsifyConfig.from_dict({"slak": 0.1})
    assert config.digest() == config.replace(checkpoint_every=7).digest()
    assert config.digest() != config.replace(seed=1).digest()


@pytest.mark.parametrize(
    "wrong",
    [
        {"slack": 0},
        {"steps": 0},
        {"minutes": -1},
        {"batch": 0},
        {"length": 1},
        {"gate": "logits"},
        {"trainable": "none"},
        {"reference": "loose"},
        {"constraint": "ce"},
        {"keep_mass": 1.0},
        {"deterministic_share": 1.5},
        {"learning_rate": 0.0},
        {"multiplier_start": 100.0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(GossamerError):
        SparsifyConfig.from_dict(wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"control": "no"}, "control is true or false, not 'no'"),
        ({"bf16": "yes"}, "bf16 is true or false"),
        ({"bf16": 1}, "bf16 is true or false"),
        ({"batch": "two"}, "batch is a whole number, not 'two'"),
        ({"batch": 1.5}, "batch is a whole number"),
        ({"batch": True}, "batch is a whole number"),
        ({"batch": None}, "batch is a whole number"),
        ({"seed": 1.5}, "seed is a whole number"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"slack": "abc"}, "slack is a finite number, not 'abc'"),
        ({"clip": [1]}, "clip is a finite number"),
        ({"multiplier_rate": math.nan}, "multiplier_rate is a finite number"),
        ({"gate_offset": "hello"}, "gate_offset is a finite number"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"beta1": 2}, "beta1 must be at least 0 and less than 1"),
        ({"beta2": 1.0}, "beta2 must be at least 0 and less than 1"),
        ({"multiplier_averaging": 1.0}, "less than 1"),
        ({"gate": 3}, "gate is one of logit, mass, flow"),
        ({"slack_share": -0.5}, "slack_share must be a share"),
    ],
)
def test_every_setting_has_a_type_and_a_range(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(GossamerError, match=re.escape(words)):
        SparsifyConfig.from_dict(wrong)


def test_every_number_has_a_range_or_is_free_on_purpose() -> None:
    kinds = get_type_hints(SparsifyConfig)
    numbers = {name for name, kind in kinds.items() if {int, float} & {kind, *get_args(kind)}}
    checked_together = {"slack", "slack_start", "multiplier_start", "multiplier_minimum", "multiplier_maximum"}
    assert numbers - checked_together - set(RANGES) == {"gate_offset"}


def test_data_order_is_a_function_of_seed_and_step() -> None:
    def order(step: int) -> list[int]:
        return step_rows(step, seed=3, n_sequences=10, per_step=4).tolist()

    read = [row for step in range(5) for row in order(step)]
    assert sorted(read[:10]) == sorted(read[10:]) == list(range(10))
    assert read[:10] != read[10:]
    assert order(3) == order(3)


def test_held_out_text_is_never_trained_on() -> None:
    text = Sequences(np.arange(60).reshape(20, 3))
    training, held_out = split_held_out(text, 32)
    assert (len(training), len(held_out)) == (18, 2)
    assert not set(training.ids_NT.flat) & set(held_out.ids_NT.flat)
    with pytest.raises(GossamerError, match="give more text"):
        split_held_out(text.rows(slice(0, 1)), 32)
