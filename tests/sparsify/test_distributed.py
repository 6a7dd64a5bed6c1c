"""One process or two: the same global batch, the same numbers."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, load
from gossamer.sparsify import Sequences, SparsifyConfig, read_metrics, train
from gossamer.sparsify.distributed import Processes
from gossamer.sparsify.student import prepare
from gossamer.sparsify.trainer import Trainer

DRIVER = Path(__file__).with_name("processes.py")


def run(arguments: list[str], n_processes: int) -> None:
    """Start the processes as a launcher would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(DRIVER), *arguments]
    started = []
    for rank in range(n_processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n_processes)}
        environment = os.environ | common | place
        started.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    for process in started:
        _, complaint = process.communicate(timeout=180)
        assert process.returncode == 0, complaint[-2000:]


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out / "metrics.jsonl") if "loss" in record]


def test_two_processes_do_the_work_of_one(tiny_folder: Path, text: Sequences, tmp_path: Path) -> None:
    settings = {"steps": 3, "batch": 4, "held_out": 4, "keep_mass": 0.9, "deterministic_share": 1.0}
    text.save(tmp_path / "text.safetensors")
    train(load(str(tiny_folder)), text.ids_NT, None, SparsifyConfig.from_dict(settings), tmp_path / "alone")
    out = tmp_path / "together"
    run([str(tiny_folder), str(tmp_path / "text.safetensors"), str(out), json.dumps(settings)], n_processes=2)
    alone, together = steps_of(tmp_path / "alone"), steps_of(out)
    assert len(alone) == len(together) == 3
    for one, two in zip(alone, together, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["target"] == pytest.approx(one["target"], rel=1e-4)
        assert two["open_share"] == pytest.approx(one["open_share"], rel=1e-2)
    assert 0 < alone[0]["open_share"] < 1
    assert json.loads((out / "report.json").read_text())["processes"] == 2


def test_a_batch_that_does_not_divide_is_refused(tiny: LoadedModel, text: Sequences, short: SparsifyConfig) -> None:
    processes = Processes("cpu")
    processes.count = 3
    config = short.replace(length=text.length)
    with pytest.raises(GossamerError, match="divided over 3 processes"):
        Trainer(prepare(tiny, config), None, text, config, dense_loss=3.0, processes=processes)
