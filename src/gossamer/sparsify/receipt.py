"""The end of a run: the model that is kept, measured as it is saved, and the receipt."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from gossamer import __version__
from gossamer.files import atomic_file, write_json
from gossamer.models import LoadedModel
from gossamer.models.checkpoint import save_model
from gossamer.sparsify.measure import Measurement, measure
from gossamer.sparsify.metrics import read_metrics
from gossamer.sparsify.state import disk_watched

if TYPE_CHECKING:
    from gossamer.sparsify.run import Run


def finish(run: Run) -> tuple[dict[str, Any], LoadedModel]:
    """Choose the weights, put the model together, measure it, and write everything down."""
    run.reopen_gates()
    chosen_step = _choose(run)
    result = run.trainer.student.finished()
    dense = run.dense.hf
    end = measure(result.hf, run.held_out, batch=run.config.batch, teacher=dense)
    report = _report(run, end, chosen_step)
    if run.processes.is_main:
        with disk_watched("the trained model"):
            save_model(result, run.out / "model")
            write_picture(run.out)
            write_json(run.out / "report.json", report)
    run.processes.wait()
    return report, result


def write_picture(out: Path) -> None:
    """OUT/training.png."""
    import matplotlib.pyplot as plt

    from gossamer.figures.training import training

    figure = training(read_metrics(out / "metrics.jsonl"))
    with atomic_file(out / "training.png") as temporary:
        figure.savefig(temporary)
    plt.close(figure)


def _choose(run: Run) -> int:
    """Put the weights in place that the run is to end with, and say of which step they are."""
    if run.best is None or run.config.choose == "last":
        return run.trainer.step
    with torch.no_grad():
        for name, parameter in run.trainer.student.trainable().items():
            parameter.copy_(run.best[name])
    return int(run.best_measurement["step"])


def _report(run: Run, end: Measurement, chosen_step: int) -> dict[str, Any]:
    config, trainer = run.config, run.trainer
    return {
        "source": run.dense.name,
        "gate": None if config.control else config.gate,
        "control": config.control,
        "dense": {"loss": trainer.dense_loss},
        "start": run.calibration,
        "end": end.to_dict() | {"cost": end.loss - trainer.dense_loss},
        "gates": None if config.control else "deterministic",
        "constraint": None if config.control else _constraint(run, end),
        "step": chosen_step,
        "steps": config.steps,
        "tokens": trainer.step * config.tokens_per_step,
        "held_out": {"sequences": len(run.held_out), "length": run.held_out.length},
        "seed": config.seed,
        "config": config.to_dict(),
        "config_digest": config.digest(),
        "wall_seconds": run.watch.total(),
        "processes": run.processes.count,
        "threads": torch.get_num_threads(),
        "versions": {
            "gossamer": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def _constraint(run: Run, end: Measurement) -> dict[str, Any]:
    value = end.divergence if run.config.constraint == "kl" else end.loss
    return {
        "kind": run.config.constraint,
        "slack": run.config.slack,
        "target": run.config.objective().target(run.trainer.dense_loss),
        "value": value,
        "met": run.meets_constraint(end),
    }
