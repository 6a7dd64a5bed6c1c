"""`gossamer circuits` on a tiny random pair: everything it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import gossamer as gs
from gossamer.circuits.compare import _Search
from gossamer.circuits.comparison import Comparison
from gossamer.circuits.smallest import HeadCircuits

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest


@pytest.fixture(scope="module")
def task_file(tmp_path_factory: pytest.TempPathFactory, pair: tuple[str, str]) -> Path:
    path = tmp_path_factory.mktemp("tasks") / "mine.jsonl"
    pairs = gs.tasks.get("ioi", gs.load(pair[0]).tokenizer, 4).pairs
    rows = [{"clean": p.clean, "corrupt": p.corrupt, "answers": list(p.answers), "wrong": list(p.wrong)} for p in pairs]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_circuits_of_a_pair(pair: tuple[str, str], task_file: Path, gossamer: Call, tmp_path: Path) -> None:
    tasks = ["--task", "copy", "--task-file", task_file]
    done = gossamer("circuits", *pair, *tasks, "--n", 4, "--force", "--out", tmp_path, "--json")
    assert done.code == 0, done.err
    printed = json.loads(done.out)
    assert [task["task"] for task in printed["tasks"]] == ["copy", "mine"]
    assert {row["task"] for row in printed["table"]} == {"copy", "mine", "over all"}
    assert {row["unit"] for row in printed["table"]} >= {"heads", "edges", "edges at heads", "attention edges a prompt"}
    assert printed["tasks"][0]["rules"]["edges"]["ranking"].startswith("|score|")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("circuits.safetensors", "circuits.json", "table.md"),
        *(f"{task}.{suffix}" for task in ("copy", "mine") for suffix in ("png", "svg")),
    }
    found = Comparison.load(tmp_path / "circuits.safetensors")
    assert json.loads((tmp_path / "circuits.json").read_text("utf-8")) == json.loads(json.dumps(found.to_dict()))
    assert set(found.heads("mine")) == {"dense", "sparse"}
    size = found.on("copy").dense.edges.curve.smallest(0.9)
    assert len(found.edges("copy")["dense"]) == (size or 0)
    assert "explained effect: (m(circuit)" in (tmp_path / "table.md").read_text("utf-8")
    with pytest.raises(gs.GossamerError, match="Did you mean 'mine'"):
        found.on("min")


def test_heads_of_one_model(pair: tuple[str, str], task_file: Path, gossamer: Call, tmp_path: Path) -> None:
    done = gossamer(
        "circuits", pair[1], "--task-file", task_file, "--force", "--batch", 6, "--ablation", "mean", "--out", tmp_path
    )
    assert done.code == 0, done.err
    assert "mine: smallest circuits" in done.out
    assert "replaced by their mean" in " ".join(done.out.split())
    assert "leading heads, effect: L" in done.out
    assert {path.name for path in tmp_path.iterdir()} == {f"mine.{s}" for s in ("safetensors", "json", "png", "svg")}
    found = HeadCircuits.load(tmp_path / "mine.safetensors")
    written = json.loads((tmp_path / "mine.json").read_text("utf-8"))
    assert written["sizes"]["heads"]["0.9"] == found.curve.smallest(0.9)
    assert written["gates flipped by restarts"][1] > 0
    refused = gossamer("circuits", pair[0], "--batch", "many")
    assert refused.code == 2
    assert "a number of rows or 'auto'" in refused.err


def test_another_level_is_in_tables_and_files(pair: tuple[str, str], task_file: Path, gossamer: Call) -> None:
    one = json.loads(gossamer("circuits", pair[1], "--task-file", task_file, "--force", "--level", 0.7, "--json").out)
    assert "0.7" in one["mine"]["heads"]
    assert (one["mine"]["level"], one["mine"]["prompts"]) == (0.7, 4)
    arguments = ["--task-file", task_file, "--n", 2, "--force", "--level", 0.7]
    both = json.loads(gossamer("circuits", *pair, *arguments, "--json").out)
    assert {row["level"] for row in both["table"]} == {0.5, 0.7, 0.8, 0.9, 0.95}
    assert both["tasks"][0]["prompts"] == 2


def test_misspelt_names_and_idle_options_are_refused_at_once(
    pair: tuple[str, str], task_file: Path, gossamer: Call
) -> None:
    for arguments, complaint in (
        ([*pair, "--task", "cpoy", "--task-file", task_file, "--force"], "Did you mean 'copy'"),
        ([pair[1], "--task", "cpoy", "--task-file", task_file, "--force"], "Did you mean 'copy'"),
        ([pair[1], "--task-file", task_file, "--steps", 7], "--steps is for circuits of edges"),
        ([pair[1], "--corrupt-column", "corrupted_hard"], "--corrupt-column names a column of --task-file"),
        ([pair[1], *("--task", "copy", "--out", task_file)], "cannot be a folder for results"),
        ([pair[1], *("--task", "copy", "--out", task_file / "below")], "cannot be a folder for results"),
        (["nowhere", *("--task", "copy", "--out", task_file)], "cannot be a folder for results"),  # before it loads
        ([pair[1], pair[0], "--task-file", task_file], "give the dense model first"),
    ):
        refused = gossamer("circuits", *arguments)
        assert refused.code == 2
        assert complaint in " ".join(refused.err.split())


def test_tasks_given_twice(pair: tuple[str, str], task_file: Path, gossamer: Call, tmp_path: Path) -> None:
    """A name twice means it once; a file of the same name would take its place on disk."""
    arguments = ["--task", "copy", "--task", "copy", "--n", 2, "--force", "--json"]
    assert list(json.loads(gossamer("circuits", pair[0], *arguments).out)) == ["copy"]
    file = tmp_path / "ioi.jsonl"
    file.write_bytes(task_file.read_bytes())
    for named in ("ioi", "all"):
        refused = gossamer("circuits", pair[0], "--task", named, "--task-file", file)
        assert refused.code == 2
        assert "would be a second task named ioi; rename the file" in " ".join(refused.err.split())


def test_what_was_found_is_on_disk_when_a_later_task_fails(
    pair: tuple[str, str], task_file: Path, gossamer: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = _Search.both

    def stopped(self: _Search, dense: object, sparse: object, task: gs.tasks.Task, share: float) -> object:
        if task.name == "mine":
            raise KeyboardInterrupt
        return both(self, dense, sparse, task, share)  # type: ignore[arg-type]

    monkeypatch.setattr(_Search, "both", stopped)
    arguments = ["--task", "copy", "--task-file", task_file, "--n", 2, "--force"]
    assert gossamer("circuits", *pair, *arguments, "--out", tmp_path / "out").code != 0
    found = Comparison.load(tmp_path / "out" / "circuits.safetensors")
    assert [task.task for task in found.tasks] == ["copy"]
    assert (tmp_path / "out" / "table.md").is_file()


def test_what_is_computed_is_printed(pair: tuple[str, str], task_file: Path, gossamer: Call) -> None:
    arguments = ["--task-file", task_file, "--n", 4, "--force"]
    one = " ".join(gossamer("circuits", pair[1], *arguments).out.split())
    both = " ".join(gossamer("circuits", *pair, *arguments).out.split())
    for printed in (one, both):
        assert "areas of heads: CPR" in printed
        assert "in restarted runs" in printed
    assert "mine, sparse: heads for 90%" in both
    assert "head grid of these circuits: gossamer compare" in both
    assert "gossamer figure head-grid patterns --heads L" in one


def test_one_model_leaves_out_what_it_cannot_do(
    pair: tuple[str, str], task_file: Path, gossamer: Call, tmp_path: Path
) -> None:
    """The random model is right on some of its prompts, whichever the right answer is said to be."""
    model = gs.load(pair[0])
    able = gs.tasks.task_from_file(task_file, model.tokenizer)
    rows = [json.loads(line) for line in task_file.read_text("utf-8").splitlines()]
    for row, batch in zip(rows, [model.logits(model.encode(pair.clean))[0, -1] for pair in able.pairs], strict=True):
        names = sorted(row["answers"] + row["wrong"], key=lambda name: -float(batch[model.encode(name)[-1]]))
        row["answers"], row["wrong"] = names[:1], names[1:]
    (tmp_path / "easy.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out = tmp_path / "out"
    done = gossamer("circuits", pair[0], "--task", "copy", "--task-file", tmp_path / "easy.jsonl", "--out", out)
    assert done.code == 0, done.err
    assert "Left out:" in done.err
    assert "cannot do copy" in " ".join(done.err.split())
    assert {path.stem for path in out.iterdir()} == {"easy"}


def test_a_task_that_the_dense_model_cannot_do_is_refused(pair: tuple[str, str], gossamer: Call) -> None:
    refused = gossamer("circuits", *pair, "--task", "copy", "--n", 8)
    assert refused.code == 2
    assert "cannot do copy: its accuracy is 0.0% on 8 prompts" in " ".join(refused.err.split())


def test_a_bad_task_file_is_named(pair: tuple[str, str], gossamer: Call, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text(
        "clean,corrupted,correct_idx,incorrect_idx\nWhen,When Tom,1,2\n", encoding="utf-8"
    )
    refused = gossamer("circuits", *pair, "--task-file", tmp_path / "bad.csv")
    assert refused.code == 2
    assert "row 1: the clean prompt has" in " ".join(refused.err.split())


def test_pictures_are_drawn_again_from_what_was_written(
    pair: tuple[str, str], task_file: Path, gossamer: Call, tmp_path: Path
) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    arguments = ["--task-file", task_file, "--n", 2, "--force"]
    assert gossamer("circuits", *pair, *arguments, "--out", both).code == 0
    assert gossamer("circuits", pair[0], *arguments, "--out", one).code == 0
    assert gossamer("figure", "list", both).out.split() == ["mine"]
    for name, result in (("mine", both), ("heads", one / "mine.safetensors")):
        done = gossamer("figure", name, result, "--out", tmp_path / f"{name}.svg")
        assert done.code == 0, done.err
        assert "explained effect" in (tmp_path / f"{name}.svg").read_text("utf-8")
    refused = gossamer("figure", "mine", both, "--heads", "L0H0")
    assert "no use for a choice of heads" in " ".join(refused.err.split())
