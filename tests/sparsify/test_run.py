"""Whole runs: what they leave behind, and how they end when something goes wrong."""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

import gossamer as gs
import gossamer.sparsify.api as api
import gossamer.sparsify.pace as pace
import gossamer.sparsify.state as state
from gossamer.attention import Gate
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, load
from gossamer.sparsify import Observer, Sequences, SparsifyConfig, begin, measure, read_metrics, train
from gossamer.sparsify.data import split_held_out
from gossamer.sparsify.divergence import DivergedError
from gossamer.sparsify.habits import with_few_tokens, with_habits
from gossamer.sparsify.reopen import DOUBLINGS, reopen
from gossamer.sparsify.state import DiskFullError
from gossamer.sparsify.trainer import NotFiniteError

FOUR_WAYS = ("open_of_causal_pairs", "open_of_document_pairs", "open_per_query_and_head", "open_per_token")


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "picture" not in request.node.name:
        monkeypatch.setattr("gossamer.sparsify.receipt.write_picture", lambda out: None)


class Counter(Observer):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def says(self, message: str) -> None:
        self.calls.append(message)

    def starts(self, *_: Any, **__: Any) -> None:
        self.calls.append("starts")

    def stepped(self, record: Any, pace: Any) -> None:
        assert pace.tokens_per_second > 0
        assert pace.seconds_left >= 0
        self.calls.append("stepped")

    def measured(self, *_: Any) -> None:
        self.calls.append("measured")

    def saved(self, *_: Any) -> None:
        self.calls.append("saved")

    def ends(self, *_: Any) -> None:
        self.calls.append("ends")


