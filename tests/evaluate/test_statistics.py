from __future__ import annotations

import numpy as np
import pytest

from gossamer.evaluate.statistics import Bootstrap, wilson


def test_the_interval_of_a_mean_is_near_the_normal_one() -> None:
    random = np.random.default_rng(0)
    tokens_N = np.full(400, 50.0)
    sums_N = random.normal(100, 20, 400)
    found = Bootstrap(tokens_N, seed=0).mean(sums_N)
    spread = 1.96 * sums_N.std() / np.sqrt(400) / 50
    assert found.value == pytest.approx(sums_N.mean() / 50)
    assert found.value - found.low == pytest.approx(spread, rel=0.1)
    assert found.high - found.value == pytest.approx(spread, rel=0.1)


def test_tokens_weigh_the_same_whatever_their_sequence() -> None:
    found = Bootstrap(np.array([1.0, 9.0]), seed=0).mean(np.array([5.0, 9.0]))
    assert found.value == 1.4
    assert (found.low, found.high) == (1.0, 5.0)


def test_the_paired_difference_is_tighter_than_its_parts() -> None:
    random = np.random.default_rng(0)
    one_N = random.normal(100, 20, 300)
    two_N = one_N + random.normal(1, 0.5, 300)
    bootstrap = Bootstrap(np.full(300, 10.0), seed=3)
    difference, one = bootstrap.mean(two_N - one_N), bootstrap.mean(one_N)
    assert difference.low > 0.09
    assert difference.high - difference.low < 0.1 * (one.high - one.low)


def test_ratios() -> None:
    bootstrap = Bootstrap(np.full(3, 1.0), seed=0)
    found = bootstrap.ratio(np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0]))
    assert found is not None
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)
    assert bootstrap.ratio(np.ones(3), np.zeros(3)) is None


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    [(10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)],  # Newcombe 1998, table I
)
def test_wilson_against_published_intervals(right: int, n: int, low: float, high: float) -> None:
    found = wilson(right, n)
    assert found.value == right / n
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)
