"""GPT-2 weights in other people's layouts give the source model's logits, and prove it on text."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2LMHeadModel

from gossamer.attention import GateConfig, gates_of
from gossamer.errors import GossamerError
from gossamer.models import ForeignOptions, ImportProof, gate, load, micro, prove_import
from gossamer.models.foreign import sniff

State = dict[str, Any]
HEADS = ForeignOptions(n_heads=4)
PROJECTIONS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def nanogpt_state(source: GPT2LMHeadModel) -> State:
    """As nanoGPT saves it: Linear weights, the causal mask as a buffer."""
    state = {k: w.T.contiguous() if k.endswith(PROJECTIONS) else w.clone() for k, w in source.state_dict().items()}
    for layer in range(2):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(24, 24).tril()[None, None]
    return state


def lens_state(source: GPT2LMHeadModel) -> State:
    """As TransformerLens' legacy HookedTransformer saves it, written out from its definition."""
    theirs = source.state_dict()
    state: State = {
        "embed.W_E": theirs["transformer.wte.weight"],
        "pos_embed.W_pos": theirs["transformer.wpe.weight"],
        "unembed.W_U": theirs["lm_head.weight"].T.contiguous(),
        "unembed.b_U": torch.zeros(theirs["lm_head.weight"].shape[0]),
        "ln_final.w": theirs["transformer.ln_f.weight"],
        "ln_final.b": theirs["transformer.ln_f.bias"],
    }
    n_heads, width = 4, 8
    for layer in range(2):
        ours = {k.removeprefix(f"transformer.h.{layer}."): w for k, w in theirs.items() if f".h.{layer}." in k}
        one: State = {"attn.mask": torch.ones(24, 24).tril().bool(), "attn.IGNORE": torch.tensor(-1e5)}
        for place, part in enumerate("QKV"):
            columns = [32 * place + width * head for head in range(n_heads)]
            one[f"attn.W_{part}"] = torch.stack([ours["attn.c_attn.weight"][:, c : c + width] for c in columns])
            one[f"attn.b_{part}"] = torch.stack([ours["attn.c_attn.bias"][c : c + width] for c in columns])
        rows = [width * head for head in range(n_heads)]
        one["attn.W_O"] = torch.stack([ours["attn.c_proj.weight"][r : r + width] for r in rows])
        one["attn.b_O"] = ours["attn.c_proj.bias"]
        one |= {"mlp.W_in": ours["mlp.c_fc.weight"], "mlp.b_in": ours["mlp.c_fc.bias"]}
        one |= {"mlp.W_out": ours["mlp.c_proj.weight"], "mlp.b_out": ours["mlp.c_proj.bias"]}
        for norm, name in (("ln_1", "ln1"), ("ln_2", "ln2")):
            one |= {f"{name}.w": ours[f"{norm}.weight"], f"{name}.b": ours[f"{norm}.bias"]}
        state |= {f"blocks.{layer}.{key}": weight for key, weight in one.items()}
    return state


def plain_state(source: GPT2LMHeadModel) -> State:
    return {key.removeprefix("transformer."): weight for key, weight in source.state_dict().items()}


def assert_same(path: Path, source: GPT2LMHeadModel, ids_BT: Tensor, layout: str, options: ForeignOptions) -> None:
    model = load(path, foreign=options)
    assert model.layout == layout
    with torch.no_grad():
        expected = source(ids_BT).logits
    torch.testing.assert_close(model.logits(ids_BT), expected, rtol=0, atol=1e-5)


