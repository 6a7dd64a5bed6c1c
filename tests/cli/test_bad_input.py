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


@pytest.mark.parametrize(
    "setting", ["control=no", "batch=two", "batch=1.5", "slack=abc", "clip=[1]", "bf16=yes", "gate_offset=hello"]
)
def test_settings_of_a_wrong_kind(setting: str, pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    sentence = complaint(
        gossamer("sparsify", pair[0], "--text", "language", "--out", tmp_path / "run", "--set", setting)
    )
    assert setting.split("=")[0] in sentence
    assert not (tmp_path / "run").exists()


def test_negative_seeds(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    assert "seed" in complaint(gossamer(*sparsify(pair[0], "language", tmp_path / "run", "--seed", -1)))
    assert gossamer("evaluate", *pair, "--seed", -1).code == 2


@pytest.mark.parametrize("slack", [0, "nan", "inf"])
def test_evaluate_wants_a_slack(slack: object, pair: tuple[str, str], gossamer: Call) -> None:
    assert "slack" in complaint(gossamer("evaluate", *pair, "--slack", slack))


def never_loaded(*_: object, **__: object) -> None:
    pytest.fail("a model was loaded before a mistake was noticed")


@pytest.mark.parametrize(
    "command",
    [["evaluate", "bundled/dense", "bundled/sparse"], ["demo"], sparsify("bundled/dense", "language", Path("never"))],
    ids=["evaluate", "demo", "sparsify"],
)
def test_a_file_where_a_folder_is_to_be_written(
    command: list[object], tmp_path: Path, gossamer: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.models.load", never_loaded)
    (tmp_path / "file").write_text("mine")
    assert "is a file; give the name of a folder" in complaint(gossamer(*command, "--out", tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"


def test_other_text_that_is_not_there_is_noticed_before_the_work(
    pair: tuple[str, str], gossamer: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossamer.evaluate.evaluation.losses_on", never_loaded)
    sentence = complaint(gossamer("evaluate", *pair, "--sequences", 2, "--other-text", "nope.txt"))
    assert "no text at nope.txt" in sentence


@pytest.mark.parametrize("given", [["--text", "self"], ["--out", "elsewhere"], ["--device", "cpu"]])
def test_resume_ignores_nothing_in_silence(given: list[str], tmp_path: Path, gossamer: Call) -> None:
    sentence = complaint(gossamer("sparsify", "--resume", tmp_path, *given))
    assert f"leave out {given[0].removeprefix('--')}" in sentence


def test_a_device_that_is_not_there(pair: tuple[str, str], gossamer: Call) -> None:
    assert "'warp'" in complaint(gossamer("generate", pair[0], "--prompt", "x", "--device", "warp"))


@pytest.mark.parametrize("temperature", ["inf", "nan"])
def test_temperatures_without_a_meaning(temperature: str, pair: tuple[str, str], gossamer: Call) -> None:
    complaint(gossamer("generate", pair[0], "--prompt", "x", "--temperature", temperature))


def test_a_config_of_other_sizes(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair[0], other)
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"n_embd": 24}), encoding="utf-8")
    assert "another shape than its config says for the weight 'transformer.h.0" in complaint(gossamer("models", other))


def test_members_of_a_pair_must_have_the_same_anatomy(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair[1], other)
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"n_head": 1}), encoding="utf-8")
    assert gossamer("evaluate", pair[0], other).code == 2  # as many offsets as heads
    assert "differ in n_layers" in complaint(gossamer("evaluate", "bundled/dense", pair[1]))
