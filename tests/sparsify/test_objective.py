"""The multiplier and the constraint: invariant 6."""

from __future__ import annotations

import math

import pytest

from gossamer.errors import GossamerError
from gossamer.sparsify.divergence import DivergedError, DivergenceWatch
from gossamer.sparsify.objective import Constraint, Multiplier, lagrangian


def test_violated_raises_and_satisfied_lowers_never_below_the_minimum() -> None:
    multiplier = Multiplier(value=1.0, minimum=0.5, maximum=2.0)
    assert multiplier.update(+0.3) > 1.0
    for _ in range(200):
        multiplier.update(+0.3)
    assert multiplier.value == 2.0
    assert multiplier.at_ceiling
    for _ in range(400):
        assert multiplier.update(-0.3) > 0
    assert multiplier.value == 0.5


def test_average_is_not_biased_towards_zero_at_the_start() -> None:
    multiplier = Multiplier(averaging=0.9)
    multiplier.update(1.0)
    assert multiplier.average == 1.0
    multiplier.update(0.0)
    assert multiplier.average == 0.5


def test_inside_the_band_it_moves_slower() -> None:
    near, far = Multiplier(band=1.0), Multiplier(band=1.0)
    near.update(0.1)
    far.update(5.0)
    assert 1.0 < near.value < far.value
    assert far.value == pytest.approx(math.exp(0.05))


@pytest.mark.parametrize(("band", "proportional"), [(0.0, 0.0), (0.05, 0.0), (0.5, 1.0)])
def test_toy_convex_problem_ends_on_the_boundary(band: float, proportional: float) -> None:
    """Minimise x^2 subject to (x - 2)^2 <= 1: the answer is x = 1, where the multiplier is 1."""
    x = 3.0
    multiplier = Multiplier(
        0.1, rate=0.01, averaging=0.5, minimum=1e-3, maximum=100, band=band, proportional=proportional
    )
    for _ in range(5000):
        weight = multiplier.weight
        x -= 0.05 * (2 * x + weight * 2 * (x - 2)) / (1 + weight)
        multiplier.update((x - 2) ** 2 - 1)
    assert x == pytest.approx(1.0, abs=0.02)
    assert multiplier.value == pytest.approx(1.0, rel=0.05)


def test_the_proportional_part_answers_at_once_and_within_the_bounds() -> None:
    plain, answering = Multiplier(band=0.1), Multiplier(band=0.1, proportional=1.0)
    for multiplier in (plain, answering):
        multiplier.update(0.2)
    assert plain.weight == plain.value == answering.value
    assert answering.weight == pytest.approx(math.e * answering.value)
    answering.update(-0.6)
    assert 0 < answering.weight < answering.value
    assert Multiplier(value=15, band=0.1, proportional=1.0, average=1.0).weight == 20.0


def test_state_goes_on_exactly() -> None:
    whole, first = Multiplier(), Multiplier()
    violations = [0.3, -0.1, 0.2, -0.4, -0.2, 0.05]
    for violation in violations:
        whole.update(violation)
    for violation in violations[:3]:
        first.update(violation)
    second = Multiplier()
    second.load_state_dict(first.state_dict())
    for violation in violations[3:]:
        second.update(violation)
    assert second == whole


def test_targets() -> None:
    assert Constraint("cross-entropy", 0.01).target(1.5) == pytest.approx(1.51)
    assert Constraint("kl", 0.02).target(1.5) == 0.02
    assert lagrangian(0.5, 2.0, 3.0) == pytest.approx(6.5 / 4)


@pytest.mark.parametrize("slack", [0.0, -0.01, math.nan, math.inf])
def test_slack_without_room_is_refused(slack: float) -> None:
    with pytest.raises(GossamerError, match="more than 0 nats"):
        Constraint("cross-entropy", slack)


def test_unknown_constraint_and_impossible_bounds_are_refused() -> None:
    with pytest.raises(GossamerError, match="Did you mean 'kl'"):
        Constraint("kll", 0.1)  # type: ignore[arg-type]
    with pytest.raises(GossamerError, match="bounds"):
        Multiplier(value=30.0, maximum=20.0)


def test_divergence_needs_the_ceiling_and_no_progress() -> None:
    watch, hopeless = DivergenceWatch(patience=5), Multiplier(value=2.0, maximum=2.0, average=1.0)
    for _ in range(5):
        watch.see(hopeless)
    assert watch.suspicious
    with pytest.raises(DivergedError, match="out of reach"):
        watch.see(hopeless)
    watch = DivergenceWatch(patience=5)
    for step in range(60):  # coming closer all the time
        watch.see(Multiplier(value=2.0, maximum=2.0, average=0.97**step))
    watch.see(Multiplier(value=1.9, maximum=2.0, average=1.0))
    assert not watch.suspicious
