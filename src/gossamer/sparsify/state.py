"""Checkpoints: everything a run needs to go on exactly as if it had never stopped, as safetensors and JSON.

    OUT/checkpoints/step-00000100/weights.safetensors     the trainable weights
                                  optimizer.safetensors   AdamW's moments
                                  best.safetensors        the sparsest weights so far that met the constraint
                                  state.json              step, multiplier, averages, size of the metrics file, ...

Every checkpoint is a new folder that appears in one rename; older ones are removed only after that. So at any moment,
killed or out of disk, the last good checkpoint is there.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.files import atomic_folder, read_record
from gossamer.sparsify.trainer import Trainer

FORMAT = 1
STATE_KEYS = (
    *("step", "multiplier", "dense_loss", "elapsed", "divergence", "best_measurement"),
    *("calibration", "units", "metrics_bytes"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskFullError(GossamerError):
    """Nothing more can be written."""


@contextmanager
def disk_watched(what: str) -> Iterator[None]:
    """Turn a full disk, however it is reported, into one sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise DiskFullError(f"The disk is full: {what} could not be written.") from error
    except SafetensorError as error:
        if not any(sign in str(error) for sign in ("No space left", "StorageFull", "quota")):
            raise
        raise DiskFullError(f"The disk is full: {what} could not be written.") from error


def checkpoint_folders(out: Path) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return sorted(path for path in (out / "checkpoints").glob("step-*") if (path / "state.json").exists())


def save_checkpoint(out: Path, trainer: Trainer, extra: dict[str, Any], best: dict[str, Tensor] | None = None) -> Path:
    """Write a checkpoint of the present step (and the best weights so far), then remove older ones."""
    older = checkpoint_folders(out)
    folder = out / "checkpoints" / f"step-{trainer.step:08d}"
    with disk_watched(f"the checkpoint of step {trainer.step}"), atomic_folder(folder) as temporary:
        save_file(_weights(trainer), temporary / "weights.safetensors")
        save_file(_moments(trainer), temporary / "optimizer.safetensors")
        if best is not None:
            save_file(best, temporary / "best.safetensors")
        state = {"format": FORMAT, "step": trainer.step, "multiplier": trainer.multiplier.state_dict(), **extra}
        _write_state(temporary / "state.json", state)
    for path in older:
        if path != folder:
            shutil.rmtree(path, ignore_errors=True)
    return folder


def load_checkpoint(folder: Path, trainer: Trainer) -> dict[str, Any]:
    """Put the trainer into the checkpoint's state and return what was stored beside it."""
    state = read_record(folder / "state.json", *STATE_KEYS)
    if state.get("format") != FORMAT:
        raise GossamerError(
            f"{folder} is a checkpoint of format {state.get('format')}, and this version reads {FORMAT}."
        )
    load_weights(folder / "weights.safetensors", trainer)
    _load_moments(folder / "optimizer.safetensors", trainer)
    trainer.multiplier.load_state_dict(state["multiplier"])
    trainer.step = int(state["step"])
    best = folder / "best.safetensors"
    return state | {"best": _read_tensors(best) if best.exists() else None}


def load_weights(path: Path, trainer: Trainer) -> None:
    """Read the trainable weights back."""
    stored, present = _read_tensors(path), trainer.student.trainable()
    if {name: w.shape for name, w in stored.items()} != {name: w.shape for name, w in present.items()}:
        raise GossamerError(f"{path} holds other weights than this model trains: it belongs to another run.")
    with torch.no_grad():
        for name, parameter in present.items():
            parameter.copy_(stored[name])


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise GossamerError(
            f"{path} is damaged or missing ({error}), so the run cannot go on from this checkpoint; restore the "
            "file or begin anew in another folder."
        ) from error


def _write_state(path: Path, state: dict[str, Any]) -> None:
    path.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach().contiguous() for name, parameter in trainer.student.trainable().items()}


def _moments(trainer: Trainer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.student.trainable().items():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            tensors[f"{key}/{name}"] = value.detach().contiguous()
    return tensors


def _load_moments(path: Path, trainer: Trainer) -> None:
    parameters = trainer.student.trainable()
    for place, value in _read_tensors(path).items():
        key, _, name = place.partition("/")
        if name not in parameters:
            raise GossamerError(f"{path} holds {place!r}, which this model does not train: it belongs to another run.")
        parameter = parameters[name]
        device = "cpu" if key == "step" and not trainer.optimizer.defaults["fused"] else parameter.device
        trainer.optimizer.state[parameter][key] = value.to(device)
