"""Measurements of models side by side, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.cli.console import percent
from gossamer.cli.report import TableData

_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "cross-entropy", "{:.4f}".format),
    ("cost", "over dense", "{:+.4f}".format),
    ("divergence", "KL from dense", "{:.4f}".format),
    ("open_of_causal_pairs", "open ÷ causal pairs", lambda share: percent(share, digits=2)),
    ("open_of_document_pairs", "open ÷ document pairs", lambda share: percent(share, digits=2)),
    ("open_per_query_and_head", "open a query and head", "{:.3f}".format),
    ("open_per_token", "open a token", "{:.1f}".format),
)


def measurement_table(title: str, measured: Mapping[str, Mapping[str, Any]]) -> TableData:
    """Loss, divergence and the four densities down, models across; what nobody has is left out."""
    rows = [
        [label, *("–" if part.get(key) is None else show(part[key]) for part in measured.values())]
        for key, label, show in _ROWS
        if any(part.get(key) is not None for part in measured.values())
    ]
    return TableData(title, ["", *measured], rows)
