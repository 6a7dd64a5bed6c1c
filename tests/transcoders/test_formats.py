"""Folders of our own and of others: written by hand here, read there, and refused where they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from gossamer.errors import GossamerError
from gossamer.transcoders import TranscoderSet, load, write_circuit_tracer
from gossamer.transcoders.quantise import dequantise, quantise

KINDS = ["per-layer", "cross-layer"]
ACTIVATIONS = ["jumprelu", "topk", "relu"]


def same(one: TranscoderSet, other: TranscoderSet, *, tolerance: float = 0.0) -> bool:
    """Whether two sets agree in shape and, within a tolerance, in every tensor."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return one.shape == other.shape and all(
        name == other_name and torch.allclose(tensor, other_tensor, rtol=0, atol=tolerance)
        for (name, tensor), (other_name, other_tensor) in pairs
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_our_folder_round_trips(kind: str, activation: str, transcoders, model, tmp_path: Path) -> None:
    of = model("gpt2")
    some = transcoders(kind, activation, model=of, skip=kind == "per-layer")
    some.save(tmp_path / "set")
    again = load(tmp_path / "set", model=of)
    assert same(some, again)
    assert again.provenance == some.provenance
    assert TranscoderSet.load(tmp_path / "set", model=of).shape == some.shape


def test_files_can_be_read_by_whoever_may_read_others(transcoders, tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()
    folder = transcoders().save(tmp_path / "set")
    modes = {path.stat().st_mode for path in (tmp_path / "ordinary", *folder.iterdir())}
    assert len(modes) == 1


def test_double_precision_round_trips(transcoders, tmp_path: Path) -> None:
    some = transcoders().double()
    assert same(some, load(some.save(tmp_path / "set", dtype="float64")))


@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_small_and_close(kind: str, transcoders, tmp_path: Path) -> None:
    some = transcoders(kind, n_features=64, width=96)
    shipped = load(some.save(tmp_path / "int8", dtype="int8"))
    some.save(tmp_path / "float32")
    sizes = {name: (tmp_path / name / "transcoders.safetensors").stat().st_size for name in ("int8", "float32")}
    assert sizes["int8"] < 0.3 * sizes["float32"]
    inputs = torch.randn(3, 200, 96)
    for target in range(3):
        features = [some.encode(layer, inputs[layer]) for layer in range(3)]
        exact, close = (of.reconstruct(features, target) for of in (some, shipped))
        assert (exact - close).square().sum() < 1e-4 * (exact - exact.mean(0)).square().sum()
        pre, shipped_pre = (of.preactivations(target, inputs[target]) for of in (some, shipped))
        assert (pre - shipped_pre).std() < 0.01 * pre.std()


def test_quantised_rows_are_within_half_a_step_and_zeros_stay_zeros() -> None:
    values = torch.randn(5, 4, 9) * torch.logspace(-6, 3, 5)[:, None, None]
    values[2, 1] = 0
    stored, scale = quantise(values)
    assert stored.dtype == torch.int8
    assert (stored.abs().amax(-1)[values.abs().amax(-1) > 0] == 127).all()
    assert ((dequantise(stored, scale) - values).abs() <= scale / 2 * 1.0001).all()
    assert (dequantise(stored, scale)[2, 1] == 0).all()


@pytest.mark.parametrize(
    ("kind", "activation"), [(k, a) for k in KINDS for a in ACTIVATIONS if (k, a) != (KINDS[1], "topk")]
)
def test_circuit_tracers_folder_round_trips(kind: str, activation: str, transcoders, model, tmp_path: Path) -> None:
    of = model("gpt2")
    some = transcoders(kind, activation, model=of, skip=kind == "per-layer")
    again = load(write_circuit_tracer(some, tmp_path / "theirs"), model=of)
    assert same(some, again)
    assert again.provenance["fingerprint"] == some.provenance["fingerprint"]


def test_what_circuit_tracer_cannot_hold_is_refused(transcoders, tmp_path: Path) -> None:
    for some in (transcoders("cross-layer", "topk"), transcoders("cross-layer", skip=True)):
        with pytest.raises(GossamerError, match="cross-layer layout"):
            write_circuit_tracer(some, tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def published_cross_layer(folder: Path, *, hook: str = "mlp.hook_in") -> dict[str, torch.Tensor]:
    """A cross-layer folder as circuit-tracer's users publish it, three layers of four features, width five."""
    tensors: dict[str, torch.Tensor] = {}
    folder.mkdir()
    for layer in range(3):
        encoder = {"W_enc": torch.randn(4, 5), "b_enc": torch.randn(4), "b_dec": torch.randn(5)}
        encoder["threshold"] = torch.rand(4)
        named = {f"{name}_{layer}": tensor for name, tensor in encoder.items()}
        decoder = {f"W_dec_{layer}": torch.randn(4, 3 - layer, 5)}
        save_file(named, folder / f"W_enc_{layer}.safetensors")
        save_file(decoder, folder / f"W_dec_{layer}.safetensors")
        tensors |= named | decoder
    config = {"model_name": "theirs", "model_kind": "cross_layer_transcoder", "feature_input_hook": hook}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"feature_output_hook": "hook_mlp_out"}))
    return tensors


