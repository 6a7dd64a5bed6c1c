"""A run that was killed and resumed gives the same bytes as one that never stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.sparsify import Interrupted, Observer, Sequences, SparsifyConfig, begin, go_on, train

DRIVER = Path(__file__).with_name("interruptions.py")


LORA = {"trainable": "lora", "constraint": "kl", "gate": "flow"}


@pytest.mark.parametrize(("extra", "kills"), [({}, []), (LORA, ["between checkpoints"])], ids=["full", "lora"])
def test_killed_at_any_point(tiny_folder: Path, tmp_path: Path, extra: dict[str, Any], kills: list[str]) -> None:
    command = [sys.executable, str(DRIVER), str(tiny_folder), str(tmp_path), json.dumps(extra), *kills]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("lines") == 7 + 5  # steps, and measurements at 0, 2, 4, 6, 7
    assert len(found) == (len(kills) or 7)
    for name, result in found.items():
        assert all(result.values()), (name, result, done.stderr)


class SignalAt(Observer):
    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def stepped(self, record: Any, pace: Any) -> None:
        if record.step == self.step:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_checkpoint_and_say_how_to_go_on(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path, number: int
) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    whole = train(tiny, text.ids_NT, None, short, tmp_path / "whole")
    out = tmp_path / "stopped"
    with pytest.raises(Interrupted, match=r"after step 3 of 6.*gossamer sparsify --resume"):
        train(tiny, text.ids_NT, None, short, out, SignalAt(3, number))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000003"]
    assert (out / "training.png").stat().st_size > 1000
    again = train(tiny, text.ids_NT, None, short, out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert again.report["end"] == whole.report["end"]
    assert again.report["wall_seconds"] > 0


def test_a_run_is_not_overwritten_nor_continued_with_something_else(
    tiny: LoadedModel, text: Sequences, short: SparsifyConfig, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(tiny, text.ids_NT, None, short, out, SignalAt(1, signal.SIGINT))
    with pytest.raises(GossamerError, match="already holds a run"):
        train(tiny, text.ids_NT, None, short, out)
    with pytest.raises(GossamerError, match=r"slack was 0\.05 and is 0\.1"):
        train(tiny, text.ids_NT, None, short.replace(slack=0.1), out, resume=True)
    with pytest.raises(GossamerError, match="another text"):
        train(tiny, text.ids_NT[::-1], None, short, out, resume=True)
    with pytest.raises(GossamerError, match="no run in"):
        go_on(tmp_path / "nothing")


def test_a_finished_run_returns_its_model(tiny_folder: Path, tmp_path: Path, text: Sequences) -> None:
    settings = {"steps": 2, "batch": 4, "held_out": 4}
    first = begin(str(tiny_folder), text=text, out=tmp_path / "run", **settings)
    again = go_on(tmp_path / "run")
    assert again.report == json.loads((tmp_path / "run" / "report.json").read_text()) == first.report
    assert again.model.is_sparse
    with pytest.raises(GossamerError, match="already holds a run"):
        begin(str(tiny_folder), text=text, out=tmp_path / "run", **settings)


BEGIN = {"steps": 2, "batch": 4, "held_out": 4, "length": 12}


@pytest.mark.parametrize("stage", ["sampling", "calibrating", "finishing"])
def test_interrupted_outside_the_loop_says_how_to_go_on(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def stops(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    place = {
        "sampling": "gossamer.sparsify.text.TextSource.sequences",
        "calibrating": "gossamer.sparsify.run.calibrate",
        "finishing": "gossamer.sparsify.receipt.save_model",
    }[stage]
    whole = begin(str(tiny_folder), text="language", out=tmp_path / "whole", **BEGIN)
    with monkeypatch.context() as patched:
        patched.setattr(place, stops)
        with pytest.raises(Interrupted, match=r"go on with `gossamer sparsify --resume .*run`"):
            begin(str(tiny_folder), text="language", out=tmp_path / "run", **BEGIN)
    again = go_on(tmp_path / "run")
    assert again.report["end"] == whole.report["end"]


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "begin is a list": ("begin.json", lambda path: path.write_text("[1]"), "holds no JSON object"),
    "begin lacks keys": ("begin.json", lambda path: path.write_text('{"format": 1}'), "lacks 'source'"),
    "run is a list": ("run.json", lambda path: path.write_text("[1]"), "holds no JSON object"),
    "text is cut off": ("text.safetensors", halved, "not a whole file of token sequences"),
    "text is gone": ("text.safetensors", Path.unlink, "has lost its text"),
    "weights are cut off": ("checkpoints/step-00000001/weights.safetensors", halved, "damaged or missing"),
    "moments are gone": ("checkpoints/step-00000001/optimizer.safetensors", Path.unlink, "damaged or missing"),
    "state lacks keys": ("checkpoints/step-00000001/state.json", lambda p: p.write_text("{}"), "lacks 'step'"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_explained(tiny_folder: Path, tmp_path: Path, text: Sequences, name: str) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        begin(str(tiny_folder), text=text, out=out, observer=SignalAt(1, signal.SIGINT), **BEGIN)
    file, damage, words = DAMAGE[name]
    damage(out / file)
    with pytest.raises(GossamerError, match=words) as caught:
        go_on(out)
    assert "\n" not in str(caught.value)


def test_a_complete_run_that_lost_its_model_is_not_looked_up_elsewhere(
    tiny_folder: Path, tmp_path: Path, text: Sequences
) -> None:
    first = begin(str(tiny_folder), text=text, out=tmp_path / "run", **BEGIN)
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(GossamerError, match=r"its model is gone; remove .*report\.json"):
        go_on(tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    assert go_on(tmp_path / "run").report["end"] == first.report["end"]