EXACT = ForeignOptions(n_heads=4, activation="gelu")
LAYOUTS: dict[str, tuple[Callable[[GPT2LMHeadModel], State], ForeignOptions]] = {
    "nanogpt": (nanogpt_state, HEADS),
    "transformers": (plain_state, EXACT),
    "transformerlens": (lens_state, ForeignOptions(activation="gelu")),  # states its heads in its shapes
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_gives_the_sources_logits(
    source_gpt2: GPT2LMHeadModel, tmp_path: Path, ids_BT: Tensor, layout: str
) -> None:
    convert, options = LAYOUTS[layout]
    torch.save(convert(source_gpt2), tmp_path / "final.pth")
    assert_same(tmp_path / "final.pth", source_gpt2, ids_BT, layout, options)


def test_compiled_nanogpt_checkpoint_with_its_model_args(
    source_gpt2: GPT2LMHeadModel, tmp_path: Path, ids_BT: Tensor
) -> None:
    state = {f"_orig_mod.{key}": weight for key, weight in nanogpt_state(source_gpt2).items()}
    model_args = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "bias": True, "vocab_size": 53}
    best = torch.tensor(3.2)
    torch.save({"model": state, "model_args": model_args, "iter_num": 5, "best_val_loss": best}, tmp_path / "ckpt.pt")
    assert_same(tmp_path / "ckpt.pt", source_gpt2, ids_BT, "nanogpt", ForeignOptions())


def test_number_of_heads_from_a_config_beside_the_file(
    source_gpt2: GPT2LMHeadModel, tmp_path: Path, ids_BT: Tensor
) -> None:
    (tmp_path / "config.json").write_text('{"n_heads": 4, "act_fn": "gelu"}')
    save_file({key: weight.contiguous() for key, weight in lens_state(source_gpt2).items()}, tmp_path / "w.safetensors")
    assert_same(tmp_path / "w.safetensors", source_gpt2, ids_BT, "transformerlens", ForeignOptions())


def test_missing_biases_are_zero(source_gpt2: GPT2LMHeadModel, tmp_path: Path, ids_BT: Tensor) -> None:
    with torch.no_grad():
        for name, parameter in source_gpt2.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    state = {key: weight for key, weight in nanogpt_state(source_gpt2).items() if not key.endswith(".bias")}
    torch.save(state, tmp_path / "ckpt.pt")
    assert_same(tmp_path / "ckpt.pt", source_gpt2, ids_BT, "nanogpt", HEADS)


