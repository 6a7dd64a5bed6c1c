"""The constructed heads are what they claim to be."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.patterns.constructed import KINDS, PURE, construct, repeating_text


@pytest.mark.parametrize("gated", [False, True])
def test_rows_are_attention(gated: bool) -> None:
    made = construct(KINDS, lengths=[40, 64], seed=3, gated=gated)
    sums = made.maps.row_sums()[0]
    assert [head.kind for head in made.truth] == list(KINDS)
    kept = [index for index, kind in enumerate(KINDS) if kind != "near-empty"]
    if gated:
        assert (sums[kept] < 0.999).any()
        assert (sums <= 1 + 1e-6).all()
    else:
        np.testing.assert_allclose(sums[kept], 1, rtol=1e-5)
    for head in range(len(KINDS)):
        matrix_QK = made.maps.matrix(0, head)
        assert not np.triu(matrix_QK, 1).any()


def test_the_undisturbed_head_is_its_definition() -> None:
    made = construct(PURE, lengths=[60], seed=0, washes=[0.0])
    of = {head.kind: made.maps.matrix(0, index) for index, head in enumerate(made.truth)}
    offset = next(head.offset for head in made.truth if head.kind == "offset")
    assert offset is not None
    assert of["sink"][1:, 0].mean() > 0.7
    assert np.diagonal(of["self"]).mean() == pytest.approx(1)
    assert np.diagonal(of["previous"], -1).mean() == pytest.approx(1)
    assert np.diagonal(of["offset"], -offset).mean() == pytest.approx(1)
    ids = np.array(made.maps.ids[0])
    for kind, step in (("induction", 1), ("duplicate", 0)):
        query, key = np.nonzero(of[kind])
        looking = key > 0
        assert looking.sum() > 10
        assert (ids[key[looking] - step] == ids[query[looking]]).all()


def test_a_seed_is_a_set_of_maps() -> None:
    one, two, other = (construct(KINDS, lengths=[40], seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.maps.weight, two.maps.weight)
    assert not np.array_equal(one.maps.ids, other.maps.ids)


def test_texts_repeat_a_block_at_different_distances() -> None:
    ids = np.array(repeating_text(120, np.random.default_rng(0)))
    query, key = np.nonzero(np.tril(ids[:, None] == ids[None, :], -1))
    assert len(set(query - key)) >= 3
