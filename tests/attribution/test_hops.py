"""Heads for a share of a hop, by numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.attribution.hops import Hop, carriers, hop_into
from gossamer.errors import GossamerError


def test_the_fewest_heads_that_cover_the_share_of_the_sizes() -> None:
    contribution_LH = np.array([[5.0, -3.0], [1.0, 1.0]])
    found = carriers(contribution_LH, 0.8)
    assert found.places == [(0, 0), (0, 1)]  # 5 + 3 of 10
    assert (found.total, found.gross, found.available) == (4.0, 10.0, 4)
    assert found.signed_share == pytest.approx(2 / 4)
    assert carriers(contribution_LH, 0.81).places == [(0, 0), (0, 1), (1, 0)]
    assert len(carriers(contribution_LH, 1.0)) == 4
    assert len(carriers(contribution_LH, 0.5)) == 1


def test_rounding_does_not_ask_for_another_head() -> None:
    assert len(carriers(np.full((1, 10), 0.1), 0.8)) == 8


def test_heads_that_carry_nothing_are_not_counted() -> None:
    found = carriers(np.array([[0.0, 2.0]]), 1.0)
    assert found.places == [(0, 1)]
    assert found.available == 1
    assert len(carriers(np.zeros((2, 2)))) == 0


def test_the_answers_hop_is_the_largest_total_from_elsewhere() -> None:
    assert hop_into(np.array([-5.0, 2, 9]), 2) == Hop(1, 2)
    assert not Hop(1, 2).at_home
    assert Hop(2, 2).at_home
    assert str(Hop(1, 2)) == "1 → 2"


def test_a_hop_that_carries_nothing_is_never_the_answers() -> None:
    """Though nothing is more than less than nothing."""
    assert hop_into(np.array([0.0, -3, 0, -1, 0]), 4) == Hop(3, 4)
    assert hop_into(np.array([5.0, 0, -1, 0]), 3, n_begin=1) == Hop(2, 3)


def test_a_begin_token_is_passed_over_unless_nothing_else_is_read() -> None:
    worth_K = np.array([7.0, -2.0, 0])
    assert hop_into(worth_K, 2) == Hop(0, 2)
    assert hop_into(worth_K, 2, n_begin=1) == Hop(1, 2)
    assert hop_into(worth_K, 1, n_begin=1) == Hop(0, 1)


def test_a_position_that_reads_nothing_has_no_hop() -> None:
    with pytest.raises(GossamerError, match="into position 2"):
        hop_into(np.eye(3)[2], 2)
    with pytest.raises(GossamerError, match="between 0 and 1"):
        carriers(np.ones((1, 1)), 0)
