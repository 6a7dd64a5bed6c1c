from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.errors import GossamerError
from gossamer.evaluate import SparsityReport
from gossamer.files import write_json


def test_round_trip(report: SparsityReport, tmp_path: Path) -> None:
    assert SparsityReport.load(report.save(tmp_path / "report.json")) == report


def unknown_field(data: dict[str, Any]) -> None:
    data["scores"][0]["densities"] = 1


def other_version(data: dict[str, Any]) -> None:
    data["version"] = 2


def other_format(data: dict[str, Any]) -> None:
    del data["format"]


def missing_field(data: dict[str, Any]) -> None:
    del data["heads"][1]["carried"]


def wrong_type(data: dict[str, Any]) -> None:
    data["tasks"][0]["prompts"] = "many"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (unknown_field, r"scores\[0\] has the unknown field 'densities'. Did you mean 'density'"),
        (other_version, "version 2"),
        (other_format, "not a sparsity report"),
        (missing_field, r"heads\[1\] lacks the field 'carried'"),
        (wrong_type, r"tasks\[0\].prompts should be int"),
    ],
)
def test_what_is_not_understood_is_refused(
    report: SparsityReport, tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    data = copy.deepcopy(report.to_dict())
    change(data)
    write_json(tmp_path / "report.json", data)
    with pytest.raises(GossamerError, match=message):
        SparsityReport.load(tmp_path / "report.json")


def test_an_unknown_role_or_task_is_named(report: SparsityReport) -> None:
    with pytest.raises(GossamerError, match="only for dense, sparse, control"):
        report.score("spares")
    with pytest.raises(GossamerError, match="'swimming'"):
        report.task("swimming", "dense")
