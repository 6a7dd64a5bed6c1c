"""`gossamer transcoders` on a tiny random model: training, going on, measuring, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.transcoders import TranscoderReport

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest
SMALL = ("--text", "language", "--sequences", 16, "--features", 12, "--active", 3, "--set", "batch=4")


def test_training_going_on_and_measuring(pair: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    train = ("transcoders", pair[1], *SMALL, "--steps", 3, "--out", tmp_path / "run", "--json")
    done = gossamer(*train)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert len(report["unexplained"]) == 2
    assert report == TranscoderReport.load(tmp_path / "run" / "report.json").to_dict()
    assert "step 3 of 3" in done.err
    assert json.loads(gossamer(*train).out) == report
    measured = gossamer("transcoders", pair[1], "--evaluate", tmp_path / "run")
    assert measured.code == 0, measured.err
    assert "unexplained variance" in measured.out
    assert "KL with all MLPs replaced" in measured.out


def test_minutes_are_counted_once(pair: tuple[str, str], gossamer: Call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("gossamer.transcoders.pace.steps_within", lambda *a: 2)
    train = ("transcoders", pair[0], *SMALL, "--minutes", 1, "--out", tmp_path / "run")
    assert "step 2 of 2" in gossamer(*train).err
    monkeypatch.setattr("gossamer.transcoders.pace.steps_within", lambda *a: 5)
    assert gossamer(*train).code == 0
    assert json.loads((tmp_path / "run" / "begin.json").read_text())["config"]["steps"] == 2


def test_a_cache_is_kept_where_it_was_asked_for(pair: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    cache = ("--cache", tmp_path / "cache", "--cache-gib", 0.001)
    done = gossamer("transcoders", pair[0], *SMALL, "--steps", 1, "--out", tmp_path / "run", *cache)
    assert done.code == 0, done.err
    assert (tmp_path / "cache" / "inputs.npy").stat().st_size <= 0.001 * 2**30


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "--out to train"),
        (("--out", "OUT", "--evaluate", "bundled/dense"), "--out to train"),
        (("--out", "OUT", "--steps", 3, "--minutes", 1), "not both"),
        (("--out", "OUT", "--set", "batches=4"), "Did you mean 'batch'"),
        (("--out", "OUT", "--kind", "sideways"), "sideways"),
        (("--evaluate", "nowhere"), "no transcoders at"),
    ],
)
def test_mistakes_are_one_sentence(arguments, sentence: str, pair: tuple[str, str], gossamer: Call, tmp_path) -> None:
    asked = [tmp_path / "run" if word == "OUT" else word for word in arguments]
    failed = gossamer("transcoders", pair[0], *asked, *(("--text", "language", "--sequences", 4) if asked else ()))
    assert failed.code == 2
    assert "Traceback" not in failed.err
    assert sentence in " ".join(failed.err.split())
