"""A gate on disk cannot get lost: round trips are exact, and every way to drop it is noticed."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from gossamer.attention import ATTENTION_NAME, GATE_KEY, GateConfig, gates_of, tape
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, gate, load, load_folder, ungate


def gated(folder: Path, kind: str = "logit", offset: float = 0.0, **settings: Any) -> LoadedModel:
    model = gate(load(folder, **settings), GateConfig(kind, offset))  # type: ignore[arg-type]
    with torch.no_grad():
        for layer, one in enumerate(gates_of(model.hf)):
            one.offset_H.add_(torch.linspace(-0.123456789, 0.3, 4) + layer)
    return model


@pytest.fixture
def sparse(gpt2_folder: Path) -> LoadedModel:
    return gated(gpt2_folder)


@pytest.fixture
def saved(sparse: LoadedModel, tmp_path: Path) -> Path:
    return sparse.save(tmp_path / "sparse")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key) if value is None else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kind", ["logit", "mass", "flow"])
def test_gated_round_trip_is_bit_identical(gpt2_folder: Path, tmp_path: Path, ids_BT: Tensor, kind: str) -> None:
    model = gated(gpt2_folder, kind, offset=3.0 if kind == "mass" else 0.0)
    logits = model.logits(ids_BT)
    with tape(model.hf, record=["open", "allowed"]) as t:
        model.logits(ids_BT)
    share = (t["open", 0].sum() / t["allowed", 0].expand_as(t["open", 0]).sum()).item()
    assert 0 < share < 1
    again = load(model.save(tmp_path / "sparse"))
    assert torch.equal(again.logits(ids_BT), logits)
    assert again.gate == model.gate
    assert again.provenance()["weights_sha256"] == model.provenance()["weights_sha256"]
    assert again.encode("w3 w5").tolist() == [0, 3, 5]


def test_gates_stay_float32_in_bfloat16_models(sparse: LoadedModel, tmp_path: Path) -> None:
    offsets = [one.offset_H.clone() for one in gates_of(sparse.hf)]
    stored = load_file(sparse.save(tmp_path / "half", dtype="bfloat16") / "model.safetensors")
    dtypes = {name.endswith(".gate.offset_H"): tensor.dtype for name, tensor in stored.items()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    half = load(tmp_path / "half", dtype="bfloat16")
    assert half.dtype == torch.bfloat16
    assert load(tmp_path / "half").dtype == torch.float32
    for one, offset_H in zip(gates_of(half.hf), offsets, strict=True):
        assert one.offset_H.dtype == torch.float32
        assert torch.equal(one.offset_H, offset_H)
        assert not torch.equal(offset_H, offset_H.bfloat16().float())  # the case would show a loss
    bytes_before = (tmp_path / "half" / "model.safetensors").read_bytes()
    half.save(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == bytes_before


def test_dense_folders_stay_ordinary(gpt2_folder: Path, tmp_path: Path, ids_BT: Tensor) -> None:
    dense = load(gpt2_folder)
    assert dense.hf.config._attn_implementation == ATTENTION_NAME
    ungate(gate(dense)).save(tmp_path / "dense")
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert GATE_KEY not in config
    assert "attn_implementation" not in config
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(plain(ids_BT).logits, dense.logits(ids_BT), rtol=0, atol=1e-5)
    again = load(tmp_path / "dense")
    for name, weight in load_file(gpt2_folder / "model.safetensors").items():
        assert torch.equal(again.hf.state_dict()[name], weight)


PLAIN_LOAD = """
import sys, transformers
for name in ("AutoModelForCausalLM", "GPT2LMHeadModel"):
    try:
        getattr(transformers, name).from_pretrained(sys.argv[1])
    except Exception as error:
        print(name, type(error).__name__, error)
    else:
        print(name, "loaded")
