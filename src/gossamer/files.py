"""Files appear whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes the place of `path` if the block succeeds, else vanishes."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.stem}-", suffix=target.suffix, dir=target.parent)
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        os.replace(temporary, target)
        _sync(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; it takes the place of `path` if the block succeeds, else vanishes."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    discarded = temporary.with_name(temporary.name + "-old")
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        for child in temporary.rglob("*"):
            if child.is_file():
                child.chmod(0o666 & ~_umask())  # some writers leave files that only their owner can read
                _sync(child)
        if target.exists():
            os.replace(target, discarded)
        os.replace(temporary, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(discarded, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: str | Path, data: Any) -> None:
    """Write `data` as readable JSON, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: str | Path) -> Any:
    """Read JSON, or say in one sentence why it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise GossamerError(f"{path} could not be read as JSON ({error}); check that the file is complete.") from error


def read_record(path: str | Path, *keys: str) -> dict[str, Any]:
    """Read a JSON object that must have these keys."""
    record = read_json(path)
    if not isinstance(record, dict):
        raise GossamerError(f"{path} holds no JSON object, so it is damaged; copy it again or begin anew elsewhere.")
    for key in keys:
        if key not in record:
            raise GossamerError(f"{path} lacks {key!r}, so it is damaged; copy it again or begin anew elsewhere.")
    return record


def require_folder_name(path: str | Path) -> None:
    """Refuse, before any work is done, a place where no folder can be written."""
    for place in (Path(path), *Path(path).parents):
        if place.exists() and not place.is_dir():
            raise GossamerError(f"{place} is a file; give the name of a folder to write.")


def sweep(folder: Path, stem: str) -> None:
    """Remove what writers of files named like the regular expression `stem` left in `folder` when they were killed."""
    temporary = re.compile(rf"\.(?:{stem})-[a-z0-9_]{{8}}(?:-old)?(?:\.\w+)?")
    for path in folder.glob(".*"):
        if not temporary.fullmatch(path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
