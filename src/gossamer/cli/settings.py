"""Settings on the command line beyond the options: NAME=VALUE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gossamer.errors import GossamerError


def parsed(settings: Sequence[str], example: str) -> dict[str, Any]:
    """`NAME=VALUE` pairs, each value read as JSON where it is JSON (numbers, true, null), else taken as a word."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise GossamerError(f"--set takes NAME=VALUE, for example --set {example}, not {setting!r}.")
        try:
            values[name.strip()] = json.loads(value)
        except json.JSONDecodeError:
            values[name.strip()] = value
    return values
