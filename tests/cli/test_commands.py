from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import gossamer as gs
from gossamer.cli import sparsify as sparsify_command
from gossamer.cli.app import COMMANDS, build
from gossamer.corpus import language
from gossamer.models.load import BUNDLED_FOLDER

Call = Callable[..., "Outcome"]  # noqa: F821 - of conftest


def test_version(gossamer: Call) -> None:
    assert gossamer("--version").out == f"gossamer {gs.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_parses(name: str, gossamer: Call) -> None:
    import shlex
    from importlib import import_module

    example = import_module(f"gossamer.cli.{name}").EXAMPLE
    shown = gossamer(name, "--help")
    assert shown.code == 0
    assert " ".join(example.split()) in " ".join(shown.out.split())
    program, command, *arguments = shlex.split(example)
    assert (program, command) == ("gossamer", name)
    get_command(build()).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def test_help_lists_every_command(gossamer: Call) -> None:
    shown = gossamer("--help").out
    assert [name for name in COMMANDS if f" {name} " in shown] == list(COMMANDS)


def test_models_lists_what_can_be_loaded(gossamer: Call) -> None:
    listed = gossamer("models").out
    assert all(name in listed for name in gs.models.NAMES)
    assert {entry["name"] for entry in json.loads(gossamer("models", "--json").out)} == set(gs.models.NAMES)


def test_models_describes_a_pair(pair: tuple[str, str], gossamer: Call) -> None:
    dense, sparse = json.loads(gossamer("models", *pair, "--json").out)
    assert (dense["layers"], dense["heads"], dense["gate"]) == (2, 2, None)
    assert sparse["gate"] == "logit"
    assert sparse["parameters"] == dense["parameters"] + 4  # one offset a head
    assert "2" in gossamer("models", *pair).out


def nanogpt_file(name: str, path: Path) -> Path:
    """A model's weights as nanoGPT saves them: transposed, and silent about the number of heads."""
    transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    state = gs.load(name).hf.state_dict()
    torch.save({key: w.T.contiguous() if key.endswith(transposed) else w for key, w in state.items()}, path)
    return path


def test_models_turns_foreign_weights_into_a_folder(tmp_path: Path, gossamer: Call) -> None:
    weights, text = nanogpt_file("bundled/dense", tmp_path / "final.pth"), tmp_path / "text.txt"
    text.write_text(language.document(5, 0), encoding="utf-8")
    wrong = gossamer("models", weights)
    assert wrong.code == 2
    assert "--heads" in wrong.err
    told = ["--heads", 12, "--activation", "gelu_new", "--tokenizer", BUNDLED_FOLDER / "dense", "--prove-on", text]
    done = gossamer("models", weights, *told, "--save", tmp_path / "folder")
    assert done.code == 0, done.err
    assert "as a language model should" in " ".join(done.err.split())
    saved, source = gs.load(tmp_path / "folder"), gs.load("bundled/dense")
    prompt = source.encode("When Anna and Tom went to the")
    torch.testing.assert_close(saved.logits(prompt), source.logits(prompt), rtol=0, atol=1e-4)
    assert torch.equal(saved.encode("Anna went"), source.encode("Anna went"))


def test_a_model_that_does_not_predict_is_not_saved(tmp_path: Path, pair: tuple[str, str], gossamer: Call) -> None:
    weights = nanogpt_file(pair[0], tmp_path / "final.pth")  # random weights
    done = gossamer("models", weights, "--heads", 2, "--tokenizer", pair[0], "--save", tmp_path / "folder")
    assert done.code == 2
    assert "was not read rightly" in done.err
    assert not (tmp_path / "folder").exists()


def test_options_of_an_import_need_one_file(pair: tuple[str, str], gossamer: Call) -> None:
    assert "which one model" in gossamer("models", "--heads", 2).err
    assert "which one model" in gossamer("models", *pair, "--heads", 2).err
    assert "no file of weights" in gossamer("models", pair[0], "--heads", 2).err


def test_tasks_lists_examples_without_a_model(gossamer: Call) -> None:
    shown = gossamer("tasks").out
    assert all(f"{name}: " in shown for name in gs.tasks.NAMES)


def test_tasks_measures_models(pair: tuple[str, str], gossamer: Call) -> None:
    done = gossamer("tasks", *pair, "--task", "ioi", "--n", 40, "--json")
    results = json.loads(done.out)["results"]
    assert [result["model"] for result in results] == list(pair)
    model = gs.load(pair[0])
    expected = gs.tasks.accuracy(model.hf, gs.tasks.get("ioi", model.tokenizer, 40))
    assert results[0]["accuracy"] == expected
    assert 0 < expected < 1
    assert "ioi" in gossamer("tasks", *pair, "--task", "ioi", "--n", 40).out