def test_a_published_cross_layer_folder_is_read_as_it_is_meant(tmp_path: Path) -> None:
    theirs = published_cross_layer(tmp_path / "clt")
    ours = load(tmp_path / "clt")
    inputs = torch.randn(3, 6, 5)
    features = []
    for layer in range(3):
        pre = inputs[layer] @ theirs[f"W_enc_{layer}"].T + theirs[f"b_enc_{layer}"]
        features.append(pre * (pre > theirs[f"threshold_{layer}"]))
        torch.testing.assert_close(ours.encode(layer, inputs[layer]), features[layer])
    for target in range(3):
        expected = theirs[f"b_dec_{target}"].expand(6, -1)
        for source in range(target + 1):
            expected = expected + torch.einsum(
                "nf,fd->nd", features[source], theirs[f"W_dec_{source}"][:, target - source]
            )
        torch.testing.assert_close(ours.reconstruct(features, target), expected)


def test_a_published_per_layer_folder_with_topk_and_skip(tmp_path: Path) -> None:
    tensors = {"W_enc": torch.randn(6, 5), "W_dec": torch.randn(6, 5), "b_enc": torch.randn(6), "b_dec": torch.randn(5)}
    tensors["W_skip"] = torch.randn(5, 5)
    save_file(tensors, tmp_path / "layer_0.safetensors")
    config = {"model_kind": "transcoder_set", "feature_input_hook": "mlp.hook_in", "activation": "topk", "k": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    ours = load(tmp_path)
    inputs = torch.randn(7, 5)
    features = ours.encode(0, inputs)
    assert (features != 0).sum(1).max() == 2
    expected = features @ tensors["W_dec"] + tensors["b_dec"] + inputs @ tensors["W_skip"].T
    torch.testing.assert_close(ours.reconstruct([features], 0, inputs), expected)


def forge_checkpoint(folder: Path, *, cross: bool, shards: int) -> dict[str, torch.Tensor]:
    """A CLT-Forge checkpoint of three layers, four features, width five, in one file or several."""
    pairs = 6 if cross else 3
    whole = {
        "W_enc": torch.randn(3, 5, 4),
        "b_enc": torch.randn(3, 4),
        "W_dec": torch.randn(pairs, 4, 5),
        "b_dec": torch.randn(pairs, 5),
        "log_threshold": torch.randn(3, 4),
        "estimated_norm_scaling_factor_in": torch.rand(3) + 0.5,
        "estimated_norm_scaling_factor_out": torch.rand(3) + 0.5,
        "feature_count": torch.zeros(3, 4, dtype=torch.int64),
    }
    folder.mkdir()
    (folder / "clt_cfg.json").write_text(json.dumps({"model_name": "gpt2", "cross_layer_decoders": cross}))
    axes = {"W_enc": 2, "b_enc": 1, "W_dec": 1, "log_threshold": 1, "feature_count": 1}
    for rank in range(shards):
        part = {
            name: (tensor.chunk(shards, axes[name])[rank] if name in axes else tensor).contiguous()
            for name, tensor in whole.items()
        }
        prefix = f"rank{rank}_" if shards > 1 else ""
        save_file(part, folder / f"{prefix}clt_weights.safetensors")
    return whole


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("cross", [True, False])
def test_a_forge_checkpoint_is_read_as_it_is_meant(cross: bool, shards: int, tmp_path: Path) -> None:
    theirs = forge_checkpoint(tmp_path / "forge", cross=cross, shards=shards)
    ours = load(tmp_path / "forge")
    assert ours.kind == ("cross-layer" if cross else "per-layer")
    inputs = torch.randn(3, 6, 5)
    features, written = [], torch.zeros(3, 6, 5)
    for layer in range(3):
        scaled = inputs[layer] * theirs["estimated_norm_scaling_factor_in"][layer]
        pre = scaled @ theirs["W_enc"][layer] + theirs["b_enc"][layer]
        features.append(torch.where(pre > theirs["log_threshold"][layer].exp(), pre, 0.0))
        torch.testing.assert_close(ours.encode(layer, inputs[layer]), features[layer])
    pairs = [(s, t) for s in range(3) for t in range(s, 3)] if cross else [(layer, layer) for layer in range(3)]
    for number, (source, target) in enumerate(pairs):
        written[target] += features[source] @ theirs["W_dec"][number] + theirs["b_dec"][number]
    for target in range(3):
        expected = written[target] / theirs["estimated_norm_scaling_factor_out"][target]
        torch.testing.assert_close(ours.reconstruct(features, target), expected)


def test_what_reads_before_an_rms_norms_weight_is_refused_there(tmp_path: Path, model) -> None:
    theirs = published_cross_layer(tmp_path / "clt", hook="ln2.hook_normalized")
    assert theirs
    ours = load(tmp_path / "clt")
    ours.require_model(model("gpt2", n_embd=5, n_head=1, n_inner=None))
    with pytest.raises(GossamerError, match="norm's weight"):
        ours.require_model(model("llama", hidden_size=5, num_attention_heads=1, head_dim=4))


def broken(folder: Path, what: str) -> Path:
    if what == "empty":
        folder.mkdir()
    elif what in ("residual", "kind", "no weights", "not yaml"):
        published_cross_layer(folder, hook="hook_resid_mid" if what == "residual" else "mlp.hook_in")
        config = folder / "config.yaml"
        if what == "kind":
            config.write_text("model_kind: lorsa\n")
        if what == "not yaml":
            config.write_text("{: [")
        if what == "no weights":
            (folder / "W_dec_1.safetensors").unlink()
    elif what == "shard":
        forge_checkpoint(folder, cross=True, shards=2)
        (folder / "rank0_clt_weights.safetensors").unlink()
    elif what == "activation":
        forge_checkpoint(folder, cross=True, shards=1)
        (folder / "clt_cfg.json").write_text('{"activation_fn": "batchtopk"}')
    return folder


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("absent", "no transcoders at"),
        ("empty", "holds no transcoders"),
        ("residual", "hook_resid_mid"),
        ("kind", "model_kind"),
        ("not yaml", "YAML"),
        ("no weights", "missing"),
        ("shard", "misses a shard"),
        ("activation", "batchtopk"),
    ],
)
def test_folders_that_cannot_be_read_say_why(what: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=sentence):
        load(broken(tmp_path / "folder", what))


def test_our_own_folder_says_what_is_wrong_with_it(transcoders, tmp_path: Path) -> None:
    folder = transcoders().save(tmp_path / "set")
    description = json.loads((folder / "transcoders.json").read_text())
    (folder / "transcoders.json").write_text(json.dumps(description | {"format": 99}))
    with pytest.raises(GossamerError, match="format 99"):
        load(folder)
    (folder / "transcoders.json").write_text(json.dumps(description))
    (folder / "transcoders.safetensors").write_bytes(b"short")
    with pytest.raises(GossamerError, match="complete"):
        load(folder)
    with pytest.raises(GossamerError, match="stored as"):
        transcoders().save(tmp_path / "other", dtype="int4")
    with pytest.raises(GossamerError, match="Did you mean 'bundled/dense'"):
        load("bundled/dens")