def test_a_bias_that_only_one_layer_lacks_is_damage(source_gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    state = nanogpt_state(source_gpt2)
    del state["transformer.h.1.mlp.c_fc.bias"]
    torch.save(state, tmp_path / "ckpt.pt")
    with pytest.raises(GossamerError, match=r"lacks the weight 'transformer.h.1.mlp.c_fc.bias'"):
        load(tmp_path / "ckpt.pt", foreign=HEADS)


def test_activation_is_read_rightly(source_gpt2: GPT2LMHeadModel, tmp_path: Path, ids_BT: Tensor) -> None:
    """The test models can tell exact GELU from its approximation."""
    torch.save(nanogpt_state(source_gpt2), tmp_path / "ckpt.pt")
    approximate = load(tmp_path / "ckpt.pt", foreign=ForeignOptions(n_heads=4, activation="gelu_new"))
    exact = load(tmp_path / "ckpt.pt", foreign=HEADS)
    assert exact.hf.config.activation_function == "gelu"
    assert (exact.logits(ids_BT) - approximate.logits(ids_BT)).abs().max() > 1e-4


def test_padded_vocabulary_is_cut(tmp_path: Path) -> None:
    state = {
        "transformer.wte.weight": torch.randn(50304, 4),
        "transformer.wpe.weight": torch.randn(8, 4),
        "transformer.ln_f.weight": torch.ones(4),
        "transformer.h.0.ln_1.weight": torch.ones(4),
        "transformer.h.0.ln_2.weight": torch.ones(4),
        "transformer.h.0.attn.c_attn.weight": torch.randn(12, 4),
        "transformer.h.0.attn.c_proj.weight": torch.randn(4, 4),
        "transformer.h.0.mlp.c_fc.weight": torch.randn(16, 4),
        "transformer.h.0.mlp.c_proj.weight": torch.randn(4, 16),
    }
    state["lm_head.weight"] = state["transformer.wte.weight"]
    torch.save(state, tmp_path / "final.pth")
    model = load(tmp_path / "final.pth", foreign=ForeignOptions(n_heads=2))
    assert model.logits(torch.tensor([[1, 2]])).shape == (1, 2, 50257)
    assert model.hf.config.tie_word_embeddings
    assert torch.equal(model.hf.lm_head.weight, state["lm_head.weight"][:50257])
    ten = load(tmp_path / "final.pth", foreign=ForeignOptions(n_heads=2, vocabulary=10))
    assert ten.hf.config.vocab_size == 10
    with pytest.raises(GossamerError, match="vocabulary of 60000"):
        load(tmp_path / "final.pth", foreign=ForeignOptions(n_heads=2, vocabulary=60000))


def test_untied_unembedding_is_kept(source_gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    state = nanogpt_state(source_gpt2)
    state["lm_head.weight"] = torch.randn_like(state["lm_head.weight"])
    torch.save(state, tmp_path / "ckpt.pt")
    model = load(tmp_path / "ckpt.pt", foreign=HEADS)
    assert torch.equal(model.hf.lm_head.weight, state["lm_head.weight"])
    assert torch.equal(model.hf.transformer.wte.weight, state["transformer.wte.weight"])


def test_published_gate(source_gpt2: GPT2LMHeadModel, tmp_path: Path, ids_BT: Tensor) -> None:
    torch.save(lens_state(source_gpt2), tmp_path / "final.pth")
    dense = load(tmp_path / "final.pth", foreign=EXACT)
    asked = load(tmp_path / "final.pth", foreign=ForeignOptions(n_heads=4, activation="gelu", gate_offset=0.5))
    (tmp_path / "config.json").write_text('{"use_sparse_attn": true, "n_heads": 4, "act_fn": "gelu"}')
    said = load(tmp_path / "final.pth")
    assert dense.gate is None
    assert asked.gate == GateConfig("logit", 0.5)
    assert said.gate == GateConfig("logit", 0.0)
    assert all(torch.equal(one.offset_H, torch.zeros(4)) for one in gates_of(said.hf))
    assert not torch.allclose(said.logits(ids_BT), dense.logits(ids_BT))
    assert load(said.save(tmp_path / "folder")).gate == said.gate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"unembed.b_U": torch.arange(53.0)}, "unembedding bias"),
        ({"blocks.0.mlp.W_gate": torch.ones(2)}, "hold 'blocks.0.mlp.W_gate'"),
        ({"blocks.1.attn.W_O": None}, "lack 'blocks.1.attn.W_O'"),
        ({"blocks.3.ln1.w": torch.ones(32)}, "with gaps"),
    ],
)
def test_weights_of_other_models_are_refused(
    source_gpt2: GPT2LMHeadModel, tmp_path: Path, change: State, words: str
) -> None:
    state = {key: weight for key, weight in (lens_state(source_gpt2) | change).items() if weight is not None}
    torch.save(state, tmp_path / "final.pth")
    with pytest.raises(GossamerError, match=words):
        load(tmp_path / "final.pth")


def test_unknown_layouts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(GossamerError, match=r"no layout that gossamer knows \(model.layers.0.weight\)"):
        sniff({"model.layers.0.weight": torch.ones(1)})
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(GossamerError, match="holds a list, not a state dict"):
        load(tmp_path / "list.pt")
    state = {"wte.weight": torch.ones(5, 9), "h.0.attn.c_attn.weight": torch.ones(9, 27)}
    torch.save(state | {"wpe.weight": torch.ones(2, 9), "h.0.mlp.c_fc.weight": torch.ones(9, 9)}, tmp_path / "nine.pt")
    with pytest.raises(GossamerError, match="2 heads do not divide the width 9"):
        load(tmp_path / "nine.pt", foreign=ForeignOptions(n_heads=2))


@pytest.mark.parametrize("layout", ["nanogpt", "transformers"])
def test_the_number_of_heads_is_never_guessed(source_gpt2: GPT2LMHeadModel, tmp_path: Path, layout: str) -> None:
    convert, _ = LAYOUTS[layout]
    torch.save(convert(source_gpt2), tmp_path / "final.pth")
    with pytest.raises(GossamerError, match=r"Nothing says how many heads .*final\.pth.*--heads N"):
        load(tmp_path / "final.pth")


