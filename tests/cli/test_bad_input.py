"""What a user can get wrong: one sentence on standard error, exit code 2, no traceback, nothing half-written."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gossamer.cli import app
from gossamer.errors import GossamerError

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest


def complaint(outcome: object) -> str:
    """The one sentence, after checking that it is one."""
    code, err = outcome.code, outcome.err  # type: ignore[attr-defined]
    assert code == 2, err
    assert "Traceback" not in err
    lines = [line for line in err.splitlines() if line.strip()]
    assert lines[-1].startswith("error: ")
    assert sum(line.startswith("error: ") for line in lines) == 1
    return lines[-1]


def test_unknown_model_names_the_nearest(gossamer: Call) -> None:
    assert "Did you mean 'bundled/dense'" in complaint(gossamer("models", "bundled/dens"))


def test_unknown_task_names_the_nearest(gossamer: Call) -> None:
    assert "Did you mean 'docstring'" in complaint(gossamer("tasks", "--task", "docstrings"))


def test_folder_without_weights(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    shutil.copy(Path(pair[0]) / "config.json", tmp_path / "config.json")
    assert str(tmp_path) in complaint(gossamer("models", tmp_path))


def test_corrupt_safetensors(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(pair[0], broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "model.safetensors" in complaint(gossamer("generate", broken, "--prompt", "x"))


def test_pickle_with_code(tmp_path: Path, gossamer: Call) -> None:
    import os
    import pickle

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / "final.pth").write_bytes(pickle.dumps({"transformer.wte.weight": Payload()}, protocol=2))
    complaint(gossamer("models", tmp_path / "final.pth"))
    assert not (tmp_path / "executed").exists()


def sparsify(dense: str, text: object, out: Path, *more: object) -> list[object]:
    return ["sparsify", dense, "--text", text, "--out", out, "--steps", 2, "--batch", 2, *more]


@pytest.mark.parametrize("content", ["", "Anna went to the"], ids=["empty", "shorter than one sequence"])
def test_too_little_text(content: str, pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    (tmp_path / "text.txt").write_text(content, encoding="utf-8")
    sentence = complaint(gossamer(*sparsify(pair[0], tmp_path / "text.txt", tmp_path / "run")))
    assert "text" in sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("slack", [0, -0.5, "nan"])
def test_slack_must_be_positive(slack: object, pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    sentence = complaint(gossamer(*sparsify(pair[0], "language", tmp_path / "run", "--slack", slack)))
    assert "slack" in sentence.lower()
    assert not (tmp_path / "run").exists()


def test_encoder_only_model(tmp_path: Path, gossamer: Call) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "bert" in complaint(gossamer("models", tmp_path)).lower()


def test_attention_that_cannot_be_replaced(tmp_path: Path, gossamer: Call) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bloom", "architectures": ["BloomForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "bloom" in complaint(gossamer("models", tmp_path)).lower()


def test_gated_model_cannot_be_sparsified_again(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    assert "dense" in complaint(gossamer(*sparsify(pair[1], "language", tmp_path / "run")))


def test_misspelt_setting(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    wrong = gossamer(*sparsify(pair[0], "language", tmp_path / "run", "--set", "weight_decy=0.1"))
    assert "Did you mean 'weight_decay'" in complaint(wrong)


def test_setting_without_a_value(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    assert "NAME=VALUE" in complaint(gossamer(*sparsify(pair[0], "language", tmp_path / "run", "--set", "clip")))


@pytest.mark.parametrize("left_out", ["MODEL", "--text", "--out"])
def test_sparsify_says_what_is_missing(left_out: str, gossamer: Call) -> None:
    given = {"MODEL": ["bundled/dense"], "--text": ["--text", "self"], "--out": ["--out", "never"]}
    arguments = [word for name, words in given.items() if name != left_out for word in words]
    assert left_out in complaint(gossamer("sparsify", *arguments))


def test_resume_without_a_run(tmp_path: Path, gossamer: Call) -> None:
    assert "no run" in complaint(gossamer("sparsify", "--resume", tmp_path))


def test_resume_keeps_its_settings(tmp_path: Path, gossamer: Call) -> None:
    assert "slack" in complaint(gossamer("sparsify", "--resume", tmp_path, "--slack", 0.5))


def test_unknown_option_and_command(gossamer: Call) -> None:
    assert gossamer("models", "--jsno").code == 2
    assert gossamer("modles").code == 2
    assert "Traceback" not in gossamer("modles").err


def raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def command() -> None:
        raise error

    from gossamer.cli import models

    monkeypatch.setattr(models, "command", command)


def test_debug_shows_a_traceback_wherever_it_stands(gossamer: Call) -> None:
    assert "Traceback" in gossamer("models", "bundled/dens", "--debug").err
    assert "Traceback" in gossamer("--debug", "models", "bundled/dens").err


def test_a_full_disk_is_explained(gossamer: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(OSError(errno.ENOSPC, "No space left on device", "runs/x"), monkeypatch)
    assert "disk is full while writing runs/x" in complaint(gossamer("models"))


def test_a_fault_of_ours_is_owned_up_to(gossamer: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(KeyError("head"), monkeypatch)
    outcome = gossamer("models")
    assert outcome.code == app.BUG
    assert "fault in gossamer" in outcome.err
    assert "Traceback" not in outcome.err


def test_interruption_has_its_own_code(gossamer: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(KeyboardInterrupt(), monkeypatch)
    assert gossamer("models").code == 130


def test_messages_are_not_read_as_markup(gossamer: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    raising(GossamerError("the shape is [2, 3] [bold]and[/bold] so on"), monkeypatch)
    assert "[2, 3] [bold]and[/bold] so on" in complaint(gossamer("models"))


def test_members_of_a_pair_must_share_a_tokenizer(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair[1], other)
    tokenizer = json.loads((other / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "tokenizer" in complaint(gossamer("evaluate", pair[0], other, "--out", tmp_path / "report"))
    assert not (tmp_path / "report").exists()


def test_evaluate_wants_the_dense_model_first(pair: tuple[str, str], gossamer: Call) -> None:
    assert "dense model first" in complaint(gossamer("evaluate", pair[1], pair[0]))


def test_demo_wants_steps(gossamer: Call) -> None:
    assert gossamer("demo", "--steps", 0).code == 2