def test_receipt_and_result_with_picture(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    observer = Counter()
    result = train(tiny, text.ids_NT, None, short, tmp_path, observer)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report == result.report
    _, held_out = split_held_out(text, short.held_out)
    again = measure(result.model.hf, held_out, batch=4, teacher=tiny.hf)
    assert report["end"]["loss"] == again.loss
    assert report["dense"]["loss"] == measure(tiny.hf, held_out, batch=4).loss
    assert all(report["start"][way] > 0 for way in FOUR_WAYS)
    assert 0 < report["start"]["open_of_causal_pairs"] < 1
    assert all(way in report["end"] for way in FOUR_WAYS)
    constraint = report["constraint"]
    assert constraint["met"] == (constraint["value"] <= constraint["target"])
    assert (report["steps"], report["tokens"], report["seed"]) == (6, 6 * 4 * 12, 0)
    assert SparsifyConfig.from_dict(report["config"]).digest() == report["config_digest"]
    reloaded = load(str(tmp_path / "model"))
    assert reloaded.is_sparse
    assert torch.equal(reloaded.logits(torch.tensor([[1, 2, 3]])), result.model.logits(torch.tensor([[1, 2, 3]])))
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [observer.calls.count(call) for call in ("starts", "stepped", "measured", "saved", "ends")] == [
        1,
        6,
        3,
        4,
        1,
    ]
    assert not list(tmp_path.rglob(".*"))


def test_metrics_hold_steps_and_measurements(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    train(tiny, text.ids_NT, None, short, tmp_path)
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records if "held_out" in record] == [0, 3, 6]
    steps = [record for record in records if "held_out" not in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0]["tau"] == 0.3
    assert steps[0]["multiplier"] == 1.0
    assert 0 < steps[0]["open_share"] < 1
    (tmp_path / "broken.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    with pytest.raises(GossamerError, match="Line 2"):
        read_metrics(tmp_path / "broken.jsonl")


def test_control_has_the_same_schedule_and_no_gates(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    sparse = train(tiny, text.ids_NT, None, short, tmp_path / "sparse")
    control = train(tiny, text.ids_NT, None, short.replace(control=True), tmp_path / "control")
    assert not control.model.is_sparse
    assert not load(str(tmp_path / "control" / "model")).is_sparse
    assert control.report["constraint"] is None
    assert control.report["start"] is None
    assert control.report["tokens"] == sparse.report["tokens"]
    factors = [
        [record["rate_factor"] for record in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in record]
        for name in ("sparse", "control")
    ]
    assert factors[0] == factors[1]
    assert len(factors[0]) == 6


def test_best_is_the_sparsest_that_met_the_constraint(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    config = short.replace(
        steps=30, constraint="kl", keep_mass=0.99, learning_rate=3e-3, gate_learning_rate=0.1, batch=8
    )
    result = train(tiny, text.ids_NT, None, config, tmp_path)
    measured = [r | r["held_out"] for r in read_metrics(tmp_path / "metrics.jsonl") if "held_out" in r]
    met = [record for record in measured if record["constraint_met"]]
    assert 0 < len(met) < len(measured)  # the run did cross the boundary
    best = min(met, key=lambda record: (record["open_edges"], -record["step"]))
    assert result.report["step"] == best["step"]
    assert result.report["end"]["open_edges"] == best["open_edges"]
    assert result.report["constraint"]["met"]
    assert result.report["end"]["open_edges"] < result.report["start"]["open_edges"]


def test_not_a_number_stops_and_keeps_the_last_checkpoint(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    config = short.replace(learning_rate=1e30, checkpoint_every=1)
    with pytest.raises(NotFiniteError, match=r"The (loss|gradient) of step \d is not a number; .*step-0000000\d"):
        train(tiny, text.ids_NT, None, config, tmp_path)
    folders = state.checkpoint_folders(tmp_path)
    assert len(folders) == 1
    assert all(torch.isfinite(w).all() for w in state.load_file(folders[0] / "weights.safetensors").values())
    assert not (tmp_path / "model").exists()


def test_a_constraint_out_of_reach_stops(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    impossible = short.replace(
        steps=50, slack=1e-6, constraint="kl", gate_offset=-1e3, keep_mass=None, patience=4, multiplier_rate=5.0,
        learning_rate=1e-9, gate_learning_rate=1e-9,
    )  # fmt: skip
    with pytest.raises(DivergedError, match=r"out of reach.*step-00000000"):
        train(tiny, text.ids_NT, None, impossible, tmp_path)


@pytest.mark.parametrize(
    "failure", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("IoError: No space left on device")]
)
def test_a_full_disk_keeps_the_last_good_checkpoint(
    tiny: LoadedModel,
    text: Sequences,
    short: SparsifyConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception,
) -> None:
    whole = train(tiny, text.ids_NT, None, short, tmp_path / "whole")
    real, calls = state.save_file, [0]

    def full_after_some(tensors: Any, path: Path) -> None:
        calls[0] += 1
        if "step-00000004" in str(path.parent) and "optimizer" in path.name:
            path.write_bytes(b"half a fi")
            raise failure
        real(tensors, path)

    monkeypatch.setattr(state, "save_file", full_after_some)
    out = tmp_path / "full"
    with pytest.raises(DiskFullError, match=r"The disk is full: .*step 4.*step-00000002"):
        train(tiny, text.ids_NT, None, short, out)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000002"]
    monkeypatch.setattr(state, "save_file", real)
    again = train(tiny, text.ids_NT, None, short, out, resume=True)
    assert again.report["end"] == whole.report["end"]
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_minutes_become_steps_once(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = short.replace(steps=None, minutes=0.15)
    asked = []
    monkeypatch.setattr(pace, "measure_cost", lambda *_: asked.append(1) or pace.Cost(step=1.0, measurement=0.3))
    result = train(tiny, text.ids_NT, None, config, tmp_path)
    assert result.report["steps"] == int((9 * 0.9 - 2 - 8 * 0.3) / (1 + 0.3 / 5)) == 3
    stored = json.loads((tmp_path / "run.json").read_text())["config"]
    assert (stored["steps"], stored["minutes"]) == (3, 0.15)
    train(tiny, text.ids_NT, None, config, tmp_path, resume=True)
    assert len(asked) == 1
    with pytest.raises(GossamerError, match="too short for a single step"):
        train(tiny, text.ids_NT, None, config.replace(minutes=0.05), tmp_path / "other")
    with pytest.raises(GossamerError, match="steps or of minutes"):
        train(tiny, text.ids_NT, None, config.replace(minutes=None), tmp_path / "third")


def test_minutes_include_sampling(tiny_folder: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    result = begin(str(tiny_folder), text="self", out=tmp_path / "run", minutes=0.12, batch=4, length=8, held_out=4)
    assert result.report["steps"] >= 1
    assert time.monotonic() - started < 3 * 60 * 0.12  # other work may slow the machine down in between
    text = Sequences.load(tmp_path / "run" / "text.safetensors")
    assert len(text) >= 8
    assert not result.report["control"]


def test_text_is_planned_to_fit(monkeypatch: pytest.MonkeyPatch, tiny: LoadedModel) -> None:
    """Cheap text is used once; text that is dear takes a quarter of the time and is used again."""
    monkeypatch.setattr(api, "measure_cost", lambda *_: pace.Cost(step=0.5, measurement=0.0))
    config = SparsifyConfig(minutes=2, batch=10, held_out=10, length=8)
    for seconds, expected in ((0.0, "once"), (0.001, "once"), (0.2, "again")):
        monkeypatch.setattr(api.TextSource, "seconds_per_sequence", lambda *_, s=seconds: s)
        source = api.TextSource("self", 8, 0)
        watch = pace.Stopwatch()
        planned, wanted = api._fit_into_minutes(tiny, source, config, api.Processes("cpu"), watch)
        assert planned.steps is not None
        assert wanted is not None
        read = planned.steps * 10 + 10
        assert (wanted == read) if expected == "once" else (wanted < read)
        assert planned.steps * 0.5 + wanted * seconds <= 120


def test_public_door_on_a_text_file(tiny_folder: Path, tmp_path: Path) -> None:
    story = tmp_path / "story.txt"
    story.write_text("Anna gave Tom the ball. " * 60)
    settings: dict[str, Any] = {"steps": 2, "batch": 2, "length": 8, "held_out": 2, "slack": 0.5}
    dense = load(str(tiny_folder))
    sparse = gs.sparsify(dense, text=story, out=tmp_path / "run", **settings)
    assert sparse.is_sparse
    assert not dense.is_sparse
    assert sparse.name == str(tmp_path / "run" / "model")
    with pytest.raises(GossamerError, match="gated already"):
        gs.sparsify(sparse, text=story, out=tmp_path / "again", **settings)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("text", "settings", "complaint"),
    [
        ("Too short.", {}, "shorter than one sequence"),
        ("", {}, "empty"),
        ("Anna gave Tom the ball.", {"length": 6}, "2 sequences"),
        ("Anna gave Tom the ball. " * 60, {"length": 64}, "do not fit"),
        ("Anna gave Tom the ball. " * 60, {"slack": 0}, "more than 0 nats"),
        ("Anna gave Tom the ball. " * 60, {"slak": 0.1}, "Did you mean 'slack'"),
    ],
)
def test_bad_input_leaves_nothing_behind(
    tiny_folder: Path, tmp_path: Path, text: str, settings: dict[str, Any], complaint: str
) -> None:
    story = tmp_path / "story.txt"
    story.write_text(text)
    with pytest.raises(GossamerError, match=complaint) as caught:
        begin(str(tiny_folder), text=story, out=tmp_path / "run", **({"steps": 2} | settings))
    assert str(caught.value).count("\n") == 0
    assert not (tmp_path / "run").exists()


def test_a_missing_text_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"no text at nowhere\.txt"):
        begin(str(tiny_folder), text="nowhere.txt", out=tmp_path / "run", steps=1)


SMALL: dict[str, Any] = {"steps": 2, "batch": 2, "length": 8, "held_out": 2, "slack": 0.5}


def test_a_model_without_a_tokenizer_leaves_the_place_free(tiny_folder: Path, tmp_path: Path) -> None:
    dense, out = load(str(tiny_folder)), tmp_path / "run"
    tokenizer, dense.optional_tokenizer = dense.optional_tokenizer, None
    with pytest.raises(GossamerError, match="without a tokenizer"):
        begin(dense, text="self", out=out, **SMALL)
    assert not out.exists()
    dense.optional_tokenizer = tokenizer
    assert begin(dense, text="self", out=out, **SMALL).model.is_sparse


def test_a_failure_before_the_first_checkpoint_takes_back_what_it_wrote_and_nothing_else(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise GossamerError("no calibration today.")

    monkeypatch.setattr("gossamer.sparsify.run.calibrate", fails)
    out = tmp_path / "run"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(GossamerError, match="no calibration"):
        begin(str(tiny_folder), text="language", out=out, **SMALL)
    assert [path.name for path in out.rglob("*")] == ["notes.txt"]


def test_a_file_in_the_place_of_the_folder_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(GossamerError, match="file is a file; give the name of a folder"):
            begin("a model that is never loaded", text="language", out=out, **SMALL)


def test_gates_are_opened_just_as_far_as_is_needed() -> None:
    """In the heads' own units, to within a sixteenth of the last doubling; the offsets themselves stay."""
    gates = [Gate("logit", 2, 1.0), Gate("logit", 2, -1.0)]
    units = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 4.0])]
    tried: list[float] = []

    def is_enough() -> bool:
        shift = float(gates[0].offset_H[0]) - 1
        torch.testing.assert_close(gates[1].offset_H.detach(), -1 + shift * units[1])
        tried.append(shift)
        return shift > 0.1

    reopen(gates, units, is_enough)
    assert gates[0].offset_H.tolist() == [1, 1]
    least = min(shift for shift in tried if shift > 0.1)
    assert 0.1 < least < 0.1 + (0.16 - 0.08) / 16 + 1e-6
    tried.clear()
    reopen(gates, None, lambda: tried.append(0.0) or False)  # type: ignore[func-returns-value]
    assert len(tried) == DOUBLINGS


def test_last_weights_that_cost_too_much_are_kept_with_gates_opened(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    """The constraint is met in the end, with more edges than where training ended."""
    rates = {"learning_rate": 1e-6, "gate_learning_rate": 0.2}  # the weights stay: open gates make it the dense model
    config = short.replace(steps=12, evaluate_every=12, slack=0.01, constraint="kl", **rates)
    last = train(tiny, text.ids_NT, None, config.replace(choose="last"), tmp_path / "last").report
    best = train(tiny, text.ids_NT, None, config, tmp_path / "best").report
    assert not last["constraint"]["met"], "the test needs a run that goes too far"
    assert best["constraint"]["met"]
    assert last["end"]["open_edges"] < best["end"]["open_edges"]


def test_short_runs_of_minutes_let_the_offsets_learn() -> None:
    config = with_habits(SparsifyConfig(minutes=3), {"minutes": 3}, "self")
    hasty = with_few_tokens(config, {"minutes": 3})
    assert (hasty.gate, hasty.keep_mass, hasty.slack_start) == ("mass", 0.9999, hasty.slack)
    assert hasty.learning_rate < config.learning_rate
    given = {"gate": "logit", "learning_rate": 1e-3, "slack_start": 0.5}
    kept = with_few_tokens(config.replace(**given), given)
    assert (kept.gate, kept.keep_mass, kept.learning_rate, kept.slack_start) == ("logit", 0.99, 1e-3, 0.5)
    lora = with_few_tokens(config.replace(trainable="lora"), {})
    assert lora.learning_rate == config.learning_rate
