"""Checkpoints of a training run, as safetensors and JSON; each a folder that appears in one rename."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gossamer.errors import GossamerError
from gossamer.files import atomic_folder, read_json, write_json
from gossamer.transcoders.trainer import Trainer

FORMAT = 1


def latest_checkpoint(out: Path) -> Path | None:
    """The run's newest complete checkpoint, if there is one."""
    folders = sorted(path for path in (out / "checkpoints").glob("step-*") if (path / "state.json").exists())
    return folders[-1] if folders else None


def save_checkpoint(out: Path, trainer: Trainer) -> Path:
    """Write the present state, then remove older checkpoints."""
    folder = out / "checkpoints" / f"step-{trainer.step:08d}"
    with atomic_folder(folder) as temporary:
        save_file(_tensors(trainer), temporary / "tensors.safetensors")
        write_json(temporary / "state.json", {"format": FORMAT, "step": trainer.step})
    for other in (out / "checkpoints").glob("step-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    return folder


@torch.no_grad()
def load_checkpoint(folder: Path, trainer: Trainer) -> None:
    """Put the trainer into the checkpoint's state."""
    state = read_json(folder / "state.json")
    if state.get("format") != FORMAT:
        raise GossamerError(
            f"{folder} is a checkpoint of format {state.get('format')}, and this version reads {FORMAT}."
        )
    tensors = load_file(folder / "tensors.safetensors")
    trainer.step = int(state["step"])
    trainer.last_active_LF.copy_(tensors["last_active"])
    trainer.controller.level_L = tensors["level"].to(trainer.last_active_LF.device)
    for name, parameter in trainer.parameters.items():
        parameter.copy_(tensors[f"weights/{name}"])
        moments = {key: tensors[f"{key}/{name}"].to(parameter.device) for key in ("step", "exp_avg", "exp_avg_sq")}
        trainer.optimizer.state[parameter] = moments


def _tensors(trainer: Trainer) -> dict[str, Tensor]:
    tensors = {"last_active": trainer.last_active_LF, "level": trainer.controller.level_L}
    for name, parameter in trainer.parameters.items():
        tensors[f"weights/{name}"] = parameter.detach()
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"{key}/{name}"] = value
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
