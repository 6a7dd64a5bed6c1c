"""metrics.jsonl: one line a step or measurement, the same to the last digit however often the run was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import IO, Any

from gossamer.errors import GossamerError
from gossamer.sparsify.state import disk_watched


class MetricsLog:
    """Append-only lines; `size` marks a place to return to."""

    def __init__(self, path: Path, *, keep_bytes: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        present = path.stat().st_size if path.exists() else 0
        if present < keep_bytes:
            raise GossamerError(f"{path} is shorter than its checkpoint says; the run cannot be continued from it.")
        self._stream: IO[bytes] = open(path, "ab")  # noqa: SIM115  (open for the whole run)
        self._stream.truncate(keep_bytes)

    def write(self, record: dict[str, Any]) -> None:
        """Add a line."""
        with disk_watched(self.path.name):
            self._stream.write(json.dumps(record).encode() + b"\n")
            self._stream.flush()

    def size(self) -> int:
        """Bytes written so far, safely on disk."""
        with disk_watched(self.path.name):
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return self.path.stat().st_size

    def close(self) -> None:
        """Nothing more will be written."""
        self._stream.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise GossamerError(f"Line {number} of {path} is not JSON ({error}); the file is damaged.") from error
    return records
