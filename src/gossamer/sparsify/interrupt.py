"""Ctrl-C and SIGTERM: finish the step, write a checkpoint, say how to go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from gossamer.errors import GossamerError


class Interrupted(GossamerError):  # noqa: N818  (nothing went wrong)
    """The run was asked to stop and did, with a checkpoint."""


@dataclass
class StopRequest:
    """Whether somebody asked the run to stop."""

    requested: bool = False


@contextmanager
def graceful_stop() -> Iterator[StopRequest]:
    """The first signal is noted and left to the run; a second one acts at once, as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        request.requested = True
        _restore()

    def _restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    try:
        yield request
    finally:
        _restore()