@pytest.mark.parametrize("by", ["options", "config"])
def test_another_number_of_heads_than_the_weights_have_is_refused(
    source_gpt2: GPT2LMHeadModel, tmp_path: Path, by: str
) -> None:
    torch.save(lens_state(source_gpt2), tmp_path / "final.pth")
    if by == "config":
        (tmp_path / "config.json").write_text('{"n_heads": 8}')
    options = ForeignOptions(n_heads=8) if by == "options" else None
    with pytest.raises(GossamerError, match="have 4 heads, but 8 are asked for"):
        load(tmp_path / "final.pth", foreign=options)


def test_layers_with_different_heads_are_refused(source_gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    state = lens_state(source_gpt2)
    state["blocks.1.attn.W_Q"] = state["blocks.1.attn.W_Q"].reshape(2, 32, 16)
    torch.save(state, tmp_path / "final.pth")
    with pytest.raises(GossamerError, match=r"layers have \[2, 4\] heads"):
        load(tmp_path / "final.pth")


class Payload:
    """What an attacker would put into a pickle: a call made on loading."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.trace),))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("write", ["torch", "pickle"])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, write: str) -> None:
    trace, path = tmp_path / "ran", tmp_path / "final.pth"
    evil = {"transformer.wte.weight": Payload(trace)}
    torch.save(evil, path) if write == "torch" else path.write_bytes(pickle.dumps(evil))
    with pytest.raises(GossamerError, match=r"more than tensors \(\w+\.mkdir\), and loading it could run code"):
        load(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes()) if write == "pickle" else torch.load(path, weights_only=False)
    assert trace.exists()  # the payload works where it is let in


@pytest.mark.parametrize("content", [b"", b"not a pickle at all", b"\x80\x02}q\x00"])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "final.pth").write_bytes(content)
    with pytest.raises(GossamerError, match=r"not a file that torch\.save wrote"):
        load(tmp_path / "final.pth")


def test_truncated_checkpoint_is_refused(source_gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    torch.save(nanogpt_state(source_gpt2), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GossamerError, match=r"not a file that torch\.save wrote"):
        load(tmp_path / "half.pt")


def test_import_proves_itself_on_text() -> None:
    model = micro()  # predicts repeated text well enough once its logits are sharpened
    model.hf.lm_head.weight.data.mul_(3)
    text = "a b a b a b"
    dense = prove_import(model, text)
    assert dense.loss_with_gates_open is None
    gate(model, GateConfig("logit", -0.69))
    sparse = prove_import(model, text)
    assert sparse.loss_with_gates_open == pytest.approx(dense.loss, abs=1e-9)
    assert sparse.loss != pytest.approx(dense.loss, abs=1e-3)
    assert (
        f"{sparse.loss:.3f} nats a token, {dense.loss:.3f} with all gates open (guessing: 1.386)" in sparse.sentence()
    )


def test_an_import_that_does_not_predict_is_refused(source_gpt2: GPT2LMHeadModel, tmp_path: Path) -> None:
    torch.save(nanogpt_state(source_gpt2), tmp_path / "ckpt.pt")
    from gossamer.models import micro  # any tokenizer with few enough tokens

    with pytest.raises(GossamerError, match="was not read rightly; check n_heads, activation"):
        load(
            tmp_path / "ckpt.pt", tokenizer=micro().tokenizer, foreign=ForeignOptions(n_heads=4, prove_on="a b c a b c")
        )


@pytest.mark.parametrize(
    ("proof", "good", "words"),
    [
        (ImportProof("m", 3.3, None, 10.8), True, "as a language model should"),
        (ImportProof("m", 3.3, 3.5, 10.8), True, "3.500 with all gates open"),
        (ImportProof("m", 9.9, None, 10.8), False, "not read rightly"),
        (ImportProof("m", 5.3, 3.3, 10.8), False, "check gate_offset"),
    ],
)
def test_verdicts(proof: ImportProof, *, good: bool, words: str) -> None:
    assert words in proof.sentence()
    if good:
        proof.require()
    else:
        with pytest.raises(GossamerError, match=words):
            proof.require()
