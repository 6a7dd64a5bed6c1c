"""Thresholds and limits by name, as a command line or a file gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gossamer.errors import GossamerError, nearest
from gossamer.patterns.statements import Limits
from gossamer.patterns.taxonomy import Thresholds


def thresholds_and_limits(values: Mapping[str, Any]) -> tuple[Thresholds, Limits]:
    """Those of the taxonomy and those of the statements, with some numbers changed; their names do not overlap."""
    known = {part.name: kind for kind in (Thresholds, Limits) for part in fields(kind)}
    for name, value in values.items():
        if name not in known:
            raise GossamerError(
                f"There is no threshold {name!r}; the thresholds are {', '.join(known)}.{nearest(name, known)}"
            )
        whole = isinstance(getattr(known[name](), name), int)
        if not _is_number(value) or (whole and not isinstance(value, int)):
            raise GossamerError(f"The threshold {name} is {'a whole' if whole else 'a'} number from 0, not {value!r}.")
    chosen = [{name: value for name, value in values.items() if known[name] is kind} for kind in (Thresholds, Limits)]
    return Thresholds(**chosen[0]), Limits(**chosen[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
