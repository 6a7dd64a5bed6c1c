"""Measures against their definition row by row, resampling against scipy, and statements that must come out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json
from gossamer.maps import AttentionMaps, from_matrices
from gossamer.patterns.change import Limits, PairStatistics, Statement, dense_to_sparse
from gossamer.patterns.resampling import bootstrap_means, corrected, draws, interval, paired_permutation, smallest_p
from gossamer.patterns.statistics import (
    HeadStatistics,
    diagonal_coverage,
    excess_by_distance,
    mass_by_distance,
    measure,
)

T, N = 16, 8


def softmax_rows(rng: np.random.Generator, heads: int = 4) -> np.ndarray:
    scores = np.where(np.tril(np.ones((T, T), dtype=bool)), rng.normal(0, 2, (1, heads, T, T)), -np.inf)
    rows = np.exp(scores)
    return rows / rows.sum(-1, keepdims=True)


def pair(seed: int = 0, *, floor: float = 0.0) -> tuple[AttentionMaps, AttentionMaps]:
    """Four heads on N prompts: sink, diagonal, wash, and one that dies; the sparse model keeps only dots."""
    rng = np.random.default_rng(seed)
    lower = np.tril(np.ones((T, T)))
    dense, sparse = [], []
    for _ in range(N):
        wash = np.tril(rng.gamma(4, size=(T, T)))
        wash /= wash.sum(-1, keepdims=True)
        sink = 0.2 * wash
        sink[:, 0] += 0.8
        diagonal = 0.9 * np.eye(T, k=-1) + 0.1 * wash
        diagonal[0] = wash[0]
        heads = np.stack([sink, diagonal, wash, wash])
        kept = np.stack([np.zeros((T, T)), np.eye(T, k=-1) * (rng.random((T, 1)) < 0.5), wash > 0.5, np.zeros((T, T))])
        dense.append(heads[None])
        sparse.append((heads * kept * lower)[None])
    ids = [list(range(T))] * N
    return (
        from_matrices(dense, ids=ids, model="dense", floor=floor),
        from_matrices(sparse, softmax=dense, ids=ids, model="sparse", gated=True),
    )


def test_measures_equal_their_definition_row_by_row() -> None:
    rng = np.random.default_rng(0)
    softmax = softmax_rows(rng)
    weights = softmax * (rng.random(softmax.shape) < 0.4)
    weights[0, :, 4] = weights[0, 3] = 0
    found = measure(from_matrices([weights], softmax=[softmax], ids=[list(range(T))], gated=True)).values
    for head in range(4):
        rows = [(i, weights[0, head, i, : i + 1], softmax[0, head, i, : i + 1]) for i in range(1, T)]
        alive = [(i, w) for i, w, _ in rows if w.sum() > 0]
        assert len(alive) < T - 1
        expected = {
            "carried": np.mean([w.sum() for _, w, _ in rows]),
            "first": np.mean([w[0] for _, w, _ in rows]),
            "first_excess": np.mean([w[0] - w.sum() / len(w) for _, w, _ in rows]),
            "first_before": np.mean([p[0] for _, _, p in rows]),
            "first_excess_before": np.mean([p[0] - 1 / len(p) for _, _, p in rows]),
            "effective_keys_before": np.mean([np.exp(stats.entropy(p)) for _, _, p in rows]),
            "entropy_before": np.mean([stats.entropy(p) for _, _, p in rows]),
            "open_per_query": np.mean([(w > 0).sum() for _, w, _ in rows]),
            "wash": np.mean(
                [max(0, np.minimum(w, 1 / len(w)).sum() - 1 / len(w)) / (1 - 1 / len(w)) for _, w, _ in rows]
            ),
        }
        if alive:
            entropies = [stats.entropy(w / w.sum()) for _, w in alive]
            total = sum(w.sum() for _, w in alive)
            expected |= {
                "entropy": np.mean(entropies),
                "effective_keys": np.mean(np.exp(entropies)),
                "peak": np.mean([w.max() for _, w in alive]),
                "intensity": total / sum((w > 0).sum() for _, w in alive),
                "diagonal": sum(w[-2:].sum() for _, w in alive) / total,
                "distance": sum((w * (i - np.arange(len(w)))).sum() for i, w in alive) / total,
            }
        for name, value in expected.items():
            assert found[name][0, 0, head] == pytest.approx(value, rel=2e-3, abs=1e-4), (name, head)
    for name in ("entropy", "peak", "diagonal", "distance", "intensity"):
        assert np.isnan(found[name][0, 0, 3]), name


def test_a_floor_changes_little_and_loses_nothing() -> None:
    exact, floored = measure(pair()[0]), measure(pair(floor=0.03)[0])
    assert pair(floor=0.03)[0].mass_below_floor() > 0.01
    for name, tolerance in (("carried", 1e-6), ("entropy", 0.02), ("wash", 0.02), ("open_per_query", 1e-9)):
        np.testing.assert_allclose(floored.values[name], exact.values[name], atol=tolerance)


def test_documents_count_their_own_first_token() -> None:
    sink = np.zeros((T, T))
    sink[:6, 0] = sink[6:, 6] = 1
    maps = from_matrices([sink[None, None]], ids=[list(range(T))], documents=[(0, 6)])
    assert measure(maps).values["first"][0, 0, 0] == pytest.approx(1)


def test_profile_and_coverage() -> None:
    solid = np.eye(T, k=-5)
    solid[:5, 0] = 1
    dotted = np.eye(T, k=-5) * (np.arange(T) % 2)[:, None]
    maps = from_matrices([np.stack([solid, dotted])[None]], ids=[list(range(T))], gated=True)
    assert mass_by_distance(maps)[1].argmax() == 5
    np.testing.assert_allclose(diagonal_coverage(maps, np.array([5, 5]))[0], [1, 6 / 11])
    found = measure(maps)
    assert found.distance_bins == (0, 1, 2, 4, 8)
    np.testing.assert_allclose(found.profile[0, 1], [0, 0, 0, 1, 0])
    assert found.dead.tolist() == [[False, False]]


def test_bootstrap_covers_the_mean_and_leaves_out_what_is_undefined() -> None:
    values = np.random.default_rng(0).normal(3, 1, (30, 2))
    values[:10, 1] = np.nan
    counts = draws(30, 2000, 0)
    samples = bootstrap_means(values, counts)
    low, high = interval(samples)
    error = stats.sem(values[:, 0])
    assert low[0] == pytest.approx(values[:, 0].mean() - 1.96 * error, abs=0.1 * error * 4)
    assert high[1] > np.nanmean(values[:, 1]) > low[1]
    assert np.isnan(interval(bootstrap_means(np.full((30, 1), np.nan), counts))[0]).all()


def test_permutations_equal_scipys() -> None:
    differences = np.random.default_rng(1).normal(0.4, 1, (9, 3))
    exact = paired_permutation(differences, resamples=10_000, seed=0)
    drawn = paired_permutation(np.tile(differences, (2, 1)), resamples=9_999, seed=0)
    for head in range(3):
        expected = stats.permutation_test(
            (differences[:, head],), np.mean, permutation_type="samples", n_resamples=np.inf
        ).pvalue
        assert exact[head] == pytest.approx(expected)
    assert (drawn < exact).all()
    assert drawn.min() >= 1 / 10_000
    assert np.isnan(paired_permutation(np.full((5, 1), np.nan), resamples=100, seed=0)).all()


def test_a_true_null_is_rarely_rejected() -> None:
    rng = np.random.default_rng(2)
    p = paired_permutation(rng.normal(0, 1, (10, 400)), resamples=2_000, seed=0)
    assert 0.02 < (p < 0.05).mean() < 0.09


def test_corrections_by_hand() -> None:
    p = np.array([0.01, 0.04, np.nan, 0.03])
    np.testing.assert_allclose(corrected(p), [0.03, 0.06, np.nan, 0.06])
    np.testing.assert_allclose(corrected(p, "bh"), [0.03, 0.04, np.nan, 0.04])
    with pytest.raises(GossamerError, match="holm or bh"):
        corrected(p, "bonferroni")  # type: ignore[arg-type]


def test_statements_of_a_pair_that_shows_all_four() -> None:
    found = dense_to_sparse(*pair(), resamples=500)
    sink, diagonals, wash, dead = found.statements
    assert [statement.answer for statement in found.statements] == ["yes"] * 4, [str(s) for s in found.statements]
    assert sink.n_heads == 1
    assert diagonals.dense == pytest.approx(1)
    assert 0.2 < diagonals.sparse < 0.8
    assert wash.left < 0.25
    assert "L0H0, L0H3" in dead.why


def test_diagonals_that_died_do_not_make_the_others_dotted() -> None:
    """Half of the diagonals gone, the other half as solid as before: nothing is dotted."""
    solid, nothing = np.eye(T, k=-1), np.zeros((T, T))
    solid[0, 0] = 1
    ids = [list(range(T))] * N
    dense = from_matrices([np.stack([solid] * 4)[None]] * N, ids=ids, model="dense")

    def diagonals(sparse: list[np.ndarray]) -> Statement:
        maps = from_matrices(
            [np.stack(sparse)[None]] * N, softmax=[np.stack([solid] * 4)[None]] * N, ids=ids, gated=True
        )
        return dense_to_sparse(dense, maps, resamples=100).statements[1]

    halved = diagonals([solid, solid, nothing, nothing])
    assert (halved.answer, halved.n_heads) == ("no", 2)
    assert "Of 4 heads with a diagonal 2 kept it, 2 lost it; 0 gained one; of those kept 0 are dotted, 2" in halved.why
    dotted = diagonals([solid * (np.arange(T) % 2)[:, None], solid, nothing, nothing])
    assert dotted.answer == "yes"
    assert "1 are dotted, 1 as solid" in dotted.why
    assert diagonals([nothing] * 4).answer == "no"


def test_amounts_are_told_as_shares_of_what_is_carried_too() -> None:
    """A gate that lets a tenth of everything through leaves a tenth of the sink, and the same share."""
    dense, _ = pair()
    softmax = [np.stack([[dense.matrix(0, head, number) for head in range(4)]]) for number in range(N)]
    sparse = from_matrices([0.1 * one for one in softmax], softmax=softmax, ids=dense.ids, gated=True)
    sink = dense_to_sparse(dense, sparse, resamples=100).statements[0]
    assert sink.left == pytest.approx(0.1)
    shares = re.findall(r"(\d+)% → (\d+)% of what they carry", sink.why)
    assert shares[0][0] == shares[0][1]
    assert sink.answer == "cannot tell"
    assert "went along with the rest" in sink.why


def pair_of(dense: list[np.ndarray], sparse: list[np.ndarray], n: int = N) -> tuple[AttentionMaps, AttentionMaps]:
    """The same heads on N prompts, before and after a gate."""
    ids, before, after = [list(range(T))] * n, np.stack(dense)[None], np.stack(sparse)[None]
    return (
        from_matrices([before] * n, ids=ids, model="dense"),
        from_matrices([after] * n, softmax=[before] * n, ids=ids, model="sparse", gated=True),
    )


def even() -> np.ndarray:
    return np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]


def test_a_sink_that_moves_to_another_head_is_not_gone() -> None:
    column = np.zeros((T, T))
    column[:, 0] = 1
    moved = dense_to_sparse(*pair_of([column, even()], [0 * column, column]), resamples=100).statements[0]
    assert (moved.answer, moved.kept, moved.lost, moved.gained) == ("no", 0, 1, 1)
    gone = dense_to_sparse(*pair_of([column, even()], [np.eye(T), even()]), resamples=100).statements[0]
    assert (gone.answer, gone.kept, gone.lost, gone.gained) == ("yes", 0, 1, 0)
    appeared = dense_to_sparse(*pair_of([even(), even()], [column, even()]), resamples=100).statements[0]
    assert (appeared.answer, appeared.gained) == ("no", 1)


def test_a_single_visible_edge_is_no_dotted_diagonal() -> None:
    solid = np.eye(T, k=-1)
    solid[0, 0] = 1
    one = np.zeros((T, T))
    one[9, 8] = 1
    few = dense_to_sparse(*pair_of([solid, solid], [one, one]), resamples=100).statements[1]
    assert few.answer == "no"
    assert (few.kept, few.lost) == (0, 2)
    assert "No head keeps 10%" in few.why


def test_even_attention_has_no_diagonal_on_short_prompts() -> None:
    """Of two or three keys a third of the mass is at each distance whatever the head does."""
    short = np.tril(np.ones((3, 3))) / np.arange(1, 4)[:, None]
    maps = from_matrices([short[None, None]] * N, ids=[[1, 2, 3]] * N)
    assert mass_by_distance(maps).max() / mass_by_distance(maps).sum() > 0.3
    np.testing.assert_allclose(excess_by_distance(maps), 0, atol=1e-7)
    assert "No head of" in dense_to_sparse(maps, maps, resamples=50).statements[1].why
    diagonal = from_matrices([np.eye(3)[None, None]] * N, ids=[[1, 2, 3]] * N)
    assert excess_by_distance(diagonal)[0, 0] == pytest.approx(1 - (1 / 2 + 1 / 3) / 2)


def test_no_statement_is_made_on_few_prompts() -> None:
    few = dense_to_sparse(*(maps.select([0, 1]) for maps in pair()), resamples=100)
    assert [statement.answer for statement in few.statements] == ["cannot tell"] * 4
    assert all("2 prompts, too few to tell" in statement.why for statement in few.statements)
    single = dense_to_sparse(*(maps.select([0]) for maps in pair()), resamples=100)
    assert np.isnan(single.change("peak").all_low)
    assert np.isnan(single.statements[0].low)
    assert not any("nan" in statement.why for statement in single.statements)
    limits = Limits(prompts=2)
    told = dense_to_sparse(*(maps.select([0, 1]) for maps in pair()), resamples=100, limits=limits)
    assert told.statements[0].answer == "yes"


def test_few_prompts_cannot_tell_and_say_so() -> None:
    few = dense_to_sparse(*(maps.select([0, 1, 2]) for maps in pair())).change("first_excess")
    assert (few.smallest_p, few.can_tell) == (1.0, False)
    enough = dense_to_sparse(*pair()).change("first_excess")
    assert enough.smallest_p == pytest.approx(4 * smallest_p(N, 0)) == pytest.approx(4 * 2 / 2**N)
    assert enough.can_tell
    assert enough.significant[0, 0]
    assert smallest_p(40, 999) == 1 / 1000


def test_statements_of_a_model_against_itself() -> None:
    dense, _ = pair()
    found = dense_to_sparse(dense, dense, resamples=200)
    assert [statement.answer for statement in found.statements] == ["no"] * 4
    assert np.allclose(found.change("peak").difference, 0)


def test_statements_without_a_sink_or_enough_prompts() -> None:
    wash = np.tril(np.ones((T, T))) / np.arange(1, T + 1)[:, None]
    maps = from_matrices([wash[None, None]] * 2, ids=[list(range(T))] * 2)
    answers = {statement.statement: statement for statement in dense_to_sparse(maps, maps, resamples=50).statements}
    assert answers["the sink is gone"].answer == "cannot tell"
    assert "No head" in answers["the sink is gone"].why
    assert answers["heads have died"].answer == "cannot tell"


def test_changes_have_signs_intervals_and_corrected_p() -> None:
    found = dense_to_sparse(*pair(), resamples=1000)
    first = found.change("first_excess")
    assert first.difference[0, 0] < -0.5
    assert first.low[0, 0] <= first.difference[0, 0] <= first.high[0, 0]
    assert first.p[0, 0] == pytest.approx(2 / 2**N)
    assert (first.p_corrected >= first.p).all()
    assert np.isnan(found.change("entropy").p[0, 3])
    assert first.all_dense > first.all_sparse


def test_other_prompts_are_refused() -> None:
    dense, sparse = pair()
    with pytest.raises(GossamerError, match="same prompts"):
        dense_to_sparse(dense, sparse.select([0, 1]))


def test_results_survive_their_files(tmp_path: Path) -> None:
    found = dense_to_sparse(*pair(), resamples=100)
    again = PairStatistics.load(found.save(tmp_path / "pair.json"))
    assert str(again.statements) == str(found.statements)  # undefined numbers compare as text
    np.testing.assert_array_equal(again.change("peak").p, found.change("peak").p)
    np.testing.assert_array_equal(again.dense.values["wash"], found.dense.values["wash"])
    one = HeadStatistics.load(found.sparse.save(tmp_path / "one.json"))
    np.testing.assert_array_equal(one.dead, found.sparse.dead)
    assert one.dead.dtype == bool


def test_a_damaged_file_is_refused_in_words(tmp_path: Path) -> None:
    path = dense_to_sparse(*pair(), resamples=50).save(tmp_path / "pair.json")
    data = read_json(path)
    for damage in (
        {"dense": None},
        {"limits": []},
        {"resamples": "many"},
        {"statements": {}},
        {"statements": [1]},
        {"dense": data["dense"] | {"dead": "none"}},
        {"dense": data["dense"] | {"profile": [[1, 2], [3]]}},
        {"dense": data["dense"] | {"values": {"peak": ["x"]}}},
    ):
        write_json(path, data | damage)
        with pytest.raises(GossamerError, match="is damaged"):
            PairStatistics.load(path)
