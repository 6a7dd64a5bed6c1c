"""All pairs at once equal one pair at a time, with scipy as the judge of correlations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gossamer.errors import GossamerError
from gossamer.maps import AttentionMaps, from_matrices
from gossamer.patterns.relations import Relations, clustering_order, relate

T = 14


def random_maps(seed: int = 0, *, ties: bool = True, dead: bool = True) -> AttentionMaps:
    """Heads that share some edges, with equal weights among them, one head without edges."""
    rng = np.random.default_rng(seed)
    prompts = []
    for _ in range(2):
        common = rng.random((T, T))
        heads = np.tril((common + rng.random((2, 3, T, T))) / 2) * (rng.random((2, 3, T, T)) < 0.4)
        heads = np.round(heads, 1) if ties else heads
        if dead:
            heads[1, 2] = 0
        prompts.append(heads)
    return from_matrices(prompts, ids=[list(range(T))] * 2, gated=True, model=f"model {seed}")


def flat(maps: AttentionMaps) -> np.ndarray:
    lower = np.tril_indices(T)
    return np.array([np.concatenate([maps.matrix(*head, n)[lower] for n in range(2)]) for head in maps.heads])


def one_pair(a: np.ndarray, b: np.ndarray, which: str, strata: np.ndarray | None) -> float:
    union = (a > 0) | (b > 0)
    if which == "overlap":
        return ((a > 0) & (b > 0)).sum() / union.sum()
    x, y = a[union].astype(float), b[union].astype(float)
    if which == "spearman":
        x, y = stats.rankdata(x), stats.rankdata(y)
    if strata is not None:
        for stratum in np.unique(strata[union]):
            here = strata[union] == stratum
            x[here] -= x[here].mean()
            y[here] -= y[here].mean()
    return float(stats.pearsonr(x, y).statistic)


@pytest.mark.parametrize("position_removed", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_all_pairs_equal_one_at_a_time(position_removed: bool, ties: bool) -> None:
    maps = random_maps(ties=ties)
    found = relate(maps, position_removed=position_removed)
    heads = flat(maps)
    query, key = np.tril_indices(T)
    strata = np.tile(np.where(key == 0, -1, query - key), 2) if position_removed else None
    assert ((heads[0] > 0) & (heads[1] > 0)).any()
    for which in ("pearson", "spearman", "overlap"):
        matrix = found.matrix(which)
        for a in range(5):
            for b in range(5):
                assert matrix[a, b] == pytest.approx(one_pair(heads[a], heads[b], which, strata), abs=1e-9), (
                    which,
                    a,
                    b,
                )


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = random_maps()
    whole = relate(maps)
    monkeypatch.setattr("gossamer.patterns.relations.CHUNK", 17)
    pieces = relate(maps)
    for which in ("pearson", "spearman", "overlap"):
        np.testing.assert_allclose(pieces.matrix(which), whole.matrix(which), atol=1e-12)


def test_dead_heads_are_undefined_not_zero() -> None:
    found = relate(random_maps())
    for which in ("pearson", "spearman", "overlap"):
        assert np.isnan(found.matrix(which)[5]).all()
        assert np.isnan(found.matrix(which)[:, 5]).all()
        assert not np.isnan(found.matrix(which)[:5, :5]).any()
    assert found.nearest_heads(5) == []
    assert 5 not in [other for other, _ in found.nearest_heads(0, n=10)]
    assert found.order()[-1] == 5


def test_weights_that_are_all_equal_have_no_correlation() -> None:
    same = np.tril(np.ones((T, T)))
    maps = from_matrices([np.stack([same, 0.3 * same])[None]], ids=[list(range(T))])
    found = relate(maps)
    assert np.isnan(found.pearson).all()
    assert np.isnan(found.spearman).all()
    assert (found.overlap == 1).all()


def test_joint_zeros_do_not_count() -> None:
    """Two disjoint heads on many tokens: a correlation over all pairs would be about zero."""
    one, two = np.zeros((T, T)), np.zeros((T, T))
    one[5, 2], one[6, 3], two[9, 1], two[8, 2] = 0.5, 0.6, 0.5, 0.6
    found = relate(from_matrices([np.stack([one, two])[None]], ids=[list(range(T))], gated=True))
    assert found.pearson[0, 1] < -0.9
    assert found.overlap[0, 1] == 0


def test_position_removed_leaves_which_token_is_chosen() -> None:
    """Two diagonals whose strengths are unrelated agree only in where they are."""
    rng = np.random.default_rng(0)
    heads = [0.2 * np.tril(np.ones((60, 60))) / 60 + np.diag(rng.uniform(0.5, 1, 59), -1) for _ in range(2)]
    maps = from_matrices([np.stack(heads)[None]], ids=[list(range(60))])
    assert relate(maps).pearson[0, 1] > 0.9
    assert abs(relate(maps, position_removed=True).pearson[0, 1]) < 0.35


def test_dense_against_its_own_sparse_self() -> None:
    dense, sparse = random_maps(0, dead=False), random_maps(1)
    found = relate(dense, sparse)
    assert found.models == ("model 0", "model 1")
    a, b = flat(dense), flat(sparse)
    own = found.dense_to_sparse()
    assert own[1] == pytest.approx(one_pair(a[1], b[1], "pearson", None))
    assert np.isnan(own[5])
    assert found.index("L1H0", "model 1") == 9
    np.testing.assert_allclose(found.pearson[:6, :6], relate(dense).pearson)
    with pytest.raises(GossamerError, match="of one model"):
        relate(dense).dense_to_sparse()


def test_maps_of_different_prompts_are_refused() -> None:
    other = from_matrices([np.eye(3)[None, None]], ids=[[1, 2, 3]])
    with pytest.raises(GossamerError, match="different prompts"):
        relate(random_maps(), other)


def test_clusters_stand_together() -> None:
    group = np.array([0, 1, 0, 2, 1, 0, 2, 1])
    similarity = np.where(group[:, None] == group[None, :], 0.9, 0.1) + 0.01 * np.eye(8)
    ordered = group[clustering_order(similarity)]
    assert (np.diff(ordered) != 0).sum() == 2


def test_nearest_heads_and_files(tmp_path: Path) -> None:
    found = relate(random_maps())
    nearest = found.nearest_heads(0, "spearman", n=2)
    row = found.spearman[0, 1:5]
    assert nearest[0] == (int(row.argmax()) + 1, pytest.approx(row.max()))
    again = Relations.load(found.save(tmp_path / "relations.json"))
    np.testing.assert_array_equal(again.pearson, found.pearson)
    assert (again.names, again.models) == (found.names, found.models)
    with pytest.raises(GossamerError, match="choose pearson"):
        found.matrix("pearsn")
    with pytest.raises(GossamerError, match="Did you mean 'L0H1'"):
        found.index("L0H11")
