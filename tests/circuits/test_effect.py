"""Explained effect, curves and their files, on numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gossamer.circuits.effect import Baseline, Curve, RandomCircuits, ShutCurve, size_ratio
from gossamer.circuits.ranking import jaccard, random_masks, ranked, top_masks
from gossamer.errors import GossamerError

BASELINE = Baseline(clean_N=np.array([3.0, 5.0]), corrupt_N=np.array([-0.5, 0.5]))  # means 4 and 0


def curve(explained: list[float], sizes: list[int] | None = None) -> Curve:
    """A curve with these explained effects, the same metric for both prompts."""
    metric_SN = np.repeat(4 * np.array(explained)[:, None], 2, 1)
    sizes_S = np.array(sizes if sizes is not None else range(len(explained)))
    return Curve("heads", int(sizes_S[-1]), sizes_S, metric_SN, BASELINE, {"ranking": "by effect"})


def test_means_come_before_ratios() -> None:
    metric_N = np.array([1.0, 2.0])  # mean 1.5; the mean of the two ratios would be (0 + 0.5) / 2
    assert BASELINE.explained(metric_N) == pytest.approx(1.5 / 4)


def test_a_denominator_near_zero_is_flagged() -> None:
    assert not BASELINE.is_weak
    noisy = Baseline(np.array([1.0, -1.0, 1.1, -1.0]), np.array([-1.0, 1.0, -1.0, 1.0]))
    assert noisy.is_weak
    assert "near zero" in noisy.describe()
    same = Baseline(np.ones(3), np.ones(3))
    assert same.is_weak
    assert np.isnan(same.explained(np.ones(3)))


def test_smallest_is_where_the_curve_stays() -> None:
    rising = curve([0.0, 0.95, 0.5, 0.92, 0.91, 1.0])
    assert rising.smallest(0.9) == 3  # 0.95 at size 1 does not count: it falls again
    assert rising.smallest(0.5) == 1
    assert rising.smallest(0.95) == 5
    assert curve([0.0, 0.5]).smallest(0.9) is None
    assert curve([1.0, 1.0]).smallest(0.9) == 0


def test_areas_by_hand() -> None:
    overshooting = curve([0.0, 1.5, 1.0])
    assert overshooting.cpr == pytest.approx(0.5 * (0.75 + 1.25))
    assert overshooting.cmd == pytest.approx(0.5 * (0.75 + 0.25))
    uneven = curve([0.0, 1.0, 1.0], sizes=[0, 1, 4])
    assert uneven.cpr == pytest.approx(0.25 * 0.5 + 0.75)
    assert not uneven.is_complete


def test_areas_begin_at_the_empty_circuit() -> None:
    """As MIB has it: with free MLPs the empty circuit is no corrupt run, and only what lies above it counts."""
    high = curve([0.5, 0.75, 1.0])  # halfway up its own way at half the size
    assert high.cpr == pytest.approx(0.5)
    assert high.cmd == pytest.approx(0.5)
    assert curve([1.0, 1.0]).areas() == {"CPR": None, "CMD": None}


def test_shut_components_have_no_size_where_none_is_enough() -> None:
    lower = curve([0.6, 0.7, 1.0])
    assert lower.smallest(0.5) == 0
    shut = ShutCurve(lower.unit, lower.total, lower.sizes_S, lower.metric_SN, lower.baseline)
    assert shut.smallest(0.5) is None
    assert shut.smallest_estimate(0.5) is None
    assert size_ratio(lower, shut, 0.5) is None
    assert (shut.reached_with_none(0.5), shut.reached_with_none(0.65)) == (True, False)
    assert shut.smallest(0.65) == lower.smallest(0.65) == 1


def test_none_reaches_a_level_by_what_was_measured_and_not_by_its_interval() -> None:
    baseline = Baseline(np.full(8, 10.0), np.zeros(8))
    metric_SN = np.stack([np.linspace(3, 7, 8), np.full(8, 7.0), np.full(8, 10.0)])
    shut = ShutCurve("edges", 4, np.array([0, 2, 4]), metric_SN, baseline, {})
    found = shut.smallest_estimate(0.55)
    assert found is not None
    assert (found.value, found.low) == (2, 0)  # on some resamples none is enough
    assert shut.smallest_estimate(0.5) is None


def test_ranking_breaks_ties_in_order_and_puts_nan_last() -> None:
    assert ranked(np.array([0.0, 2.0, np.nan, 2.0, -3.0])).tolist() == [1, 3, 0, 4, 2]
    assert ranked(np.array([0.0, 2.0, np.nan, 2.0, -3.0]), by_magnitude=True).tolist() == [4, 1, 3, 0, 2]
    scores_C = np.array([1e-9, 2.0, np.nan, 0.0, -3.0])
    assert ranked(scores_C, negligible=1e-6).tolist() == [1, 4, 0, 2, 3]  # none comes after what works against it
    assert ranked(scores_C, negligible=1e-6, by_magnitude=True).tolist() == [4, 1, 0, 2, 3]
    assert top_masks(np.array([2, 0, 1]), [0, 2]).tolist() == [[False] * 3, [True, False, True]]


def test_random_circuits_have_the_size_and_differ() -> None:
    masks_DC, again_DC = (random_masks(10, 4, 20, np.random.default_rng(1)) for _ in range(2))
    assert (masks_DC.sum(1) == 4).all()
    assert len({tuple(mask) for mask in masks_DC}) > 10
    assert (masks_DC == again_DC).all()


def test_intervals_hold_the_value_and_pair_the_ratio() -> None:
    generator = np.random.default_rng(3)
    baseline = Baseline(generator.normal(5, 1, 40), generator.normal(0, 1, 40))
    steps_S = np.linspace(0, 1, 11)[:, None]
    metric_SN = baseline.corrupt_N + steps_S**0.5 * (baseline.clean_N - baseline.corrupt_N)
    measured = Curve("heads", 10, np.arange(11), metric_SN + generator.normal(0, 0.1, (11, 40)), baseline)
    low_S, high_S = measured.interval_S()
    assert ((low_S <= measured.explained_S) & (measured.explained_S <= high_S)).all()
    assert (high_S[1:-1] > low_S[1:-1]).all()
    found = measured.smallest_estimate(0.9)
    assert found is not None
    assert found.low <= found.value <= found.high
    itself = size_ratio(measured, measured, 0.9)
    assert itself is not None
    assert (itself.low, itself.value, itself.high) == (1, 1, 1)  # paired: the interval of a ratio to itself is empty


def test_random_circuits_beside_a_ranking() -> None:
    drawn = RandomCircuits(2, np.array([[0.0, 0.0], [4.0, 4.0], [2.0, 2.0], [1.0, 1.0]]), BASELINE)
    assert drawn.explained_D.tolist() == [0, 1, 0.5, 0.25]
    assert drawn.share_at_least(0.5) == 0.5


def test_overlap() -> None:
    assert jaccard([1, 2, 3], [2, 3, 4]) == 0.5
    assert jaccard([1], [2]) == 0
    assert jaccard([], []) is None  # nothing is shared, and nothing is not


def test_a_curve_survives_its_file(tmp_path: Path) -> None:
    saved = curve([0.0, 0.7, 1.0])
    loaded = Curve.load(saved.save(tmp_path / "curve.safetensors"))
    assert (loaded.metric_SN == saved.metric_SN).all()
    assert (loaded.baseline.clean_N == saved.baseline.clean_N).all()
    assert (loaded.unit, loaded.total, loaded.rule) == ("heads", 2, {"ranking": "by effect"})


def test_unknown_fields_versions_and_kinds_are_refused(tmp_path: Path) -> None:
    path = curve([0.0, 1.0]).save(tmp_path / "curve.safetensors")
    with pytest.raises(GossamerError, match="not a gossamer random circuits"):
        RandomCircuits.load(path)
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        header = file.metadata()["gossamer"]
    arrays = load_file(path)
    for wrong, message in (
        (header.replace('"version": 1', '"version": 2'), "version 2"),
        (header.replace('"unit"', '"unti"'), "unknown field 'unti'"),
        (header.replace('"unit": "heads", ', ""), "lacks the field 'unit'"),
        (header.replace('"total": 1', '"total": "many"'), "should be int"),
        (header.replace('"total": 1', '"total": 3'), "a curve ends at the full model"),
        (header[:-1], "its header is not JSON"),
        ("[]", "its header is not a mapping"),
    ):
        assert wrong != header
        save_file(arrays, path, metadata={"gossamer": wrong})
        with pytest.raises(GossamerError, match=message):
            Curve.load(path)
    save_file(arrays | {"sizes_S": np.array([], dtype=np.int64)}, path, metadata={"gossamer": header})
    with pytest.raises(GossamerError, match=r"curve\.safetensors does not fit together"):
        Curve.load(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(GossamerError, match="could not be read"):
        Curve.load(path)
