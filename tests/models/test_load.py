"""The one door: every kind of name, and one clear sentence for each that cannot be loaded."""

from __future__ import annotations

import json
import shutil
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import gossamer as gs
from gossamer.attention import ATTENTION_NAME, tape
from gossamer.errors import GossamerError
from gossamer.models import NAMES, catalogue, load
from gossamer.models import hub as hub_room


def refusal(name: Any, **settings: Any) -> str:
    with pytest.raises(GossamerError) as caught:
        load(name, **settings)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


def test_public_door_is_this_one(gpt2_folder: Path) -> None:
    model = gs.load(gpt2_folder)
    assert isinstance(model, gs.LoadedModel)
    assert model.name == str(gpt2_folder)
    assert not model.hf.training


def test_dense_folders_are_open_to_tapes(gpt2_folder: Path, ids_BT: Tensor) -> None:
    model = load(str(gpt2_folder))
    assert model.hf.config._attn_implementation == ATTENTION_NAME
    with tape(model.hf, record=["weights"]) as t:
        model.logits(ids_BT)
    torch.testing.assert_close(t["weights", 1].sum(-1), torch.ones(2, 4, 9))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("bundled/dens", "bundled/dense"), ("smolm2", "smollm2"), ("bundled/sprase", "bundled/sparse")],
)
def test_unknown_names_suggest_the_nearest(name: str, nearest: str) -> None:
    assert f"Did you mean '{nearest}'?" in refusal(name)


def test_unknown_paths_suggest_folders_beside_them(gpt2_folder: Path) -> None:
    assert f"Did you mean '{gpt2_folder}'?" in refusal(f"{gpt2_folder}s")
    assert "is no known model, folder or file. Known names are bundled/dense" in refusal("./zzz/qqq")
    assert "is no known model" in refusal("missing.pth")
    assert "is no known model" in refusal("what--is..this")


def test_bundled_names_load_or_say_that_they_are_missing(monkeypatch: pytest.MonkeyPatch, gpt2_folder: Path) -> None:
    monkeypatch.setattr(import_module("gossamer.models.load"), "BUNDLED_FOLDER", gpt2_folder.parent)
    assert "bundled/dense is missing from this installation" in refusal("bundled/dense")
    gpt2_folder.rename(gpt2_folder.parent / "dense")
    model = load("bundled/dense")
    assert model.name == "bundled/dense"
    state = catalogue()
    assert tuple(state) == NAMES
    assert state["bundled/dense"] == "ready"
    assert "missing" in state["bundled/sparse"]


def test_models_for_comparison_are_at_hand_in_a_checkout_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert load("bundled/sparse-2").is_sparse
    assert not load("bundled/control").is_sparse
    monkeypatch.setattr(import_module("gossamer.models.load"), "RECIPE_FOLDER", tmp_path)
    assert "kept beside the recipe, outside the package" in refusal("bundled/control")


def test_hub_ids_are_answered_at_once_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    assert "not in the Hugging Face cache, and HF_HUB_OFFLINE is set." in refusal("somebody/some-model")
    monkeypatch.setattr(hub_room.constants, "HF_HUB_OFFLINE", False)

    def unreachable(*_args: object, timeout: float, **_kwargs: object) -> None:
        assert timeout <= 5
        raise ConnectionError("no route")

    monkeypatch.setattr(hub_room.HfApi, "model_info", unreachable)
    assert "the hub could not be reached (ConnectionError)" in refusal("somebody/some-model")
    assert time.monotonic() - start < 5


def test_cached_hub_models_load_without_asking(
    monkeypatch: pytest.MonkeyPatch, gpt2_folder: Path, ids_BT: Tensor
) -> None:
    def cached(name: str, *, local_files_only: bool) -> str:
        assert name == "gpt2"
        assert local_files_only
        return str(gpt2_folder)

    monkeypatch.setattr(hub_room, "snapshot_download", cached)
    model = load("gpt2")
    assert model.name == "gpt2"
    assert torch.equal(model.logits(ids_BT), load(gpt2_folder).logits(ids_BT))


def test_folders_that_are_no_whole_model(gpt2_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in refusal(tmp_path / "empty")
    bare = tmp_path / "bare"
    shutil.copytree(gpt2_folder, bare)
    (bare / "model.safetensors").unlink()
    assert "holds no weights" in refusal(bare)
    (bare / "config.json").write_text("{")
    assert "could not be read as JSON" in refusal(bare)
    (bare / "config.json").write_text("[]")
    assert "is no model config" in refusal(bare)
    (bare / "config.json").write_text('{"model_type": "gpt2", "n_head": "many"}')
    assert "is not a valid config" in refusal(bare)


def test_corrupt_safetensors(gpt2_folder: Path) -> None:
    path = gpt2_folder / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[:-10], whole[:50], b"", b"\xff" * 100):
        path.write_bytes(damaged)
        assert "is not a whole safetensors file" in refusal(gpt2_folder)
        assert "is not a whole safetensors file" in refusal(path)


def test_corrupt_tokenizer(gpt2_folder: Path) -> None:
    (gpt2_folder / "tokenizer.json").write_text("{}")
    assert "tokenizer in" in refusal(gpt2_folder)


def test_folder_with_a_pickle_that_holds_code(gpt2_folder: Path, tmp_path: Path) -> None:
    (gpt2_folder / "model.safetensors").unlink()
    torch.save({"wte.weight": torch.ones(1), "path": tmp_path}, gpt2_folder / "pytorch_model.bin")
    assert "could run code" in refusal(gpt2_folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "encoder-only"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "bloom"}, "cannot be replaced"),
        ({"model_type": "ours", "auto_map": {"AutoModelForCausalLM": "code.Model"}}, "not supported"),
    ],
)
def test_families_that_cannot_be_read(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert words in refusal(tmp_path)


def test_settings(gpt2_folder: Path) -> None:
    assert load(gpt2_folder, dtype="float64").dtype == torch.float64
    assert load(gpt2_folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert "dtype 'float99' is unknown" in refusal(gpt2_folder, dtype="float99")
    if not torch.cuda.is_available():
        assert "device 'cuda' cannot be used here" in refusal(gpt2_folder, device="cuda")
    assert "device 'abacus' cannot be used here" in refusal(gpt2_folder, device="abacus")


def test_tokenizers_can_be_given(gpt2_folder: Path, tmp_path: Path, few_words: PreTrainedTokenizerFast) -> None:
    words = few_words
    words.save_pretrained(tmp_path / "words")
    assert len(load(gpt2_folder, tokenizer=tmp_path / "words").tokenizer) == 20
    assert load(gpt2_folder, tokenizer=words).tokenizer is words
    assert "holds no tokenizer" in refusal(gpt2_folder, tokenizer=tmp_path)
    for file in gpt2_folder.glob("tokenizer*"):
        file.unlink()
    model = load(gpt2_folder)
    with pytest.raises(GossamerError, match="came without a tokenizer"):
        model.encode("w1")


def test_a_weight_file_inside_a_folder_of_another_family(tmp_path: Path, gpt2_folder: Path) -> None:
    weights = load_file(gpt2_folder / "model.safetensors")
    save_file({f"other.{name}": weight for name, weight in weights.items()}, tmp_path / "model.safetensors")
    assert "other models as folders" in refusal(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", ["", "  "])
def test_a_model_without_a_name_is_not_the_present_folder(
    name: str, gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(gpt2_folder)
    with pytest.raises(GossamerError, match="needs a name"):
        load(name)
    assert load(".").anatomy.family == "gpt2"
