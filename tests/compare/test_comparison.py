"""A comparison holds what its parts give on their own, and survives its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import gossamer as gs
from gossamer.attribution.pair import attribute
from gossamer.circuits.smallest import smallest_circuit
from gossamer.compare import QUICK, Comparison, compare
from gossamer.compare.run import clean_prompts
from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json
from gossamer.maps.capture import capture
from gossamer.models import LoadedModel
from gossamer.patterns.change import Limits
from gossamer.patterns.relations import relate
from gossamer.patterns.taxonomy import Thresholds, classify

Models = tuple[LoadedModel, LoadedModel]


def test_the_parts_are_those_of_each_room(pair: Comparison, models: Models) -> None:
    task = gs.tasks.get("ioi", models[0].tokenizer, 6)
    for model, side in zip(models, pair.sides.values(), strict=True):
        maps = capture(model, clean_prompts(task, 5))
        assert maps.ids == side.maps.ids
        np.testing.assert_array_equal(maps.weight, side.maps.weight)
        assert side.report.labels == classify(maps).labels
        assert side.heads.order == smallest_circuit(model, task, random_draws=0).order
    assert pair.circuits is not None
    assert pair.circuits.heads("ioi") == {role: pair.circuit(role) for role in pair.sides}
    np.testing.assert_allclose(pair.relations.of_model(1).pearson, relate(pair.sparse.maps).pearson, atol=1e-12)
    assert pair.statistics.sparse.dead[1, 3]  # the head that was made dead
    assert not pair.statistics.dense.dead.any()


def test_prompts_are_in_the_tasks_order(models: Models) -> None:
    task = gs.tasks.get("copy", models[0].tokenizer, 9)
    found = clean_prompts(task, 4)
    assert found == [models[0].encode(one.clean).tolist() for one in task.pairs[:4]]


def test_the_folder_gives_it_back(pair: Comparison, tmp_path: Path) -> None:
    again = Comparison.load(pair.save(tmp_path / "pair"))
    assert (again.task, again.level, again.prompts) == (pair.task, pair.level, pair.prompts)
    assert again.provenance == pair.provenance
    assert str(again.statistics.statements) == str(pair.statistics.statements)
    for role in pair.sides:
        assert again.circuit(role) == pair.circuit(role)
        np.testing.assert_array_equal(again.sides[role].maps.weight, pair.sides[role].maps.weight)
    np.testing.assert_array_equal(again.relations.spearman, pair.relations.spearman)
    assert again.circuits is not None
    assert pair.circuits is not None
    assert again.circuits.to_dict() == pair.circuits.to_dict()


def test_answers_are_attributed_to_heads(pair: Comparison, models: Models, tmp_path: Path) -> None:
    task = gs.tasks.get("ioi", models[0].tokenizer, 6)
    found = pair.attribution
    assert found is not None
    assert len(found.rows) + len(found.skipped) == 4
    alone = attribute(*models, found.rows[0].prompt, found.rows[0].answer)
    assert found.example.carriers("dense").places == alone.carriers("dense").places
    assert [row.prompt for row in found.rows] == [one.clean for one in task.pairs[:4]]
    again = Comparison.load(pair.save(tmp_path / "pair"))
    assert again.attribution is not None
    assert again.attribution.to_dict() == found.to_dict()


def test_why_answers_were_not_attributed_is_said(models: Models, tmp_path: Path) -> None:
    """In half precision attribution is refused; the rest of the comparison goes on."""
    few = replace(QUICK, prompts=2, maps=2)
    halves = []
    for role, model in zip(("dense", "sparse"), models, strict=True):
        model.save(tmp_path / role)
        halves.append(gs.load(tmp_path / role, dtype="bfloat16"))
    halved = compare(*halves, "ioi", effort=few, force=True)
    assert halved.attribution is None
    assert "too fine for bfloat16" in halved.not_attributed
    assert Comparison.load(halved.save(tmp_path / "pair")).not_attributed == halved.not_attributed
    assert compare(*models, "ioi", effort=replace(few, attributed=0), force=True).attribution is None


def test_another_version_and_a_missing_part_are_refused(pair: Comparison, tmp_path: Path) -> None:
    folder = pair.save(tmp_path / "pair")
    about = read_json(folder / "comparison.json")
    write_json(folder / "comparison.json", about | {"version": 99})
    with pytest.raises(GossamerError, match="version 99"):
        Comparison.load(folder)
    write_json(folder / "comparison.json", about)
    (folder / "statistics.json").unlink()
    with pytest.raises(GossamerError, match=r"statistics\.json"):
        Comparison.load(folder)


@pytest.mark.parametrize(
    "name", ["statistics.json", "dense/patterns.json", "sparse/heads.safetensors", "relations.safetensors"]
)
def test_a_part_that_has_changed_is_refused(name: str, pair: Comparison, tmp_path: Path) -> None:
    """One digit of a number is enough."""
    folder = pair.save(tmp_path / "pair")
    content = bytearray((folder / name).read_bytes())
    digits = [place for place, byte in enumerate(content) if chr(byte) in "12345678"]
    content[digits[len(digits) // 2]] += 1
    (folder / name).write_bytes(content)
    with pytest.raises(GossamerError, match="is not as it was saved"):
        Comparison.load(folder)


def test_a_damaged_page_of_contents_is_refused_in_words(pair: Comparison, tmp_path: Path) -> None:
    path = pair.save(tmp_path / "pair") / "comparison.json"
    about = read_json(path)
    for damaged, message in (
        ([about], "is not a gossamer comparison"),
        ({name: value for name, value in about.items() if name != "level"}, "lacks the field 'level'"),
        (about | {"levl": 0.9}, "unknown field 'levl'.* Did you mean 'level'"),
        (about | {"level": "high"}, "level is damaged"),
        (about | {"has_circuits": 1}, "has_circuits is damaged"),
        (about | {"provenance": None}, "provenance is damaged"),
        (about | {"digests": []}, "digests is damaged"),
    ):
        write_json(path, damaged)
        with pytest.raises(GossamerError, match=message):
            Comparison.load(path.parent)


def test_heads_alone_when_edges_are_not_wanted(models: Models, tmp_path: Path) -> None:
    quick = compare(*models, "ioi", effort=QUICK, force=True, prompts=["Anna and Tom", "When Tom"])
    assert quick.circuits is None
    assert quick.prompts == "2 prompts"
    assert quick.dense.maps.n_prompts == 2
    assert Comparison.load(quick.save(tmp_path / "quick")).circuits is None


def test_thresholds_and_limits_reach_labels_and_statements(models: Models) -> None:
    few = replace(QUICK, prompts=2, maps=2, attributed=0)
    asked = {"thresholds": Thresholds(strong=0.9), "limits": Limits(prompts=2)}
    found = compare(*models, "ioi", effort=few, force=True, **asked)  # type: ignore[arg-type]
    assert found.dense.report.thresholds.strong == found.sparse.report.thresholds.strong == 0.9
    assert found.statistics.limits.prompts == 2
    assert found.statistics.statements[3].answer == "yes"  # one head is dead, and two prompts are enough now


def test_what_cannot_be_compared_is_refused(models: Models) -> None:
    dense, sparse = models
    with pytest.raises(GossamerError, match="dense model first"):
        compare(sparse, sparse, "ioi")
    with pytest.raises(GossamerError, match="cannot do copy"):
        compare(dense, sparse, "copy", effort=QUICK)
    with pytest.raises(GossamerError, match="Did you mean 'copy'"):
        compare(dense, sparse, "cpy")


def test_the_room_is_the_verb(pair: Comparison) -> None:
    assert gs.compare.__wrapped__ is compare  # type: ignore[attr-defined]
    assert gs.compare.Comparison is Comparison
    figure = pair.head_grid(titles=["one", "two"], columns=3)
    assert {"one", "two"} <= {text.get_text() for text in figure.axes[0].texts}