assert "gossamer" not in sys.modules
transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
"""


def test_plain_transformers_without_gossamer_fails_and_names_it(saved: Path) -> None:
    run = subprocess.run([sys.executable, "-c", PLAIN_LOAD, saved], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "gossamer" in run.stderr.strip().splitlines()[-1]
    automatic, direct = run.stdout.strip().splitlines()
    for line in (automatic, direct):
        assert "ValueError" in line
        assert "gossamer" in line


def test_plain_transformers_with_gossamer_imported_refuses_to_run(saved: Path, ids_BT: Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    with pytest.raises(GossamerError, match="no gate was loaded"):
        model(ids_BT)


def test_plain_resave_of_our_model_keeps_everything(sparse: LoadedModel, tmp_path: Path, ids_BT: Tensor) -> None:
    copy.deepcopy(sparse).hf.save_pretrained(tmp_path / "resaved")
    assert json.loads((tmp_path / "resaved" / "config.json").read_text())["attn_implementation"] == ATTENTION_NAME
    assert torch.equal(load(tmp_path / "resaved").logits(ids_BT), sparse.logits(ids_BT))
    load(tmp_path / "resaved").hf.save_pretrained(tmp_path / "twice")
    assert torch.equal(load(tmp_path / "twice").logits(ids_BT), sparse.logits(ids_BT))


def test_plain_resave_that_dropped_gates_is_refused(saved: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(saved, attn_implementation="eager").save_pretrained(tmp_path / "dropped")
    assert GATE_KEY in json.loads((tmp_path / "dropped" / "config.json").read_text())
    with pytest.raises(GossamerError, match="declares gates but holds none"):
        load(tmp_path / "dropped")


def test_resave_that_dropped_the_attention_key_is_noticed(saved: Path, sparse: LoadedModel, ids_BT: Tensor) -> None:
    change_config(saved, attn_implementation=None)
    with pytest.warns(UserWarning, match="saved without gossamer"):
        again = load_folder(saved)
    assert torch.equal(again.logits(ids_BT), sparse.logits(ids_BT))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(again.save(saved))


def test_lost_specification_is_refused(saved: Path) -> None:
    change_config(saved, gossamer_gate=None)
    with pytest.raises(GossamerError, match=r"config\.json has lost its 'gossamer_gate' entry"):
        load(saved)
    change_config(saved, attn_implementation=None)
    with pytest.raises(GossamerError, match=r"config\.json has lost its 'gossamer_gate' entry"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "sharp"}, "Gate kind 'sharp' is unknown"),
        ({"version": 2}, "version 2"),
        ({"slope": 1.0}, "unknown field 'slope'"),
    ],
)
def test_unknown_specifications_are_refused(saved: Path, change: dict[str, Any], words: str) -> None:
    config = json.loads((saved / "config.json").read_text())
    change_config(saved, gossamer_gate=config[GATE_KEY] | change)
    with pytest.raises(GossamerError, match=words):
        load(saved)


def test_incomplete_and_damaged_gates_are_refused(saved: Path) -> None:
    path, name = saved / "model.safetensors", "transformer.h.1.attn.gate.offset_H"
    weights = load_file(path)
    for damaged in (torch.full((4,), torch.nan), torch.zeros(3), torch.zeros(4, dtype=torch.bfloat16)):
        save_file(weights | {name: damaged}, path, {"format": "pt"})
        with pytest.raises(GossamerError, match=f"The gate '{name}' .* is damaged"):
            load(saved)
    save_file({key: weight for key, weight in weights.items() if key != name}, path, {"format": "pt"})
    with pytest.raises(GossamerError, match=name):
        load(saved)
    save_file(weights | {"transformer.h.2.attn.gate.offset_H": torch.zeros(4)}, path, {"format": "pt"})
    with pytest.raises(GossamerError, match=r"h\.2\.attn\.gate"):
        load(saved)


def test_missing_weights_are_never_made_up(gpt2_folder: Path) -> None:
    path = gpt2_folder / "model.safetensors"
    weights = load_file(path)
    save_file({k: w for k, w in weights.items() if "h.1.mlp" not in k}, path, {"format": "pt"})
    with pytest.raises(GossamerError, match=r"lacks the weight 'transformer.h.1.mlp.c_fc.bias' \(and 3 more\)"):
        load(gpt2_folder)
    save_file(weights | {"transformer.h.0.extra.weight": torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(GossamerError, match=r"no place for: 'transformer\.h\.0\.extra"):
        load(gpt2_folder)
    save_file(weights, path, {"format": "pt"})
    change_config(gpt2_folder, n_positions=12)
    with pytest.raises(GossamerError, match=r"could not be loaded|another shape"):
        load(gpt2_folder)


def test_saving_is_all_or_nothing_and_never_deletes_other_files(
    sparse: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = sparse.save(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gossamer.models.checkpoint.write_json", fail)
    with pytest.raises(OSError, match="No space left"):
        sparse.save(folder)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(GossamerError, match=r"holds 'notes.txt', which saving would delete"):
        sparse.save(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(GossamerError, match="is a file"):
        sparse.save(tmp_path / "file")


def test_sharded_folders_load_and_a_lost_shard_is_named(gpt2_folder: Path, tmp_path: Path, ids_BT: Tensor) -> None:
    model = gated(gpt2_folder)
    model.hf.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    assert len(shards) > 1
    again = load(tmp_path / "shards")
    assert torch.equal(again.logits(ids_BT), model.logits(ids_BT))
    shards[-1].unlink()
    with pytest.raises(GossamerError, match=f"names '{shards[-1].name}', which is not in the folder"):
        load(tmp_path / "shards")


def test_folders_with_old_pickled_weights_load(gpt2_folder: Path, tmp_path: Path, ids_BT: Tensor) -> None:
    old = tmp_path / "old"
    shutil.copytree(gpt2_folder, old)
    (old / "model.safetensors").unlink()
    torch.save(load_file(gpt2_folder / "model.safetensors"), old / "pytorch_model.bin")
    assert torch.equal(load(old).logits(ids_BT), load(gpt2_folder).logits(ids_BT))
