"""Scores by hand, properties that any taxonomy should have, and recall on constructed heads it was not tuned on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json
from gossamer.maps import AttentionMaps, from_matrices
from gossamer.patterns.constructed import KINDS, construct, repeating_text
from gossamer.patterns.settings import thresholds_and_limits
from gossamer.patterns.statements import Limits
from gossamer.patterns.taxonomy import LABELS, PATTERNS, PatternReport, Thresholds, classify

T = 40
RNG = np.random.default_rng(0)
DISTINCT = list(range(T))


def diagonal(distance: int, length: int = T) -> np.ndarray:
    matrix = np.eye(length, k=-distance)
    matrix[:distance, 0] = 1
    return matrix


def uniform(length: int = T) -> np.ndarray:
    return np.tril(np.ones((length, length))) / np.arange(1, length + 1)[:, None]


def maps_of(
    *heads: np.ndarray, ids: Sequence[int] = DISTINCT, gated: bool = False, floor: float = 0.0
) -> AttentionMaps:
    return from_matrices([np.stack(heads)[None]], ids=[ids], gated=gated, floor=floor)


def recall(seed: int, kinds: Sequence[str], n: int, *, lengths: Sequence[int], gated: bool) -> Counter[tuple[str, str]]:
    made = construct(list(kinds) * n, lengths=lengths, seed=seed, gated=gated)
    report = classify(made.maps)
    for head, truth in enumerate(made.truth):
        if report.labels[0][head] == "offset":
            assert report.offset[0, head] == truth.offset
    return Counter((truth.kind, label) for truth, label in zip(made.truth, report.labels[0], strict=True))


def require_recall(confusion: Counter[tuple[str, str]]) -> None:
    total = Counter[str]()
    for (kind, _), number in confusion.items():
        total[kind] += number
    shares = {kind: confusion[kind, kind] / total[kind] for kind in KINDS}
    assert min(shares.values()) >= 0.9, shares
    assert sum(confusion[kind, kind] for kind in KINDS) / total.total() >= 0.97, confusion


def test_recall_on_constructed_heads() -> None:
    confusion = recall(2001, KINDS, 5, lengths=[48], gated=False)
    confusion += recall(2002, KINDS, 5, lengths=[64, 40], gated=True)
    confusion += recall(2003, KINDS, 5, lengths=[96], gated=False)
    require_recall(confusion)


@pytest.mark.torture
def test_recall_at_length() -> None:
    confusion = Counter[tuple[str, str]]()
    for number, lengths in enumerate(([48], [64, 40], [96], [160, 128], [384])):
        for gated in (False, True):
            confusion += recall(3000 + 2 * number + gated, KINDS, 12, lengths=lengths, gated=gated)
    require_recall(confusion)


def test_even_attention_scores_one_for_diffuse_and_nothing_else() -> None:
    report = classify(maps_of(uniform()))
    assert report.scores["diffuse"][0, 0] == pytest.approx(1)
    for name in set(PATTERNS) - {"diffuse", "induction", "duplicate"}:
        assert report.scores[name][0, 0] == pytest.approx(0, abs=1e-9), name
    assert report.label(0, 0) == "diffuse"


@pytest.mark.parametrize("distance", [0, 1, 2, 3, 7, 19])
def test_a_shifted_diagonal_is_found_at_its_offset(distance: int) -> None:
    report = classify(maps_of(0.9 * diagonal(distance) + 0.1 * uniform()))
    assert report.label(0, 0) == {0: "self", 1: "previous"}.get(distance, "offset")
    if distance >= 2:
        assert report.offset[0, 0] == distance


def test_a_score_by_hand() -> None:
    """Rows 1 and 2 of three carry 1/2 and 1; the sink gets 1/2 and 1/4. Uniform is (1/2 / 2 + 1/3) of 3/2."""
    matrix = np.array([[1, 0, 0], [0.5, 0, 0], [0.25, 0.75, 0]])
    report = classify(maps_of(matrix, ids=[0, 1, 2], gated=True))
    share, even = 0.75, 0.25 + 1 / 3
    assert report.scores["sink"][0, 0] == pytest.approx((share - even) / (1.5 - even))
    assert report.scores["empty"][0, 0] == pytest.approx(1 - 1.5 / 2)


def test_scores_are_shares_and_undefined_only_without_mass_or_repetition() -> None:
    made = construct(KINDS, lengths=[48], seed=5, gated=True)
    report = classify(made.maps)
    for name, score in report.scores.items():
        assert np.nanmin(score) >= 0, name
        assert np.nanmax(score) <= 1, name
    dead = classify(maps_of(np.zeros((T, T)), gated=True))
    assert dead.label(0, 0) == "near-empty"
    assert dead.scores["empty"][0, 0] == 1
    assert all(np.isnan(dead.scores[name][0, 0]) for name in PATTERNS)
    assert np.isnan(classify(maps_of(diagonal(1))).scores["induction"][0, 0])


def test_permuting_heads_permutes_labels() -> None:
    made = construct(KINDS, lengths=[48], seed=7)
    order = np.random.default_rng(0).permutation(len(KINDS))
    heads = np.stack([made.maps.matrix(0, int(head)) for head in order])
    shuffled = classify(from_matrices([heads[None]], ids=made.maps.ids))
    straight = classify(made.maps)
    assert list(shuffled.labels[0]) == [straight.labels[0][head] for head in order]
    assert len(set(straight.labels[0])) >= 9


def test_rows_that_carry_less_keep_their_pattern() -> None:
    """Scores are shares of what is carried; only `empty` sees how much that is."""
    heads = [0.9 * diagonal(distance) + 0.1 * uniform() for distance in (0, 1, 5)]
    full, half = classify(maps_of(*heads)), classify(maps_of(*[0.3 * head for head in heads], gated=True))
    assert full.labels == half.labels
    for name in ("self", "previous", "offset", "sink", "diffuse"):
        np.testing.assert_allclose(full.scores[name], half.scores[name], atol=1e-6)
    np.testing.assert_allclose(half.scores["empty"], 0.7, atol=1e-6)


def test_a_dotted_diagonal_is_still_a_diagonal() -> None:
    dotted = diagonal(4) * (RNG.random((T, 1)) < 0.4)
    report = classify(maps_of(dotted, gated=True))
    assert report.label(0, 0) == "offset"
    assert report.offset[0, 0] == 4


def test_noise_lowers_the_score_steadily() -> None:
    heads = [(1 - noise) * diagonal(1) + noise * uniform() for noise in (0, 0.1, 0.2, 0.3, 0.5, 0.6, 0.8)]
    report = classify(maps_of(*heads))
    assert (np.diff(report.scores["previous"][0]) < 0).all()
    assert report.labels[0][0] == report.labels[0][3] == "previous"
    assert report.labels[0][4] == "hybrid"
    assert report.labels[0][-1] == "diffuse"


def test_mass_below_the_floor_is_spread() -> None:
    heads = [0.5 * diagonal(0) + 0.5 * uniform(), uniform()]
    exact, floored = classify(maps_of(*heads)), classify(maps_of(*heads, floor=0.04))
    assert maps_of(*heads, floor=0.04).mass_below_floor() > 0.1
    np.testing.assert_allclose(floored.scores["diffuse"], exact.scores["diffuse"], atol=0.02)
    np.testing.assert_allclose(floored.scores["self"], exact.scores["self"], atol=0.02)
    assert floored.labels == exact.labels


def test_documents_have_their_own_first_token() -> None:
    sink = np.zeros((T, T))
    sink[:15, 0] = sink[15:, 15] = 1
    packed = from_matrices([sink[None, None]], ids=[DISTINCT], documents=[(0, 15)])
    single = from_matrices([sink[None, None]], ids=[DISTINCT])
    assert classify(packed).scores["sink"][0, 0] == pytest.approx(1)
    assert classify(single).scores["sink"][0, 0] < 0.5


def test_induction_needs_text_that_repeats() -> None:
    """The same map: on repeated text an induction head, on other text whatever its distances say."""
    ids = np.array(repeating_text(60, RNG))
    follows = np.roll(np.tril(ids[:, None] == ids[None, :], -1), 1, axis=1).astype(float)
    follows[follows.sum(1) == 0, 0] = 1
    follows /= follows.sum(1, keepdims=True)
    assert classify(maps_of(follows, ids=ids.tolist())).label(0, 0) == "induction"
    assert classify(maps_of(follows, ids=list(range(60)))).label(0, 0) != "induction"


def test_a_hybrid_names_its_parts() -> None:
    mixed = 0.5 * diagonal(0) + 0.5 * diagonal(6)
    report = classify(maps_of(mixed))
    assert report.label(0, 0) == "hybrid"
    assert set(report.parts[0][0]) == {"self", "offset"}
    assert "offset 6" in report.describe(0, 0)


def test_two_weak_patterns_are_a_hybrid_and_one_is_other() -> None:
    scattered = np.tril(RNG.random((T, T)) ** 60)
    scattered /= scattered.sum(-1, keepdims=True)
    two = 0.32 * diagonal(0) + 0.32 * diagonal(6) + 0.36 * scattered
    one = 0.3 * diagonal(0) + 0.7 * scattered
    report = classify(maps_of(two, one))
    assert max(report.scores[name][0, 0] for name in ("self", "offset")) < Thresholds().strong
    assert set(report.parts[0][0]) == {"self", "offset"}
    assert report.labels[0] == ("hybrid", "other")


def test_diffuse_is_what_is_left() -> None:
    """A column above a wash that overlaps even attention more than the column weighs: the column comes first."""
    column = np.zeros((T, T))
    column[:, 0] = 1
    report = classify(maps_of(0.4 * column + 0.6 * uniform()))
    assert report.scores["diffuse"][0, 0] > report.scores["sink"][0, 0] >= Thresholds().strong
    assert report.parts[0][0] == ("sink", "diffuse")


def test_thresholds_are_parameters() -> None:
    head = 0.6 * diagonal(1) + 0.4 * uniform()
    assert classify(maps_of(head), Thresholds(second_diffuse=0.9)).label(0, 0) == "previous"
    assert classify(maps_of(head), Thresholds(strong=0.95)).label(0, 0) == "other"
    with pytest.raises(GossamerError, match="Thresholds"):
        classify(maps_of(head), Thresholds(strong=0.0))


def test_reports_survive_their_file(tmp_path: Path) -> None:
    report = classify(construct(KINDS, lengths=[48], seed=5, gated=True).maps)
    path = report.save(tmp_path / "patterns.json")
    again = PatternReport.load(path)
    assert (again.labels, again.parts, again.thresholds) == (report.labels, report.parts, report.thresholds)
    for name, score in report.scores.items():
        np.testing.assert_array_equal(again.scores[name], score)
    np.testing.assert_array_equal(again.offset, report.offset)
    assert set(report.counts()) <= set(LABELS)
    data = read_json(path)
    for wrong, message in (({"labls": 1}, "unknown field"), ({"version": 9}, "version"), ({"format": "x"}, "not a")):
        write_json(path, data | wrong)
        with pytest.raises(GossamerError, match=message):
            PatternReport.load(path)


def test_the_clearest_head_comes_first() -> None:
    heads = [(1 - noise) * diagonal(1) + noise * uniform() for noise in (0.2, 0, 0.1)]
    assert classify(maps_of(*heads)).heads_of("previous") == [(0, 1), (0, 2), (0, 0)]
    assert replace(Thresholds(), strong=0.5).strong == 0.5


def test_an_exemplar_stands_out_from_other_patterns() -> None:
    """Of two diagonals the one with the larger score is nearly as local as diagonal, so it is shown second."""
    report = classify(maps_of(diagonal(3), diagonal(3)))
    scores = {name: score.copy() for name, score in report.scores.items()}
    scores["offset"][0], scores["local"][0] = (0.8, 0.7), (0.75, 0.1)
    changed = replace(report, scores=scores)
    assert changed.labels[0] == ("offset", "offset")
    assert changed.clarity(0, 0) > changed.clarity(0, 1)
    assert changed.heads_of("offset") == [(0, 1), (0, 0)]


def test_other_is_as_clear_as_its_best_pattern() -> None:
    head = 0.6 * diagonal(1) + 0.4 * uniform()
    report = classify(maps_of(head), Thresholds(strong=0.95))
    assert report.label(0, 0) == "other"
    assert report.clarity(0, 0) == pytest.approx(max(np.nan_to_num(report.scores[name][0, 0]) for name in PATTERNS))


def edges_at(*places: tuple[int, int], weight: float = 1.0, length: int = 12) -> np.ndarray:
    matrix = np.zeros((length, length))
    for query, key in places:
        matrix[query, key] = weight
    return matrix


def test_a_single_edge_is_no_pattern() -> None:
    """On a short prompt one edge is a ninth of all mass, and lies on some diagonal; with four there is something."""
    heads = [edges_at((5, 5)), edges_at((9, 1)), edges_at((5, 0)), edges_at(*[(row, row) for row in (2, 5, 7, 9)])]
    report = classify(maps_of(*heads, ids=list(range(12)), gated=True))
    assert report.scores["self"][0, 0] == report.scores["offset"][0, 1] == 1
    assert report.labels[0] == ("other", "other", "other", "self")
    assert report.describe(0, 0) == "L0H0 other (too few rows carry anything)"
    np.testing.assert_allclose(report.rows[0], [1, 1, 1, 4])


def test_light_edges_do_not_lend_support() -> None:
    head = edges_at((5, 4)) + edges_at((6, 5), (7, 6), (8, 7), (9, 8), weight=0.01)
    report = classify(maps_of(head, ids=list(range(12)), gated=True))
    assert report.label(0, 0) == "other"
    assert report.rows[0, 0] < 1.1


def test_a_pattern_needs_support_on_its_own_rows() -> None:
    """One repeated token, and the row that sees it: no induction head, whatever its score."""
    ids = [*range(39), 20]
    matrix = diagonal(0)
    matrix[39] = np.eye(40)[21]
    report = classify(maps_of(matrix, ids=ids), Thresholds(text_support=0.01))
    assert report.scores["induction"][0, 0] == 1
    assert report.label(0, 0) == "self"


def test_dead_is_told_from_nearly_empty() -> None:
    first_only = edges_at((0, 0), length=T)
    heads = [np.zeros((T, T)), edges_at((5, 5), length=T), first_only]
    report = classify(maps_of(*heads, gated=True))
    assert set(report.labels[0]) == {"near-empty"}
    assert report.heads_of("near-empty") == [(0, 2), (0, 1), (0, 0)]
    assert report.describe(0, 0) == "L0H0 dead (no open edge)"
    assert report.describe(0, 1).startswith("L0H1 near-empty (0.9")
    assert report.describe(0, 2) == "L0H2 near-empty (1.00)"


def test_prompts_of_one_token_say_nothing() -> None:
    report = classify(from_matrices([np.ones((1, 2, 1, 1))], ids=[[7]]))
    assert report.labels[0] == ("other", "other")
    assert all(np.isnan(score).all() for score in report.scores.values())
    assert report.describe(0, 1) == "L0H1 other (too few rows carry anything)"


def test_thresholds_by_name() -> None:
    assert thresholds_and_limits({}) == (Thresholds(), Limits())
    chosen = thresholds_and_limits({"strong": 0.5, "window": 4, "gone": 0.1, "prompts": 3})
    assert chosen == (Thresholds(strong=0.5, window=4), Limits(gone=0.1, prompts=3))
    for wrong, message in (
        ({"strnog": 0.5}, "Did you mean 'strong'"),
        ({"strong": "high"}, "number from 0, not 'high'"),
        ({"window": 4.5}, "a whole number"),
        ({"gone": -1}, "from 0"),
        ({"gone": True}, "a number"),
    ):
        with pytest.raises(GossamerError, match=message):
            thresholds_and_limits(wrong)
