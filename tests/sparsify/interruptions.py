"""Run by test_resume in a process of its own: kill runs at many points, resume them, compare with one never stopped.

Every run is a fork of this process (one thread, nothing computed before), so that torch is imported only once. A child
really dies of SIGKILL. Prints one JSON object: name of the kill point -> what was found.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gossamer.sparsify.receipt as receipt
import gossamer.sparsify.state as state
from gossamer.models import load
from gossamer.sparsify import Observer, begin, go_on

SETTINGS: dict[str, Any] = {
    "steps": 7, "batch": 4, "evaluate_every": 2, "checkpoint_every": 3, "slack": 0.05, "keep_mass": 0.9,
    "accumulation": 2, "held_out": 4, "length": 12,
}  # fmt: skip


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class DieAt(Observer):
    """Kills the process when training has done `step` steps, or when `word` is said."""

    def __init__(self, *, step: int | None = None, word: str | None = None) -> None:
        self.step, self.word = step, word

    def says(self, message: str) -> None:
        if self.word is not None and self.word in message:
            die()

    def stepped(self, record: Any, pace: Any) -> None:
        if record.step == self.step:
            die()


def during_nth_call(module: Any, name: str, n: int) -> None:
    """The n-th call of a function does its work and then kills the process."""
    original, calls = getattr(module, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls[0] += 1
        if calls[0] == n:
            die()
        return result

    setattr(module, name, counted)


def before_removal() -> None:
    """Kill when an older checkpoint is about to be removed, with the new one in place."""
    state.shutil = type("Shutil", (), {"rmtree": staticmethod(die)})  # type: ignore[assignment,misc]


KILLS: dict[str, Callable[[], Observer]] = {
    "making the text": lambda: DieAt(word="Making"),
    "calibrating": lambda: DieAt(word="Calibrating"),
    "the first step": lambda: DieAt(step=1),
    "between checkpoints": lambda: DieAt(step=5),
    "writing a checkpoint": lambda: (during_nth_call(state, "save_file", 5), Observer())[1],
    "replacing a checkpoint": lambda: (before_removal(), Observer())[1],
    "saving the result": lambda: (during_nth_call(receipt, "save_model", 1), Observer())[1],
}


def in_a_fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def start(model: Path, out: Path, observer: Observer, config: dict[str, Any]) -> None:
    begin(load(str(model)), text="self", out=out, observer=observer, **config)


def outcome(out: Path) -> dict[str, Any]:
    report = json.loads((out / "report.json").read_text())
    del report["wall_seconds"]
    return {
        "metrics": (out / "metrics.jsonl").read_text(),
        "report": report,
        "weights": (out / "model" / "model.safetensors").read_bytes().hex(),
        "left over": sorted(path.name for path in out.rglob(".*")),
    }


def main(model: Path, folder: Path, extra: dict[str, Any], kills: list[str]) -> None:
    torch.set_num_threads(1)
    config = SETTINGS | extra
    receipt.write_picture = lambda out: None  # half of the time of a run this short
    whole = folder / "whole"
    assert in_a_fork(lambda: start(model, whole, Observer(), config)) == 0
    expected = outcome(whole)
    found: dict[str, Any] = {"lines": len(expected["metrics"].splitlines())}
    for name in kills or KILLS:
        out = folder / name.replace(" ", "-")
        killed = in_a_fork(lambda out=out, name=name: start(model, out, KILLS[name](), config))  # type: ignore[misc]
        again = in_a_fork(lambda out=out: go_on(out) and None)  # type: ignore[misc]
        result = outcome(out) if again == 0 else {}
        found[name] = {
            "killed": os.WIFSIGNALED(killed) and os.WTERMSIG(killed) == signal.SIGKILL,
            "resumed": again == 0,
            **{key: result.get(key) == expected[key] for key in expected},
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:])
