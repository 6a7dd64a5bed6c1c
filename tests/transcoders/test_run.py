"""Runs on disk: stopped anywhere and gone on with, they end the same; caches hold what they should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import gossamer.transcoders.run as run_module
from gossamer.corpus.sequences import Sequences
from gossamer.errors import GossamerError
from gossamer.transcoders import Cache, TranscoderConfig, load, mlp_activity, train
from gossamer.transcoders.cache import GIB, CachedActivations, fill_cache
from gossamer.transcoders.pace import steps_within
from gossamer.transcoders.trainer import Trainer

CONFIG = TranscoderConfig(
    n_features=16, target_l0=4, steps=11, batch=4, checkpoint_every=3, learning_rate=5e-3, dead_after=2
)


class Stopped(BaseException):
    """Stands for a killed process: nothing catches it."""


def stop_after(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, calls: int) -> None:
    original, count = getattr(owner, name), [0]

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        result = original(*args, **kwargs)
        count[0] += 1
        if count[0] == calls:
            raise Stopped
        return result

    monkeypatch.setattr(owner, name, counted)


def contents(out: Path) -> dict[str, bytes]:
    """The files of a finished run that must not depend on interruptions."""
    names = ("transcoders/transcoders.safetensors", "transcoders/transcoders.json", "metrics.jsonl", "report.json")
    return {name: (out / name).read_bytes() for name in names}


@pytest.fixture(scope="module")
def finished(relu_model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    run_module.RECORD_EVERY = 2
    out = tmp_path_factory.mktemp("whole")
    train(relu_model, *texts(), CONFIG, out)
    return contents(out)


def texts() -> tuple[Sequences, Sequences]:
    """Text to train on and text held out."""
    draw = np.random.default_rng(0)
    return Sequences(draw.integers(0, 29, (20, 12))), Sequences(draw.integers(0, 29, (4, 12)))


@pytest.mark.parametrize(
    ("owner", "name", "calls"),
    [
        (Trainer, "advance", 1),
        (Trainer, "advance", 4),
        (Trainer, "advance", 11),
        (run_module, "save_checkpoint", 2),
        (run_module, "write_json", 1),
        (run_module, "evaluate", 1),
    ],
)
def test_a_stopped_run_ends_like_one_that_was_never_stopped(
    owner, name, calls, finished, relu_model, tmp_path, request, monkeypatch
) -> None:
    with monkeypatch.context() as patched:
        stop_after(patched, owner, name, calls)
        with pytest.raises(Stopped):
            train(relu_model, *texts(), CONFIG, tmp_path)
    train(relu_model, *texts(), CONFIG, tmp_path)
    assert contents(tmp_path) == finished
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000011"]


def test_a_run_leaves_transcoders_that_can_be_loaded(relu_model, tmp_path) -> None:
    told = []
    result = train(relu_model, *texts(), CONFIG, tmp_path, tell=told.append)
    assert told[-1].step == CONFIG.steps
    again = load(tmp_path, model=relu_model)
    assert torch.equal(again.encoder_LFD, result.transcoders.encoder_LFD)
    assert again.provenance["training"] == CONFIG.to_dict()


@pytest.mark.parametrize("what", ["config", "text", "model"])
def test_another_run_in_the_same_folder_is_refused(what: str, relu_model, model, tmp_path) -> None:
    text, held_out = texts()
    train(relu_model, text, held_out, CONFIG.replace(steps=1), tmp_path)
    others = {
        "config": (relu_model, text, CONFIG.replace(steps=2)),
        "text": (relu_model, text.rows(slice(0, 10)), CONFIG.replace(steps=1)),
        "model": (model("gpt2", activation_function="relu", seed=4), text, CONFIG.replace(steps=1)),
    }
    other_model, other_text, config = others[what]
    with pytest.raises(GossamerError, match=f"another {what}"):
        train(other_model, other_text, held_out, config, tmp_path)


def test_a_cache_holds_the_models_activations(relu_model, tmp_path) -> None:
    text, _ = texts()
    fill_cache(tmp_path, relu_model, text, gib=1, batch=6)
    cached = CachedActivations(tmp_path, positions_per_step=220, seed=0, device="cpu")
    assert cached.n_positions == 20 * 11
    for found, expected in zip(cached.batch(0), mlp_activity(relu_model, text), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    drawn = CachedActivations(tmp_path, positions_per_step=50, seed=0, device="cpu")
    assert torch.equal(drawn.batch(3)[0], drawn.batch(3)[0])
    assert not torch.equal(drawn.batch(3)[0], drawn.batch(2)[0])


def test_a_cache_is_bounded_and_goes_on_where_it_stopped(relu_model, tmp_path, monkeypatch) -> None:
    text, _ = texts()
    bound = 100.5 * 2 * 2 * 3 * 12 / GIB
    fill_cache(tmp_path / "whole", relu_model, text, gib=bound, batch=4)
    with monkeypatch.context() as patched:
        import gossamer.transcoders.cache as cache_module

        stop_after(patched, cache_module, "write_json", 2)
        with pytest.raises(Stopped):
            fill_cache(tmp_path / "stopped", relu_model, text, gib=bound, batch=4)
    told = []
    fill_cache(tmp_path / "stopped", relu_model, text, gib=bound, batch=4, tell=lambda *n: told.append(n))
    assert told == [(88, 100), (100, 100)]
    for name in ("inputs.npy", "outputs.npy", "cache.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    with pytest.raises(GossamerError, match="other activations"):
        fill_cache(tmp_path / "whole", relu_model, text.rows(slice(0, 5)), gib=bound)
    with pytest.raises(GossamerError, match="hold no activations"):
        fill_cache(tmp_path / "none", relu_model, text, gib=1e-9)


def test_training_from_a_cache_is_training(relu_model, tmp_path) -> None:
    cache = Cache(tmp_path / "cache", gib=1)
    result = train(relu_model, *texts(), CONFIG, tmp_path / "run", cache=cache)
    assert result.report.mean_unexplained < 1.0


def test_minutes_become_steps(relu_model, monkeypatch) -> None:
    text, _ = texts()
    monkeypatch.setattr("gossamer.transcoders.pace.LEAST_SECONDS", 0.1)
    few, many = (steps_within(minutes, relu_model, text, CONFIG) for minutes in (0.05, 5.0))
    assert 1 <= few < many
    with pytest.raises(GossamerError, match="give more"):
        steps_within(1e-7, relu_model, text, CONFIG)