def test_generate_shows_every_model(pair: tuple[str, str], gossamer: Call) -> None:
    done = gossamer("generate", *pair, "--prompt", "When Anna", "--tokens", 5, "--json")
    texts = json.loads(done.out)["continuations"]
    assert list(texts) == list(pair)
    assert texts[pair[0]] == "".join(gs.load(pair[0]).generate("When Anna", max_tokens=5))
    plain = gossamer("generate", *pair, "--prompt", "When Anna", "--tokens", 5).out
    assert all(f"When Anna{text}" in plain for text in texts.values())


def run_arguments(dense: str, out: Path) -> list[object]:
    small = ["--steps", 4, "--batch", 4, "--length", 16, "--set", "evaluate_every=2", "--set", "held_out=4"]
    return ["sparsify", dense, "--text", "language", "--out", out, *small]


def test_sparsify_writes_a_model_and_a_receipt(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    done = gossamer(*run_arguments(pair[0], tmp_path / "run"), "--json")
    assert done.code == 0, done.err
    receipt = json.loads(done.out)
    assert receipt["steps"] == 4
    assert receipt["config"]["length"] == 16
    assert gs.load(tmp_path / "run" / "model").is_sparse
    again = gossamer("sparsify", "--resume", tmp_path / "run")  # already complete: shows the receipt
    assert again.code == 0, again.err
    assert "open ÷ causal pairs" in again.out


def test_sparsify_trains_a_control(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    done = gossamer(*run_arguments(pair[0], tmp_path / "control"), "--control")
    assert done.code == 0, done.err
    assert "control" in done.out
    assert not gs.load(tmp_path / "control" / "model").is_sparse


def test_the_defaults_in_the_help_are_those_of_the_settings() -> None:
    defaults = {field.name: str(field.default) for field in dataclasses.fields(gs.SparsifyConfig)}
    assert {name: defaults[name] for name in sparsify_command.DEFAULTS} == sparsify_command.DEFAULTS


def test_evaluate_shows_every_part_and_writes_a_page(pair: tuple[str, str], tmp_path: Path, gossamer: Call) -> None:
    small = ["--sequences", 2, "--prompts", 4, "--length", 32, "--quick"]
    done = gossamer("evaluate", *pair, "--control", pair[0], *small, "--out", tmp_path / "report")
    assert done.code == 0, done.err
    for expected in (
        "over the control",
        "heads that are never open",
        "Without training",
        "Edges that flip",
        "ioi",
    ):
        assert expected in done.out
    report = gs.SparsityReport.load(tmp_path / "report" / "report.json")
    assert report.has("control")
    assert f"{report.score('sparse').loss.value:.4f}" in (tmp_path / "report" / "index.html").read_text("utf-8")


def test_a_pipe_gets_every_piece_as_it_is_made(
    pair: tuple[str, str], gossamer: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from gossamer.cli import generate

    shown: list[str] = []

    def pieces(*_: object, **__: object) -> Iterator[str]:
        for piece in ("one", " two"):
            yield piece
            shown.append(capfd.readouterr().out)

    monkeypatch.setattr(generate, "stream", pieces)
    gossamer("generate", pair[0], "--prompt", "When ")
    assert shown == [f"{pair[0]}:\nWhen one", " two"]


def test_evaluate_takes_the_language_by_name(pair: tuple[str, str], gossamer: Call) -> None:
    small = ["--sequences", 2, "--prompts", 4, "--length", 32, "--quick", "--json"]
    named, silent = gossamer("evaluate", *pair, *small, "--text", "language"), gossamer("evaluate", *pair, *small)
    assert json.loads(named.out)["scores"] == json.loads(silent.out)["scores"]


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.cli.loading import AUTO, chosen_device

    for there, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr("torch.cuda.is_available", lambda there=there: there)
        assert chosen_device(AUTO) == device
        assert chosen_device("cpu") == "cpu"


def test_the_display_shows_the_slack_beside_loss_and_target() -> None:
    from gossamer.cli.training_display import TrainingDisplay
    from gossamer.sparsify import Pace, StepRecord

    display = TrainingDisplay()
    display.starts(gs.SparsifyConfig(steps=4, length=8, slack=0.01, slack_start=0.05, aim=1.0), step=0, dense_loss=1.0)
    record = StepRecord(1, 1.02, 1.05, -0.03, -0.03, 1.0, 0.2, 0.2, None, 0.3, 1.0, 0.5)
    display.stepped(record, Pace(100.0, 3.0, 0.1))
    assert (display.numbers["loss"], display.numbers["target"], display.numbers["slack"]) == (
        "1.0200",
        "1.0500",
        "0.05",
    )
    display.stepped(dataclasses.replace(record, step=4), Pace(100.0, 3.0, 0.1))
    assert display.numbers["slack"] == "0.01"
