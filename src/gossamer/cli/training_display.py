"""What a sparsification run looks like while it runs: a live panel in a terminal, one line a measurement elsewhere.

Import it on demand only: unlike the rest of this room it loads torch.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from gossamer.cli.console import err, percent
from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.measure import Measurement
from gossamer.sparsify.observer import Observer, Pace
from gossamer.sparsify.schedule import SlackSchedule
from gossamer.sparsify.trainer import StepRecord


class TrainingDisplay(Observer):
    """Shows a run on standard error; use it as a context manager around the run."""

    def __init__(self) -> None:
        bar = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), MofNCompleteColumn())
        self._progress = Progress(*bar, console=err, expand=True)
        self._steps = self._progress.add_task("starting", total=None)
        self._live = Live(self._progress, console=err, refresh_per_second=4, transient=True)
        self._dense_loss: float | None = None
        self._control = False
        self._slacks: SlackSchedule | None = None
        self.numbers: dict[str, str] = {}

    def __enter__(self) -> Self:
        if err.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def says(self, message: str) -> None:
        """A stage of the work."""
        self._progress.update(self._steps, description=message)
        err.print(f"[dim]{escape(message)}[/]")

    def starts(self, config: SparsifyConfig, *, step: int, dense_loss: float) -> None:
        """Training begins."""
        self._dense_loss, self._control = dense_loss, config.control
        self._slacks = None if config.control else config.slacks()
        what = "training the dense control" if config.control else "sparsifying"
        self._progress.update(self._steps, description=what, total=config.steps, completed=step)
        again = f", going on after step {step}" if step else ""
        length = f"{config.steps} steps of {config.tokens_per_step:,} tokens"
        err.print(f"[dim]{length}; dense loss {dense_loss:.4f}{again}[/]")

    def stepped(self, record: StepRecord, pace: Pace) -> None:
        """A step is done."""
        self._progress.update(self._steps, completed=record.step)
        self.numbers |= {
            "loss": f"{record.loss:.4f}",
            "tokens/s": f"{pace.tokens_per_second:,.0f}",
            "left": _clock(pace.seconds_left),
        }
        if self._slacks is not None:
            self.numbers["slack"] = f"{self._slacks.slack(record.step - 1):.4g}"
        if record.violation_average is not None and record.target is not None and record.multiplier is not None:
            self.numbers |= {
                "open, sampled": percent(record.open_share, digits=2),
                "target": f"{record.target:.4f}",
                "over target": f"{record.violation_average:+.4f}",
                "multiplier": f"{record.multiplier:.3g}",
                "noise": f"{record.tau:.2f}",
            }
        self._live.update(Group(self._progress, self._grid()))

    def measured(self, step: int, measurement: Measurement) -> None:
        """The deterministic model was measured."""
        sentence = f"step {step}: held-out loss {measurement.loss:.4f}"
        if self._dense_loss is not None:
            sentence += f" ({measurement.loss - self._dense_loss:+.4f})"
        if measurement.density is not None:
            share = percent(measurement.density.of_causal_pairs, digits=2)
            sentence += f", open {share} of causal pairs, {measurement.density.per_token:.1f} edges a token"
            self.numbers["open"] = share
        err.print(sentence)

    def saved(self, step: int, folder: Path) -> None:
        """A checkpoint was written."""
        self.numbers["checkpoint"] = f"step {step}"

    def _grid(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_row(*(f"[dim]{name}[/]" for name in self.numbers))
        grid.add_row(*self.numbers.values())
        return grid


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
