"""What a loaded model can do: tokens, logits, losses, text, a line about itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from gossamer.attention import GateConfig, gates_of
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, gate, load, require_same_tokenizer, same_tokenizer, ungate

TEXT = " ".join(f"w{1 + (7 * i) % 50}" for i in range(60))


@pytest.fixture
def model(gpt2_folder: Path) -> LoadedModel:
    return load(gpt2_folder)


def test_encode_and_decode(model: LoadedModel) -> None:
    assert model.encode("w3 w1").tolist() == [0, 3, 1]
    assert model.encode("w3 w1", bos=False).tolist() == [3, 1]
    assert model.encode("w3").dtype == torch.long
    assert model.encode("", bos=False).tolist() == []
    assert model.decode([0, 3, 1]) == "w3 w1"
    model.tokenizer.bos_token = None
    assert model.encode("w3").tolist() == [3]


def test_encode_puts_one_begin_token_even_if_the_tokenizer_adds_its_own(model: LoadedModel) -> None:
    from tokenizers import processors

    model.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    assert model.tokenizer("w3").input_ids == [0, 3]
    assert model.encode("w3").tolist() == [0, 3]


def test_logits(model: LoadedModel, ids_BT: Tensor) -> None:
    logits = model.logits(ids_BT)
    assert logits.shape == (2, 9, 53)
    assert not logits.requires_grad
    torch.testing.assert_close(model.logits(ids_BT[0]), logits[:1])
    with pytest.raises(GossamerError, match="25 tokens do not fit"):
        model.logits(torch.zeros(1, 25, dtype=torch.long))


def test_loss_is_the_mean_over_windows_each_begun_anew(model: LoadedModel) -> None:
    """60 tokens in windows of 9 after a begin token: six full ones and one of six."""
    ids_N = model.encode(TEXT, bos=False)
    total = 0.0
    for start in range(0, 60, 9):
        window = torch.cat([torch.tensor([0]), ids_N[start : start + 9]])
        log_probs = model.logits(window)[0].log_softmax(-1)
        total -= sum(float(log_probs[i, window[i + 1]]) for i in range(len(window) - 1))
    assert model.loss_on(TEXT, length=10) == pytest.approx(total / 60, rel=1e-5)
    assert model.loss_on(TEXT, length=10, batch=1) == pytest.approx(total / 60, rel=1e-5)
    assert math.isfinite(model.loss_on(TEXT, length=1000))  # no longer than the context
    model.tokenizer.bos_token = None
    assert model.loss_on("w1 w2", length=10) == pytest.approx(
        -float(model.logits(torch.tensor([1, 2]))[0, 0].log_softmax(-1)[2]), rel=1e-5
    )
    for text in ("", "w1"):
        with pytest.raises(GossamerError, match="too short to predict anything"):
            model.loss_on(text)
    with pytest.raises(GossamerError, match="nothing to predict"):
        model.loss_on(TEXT, length=0)


@pytest.mark.parametrize("gated", [False, True])
def test_greedy_text_is_the_argmax_of_the_whole_text(model: LoadedModel, *, gated: bool) -> None:
    model.hf.config.eos_token_id = None
    if gated:
        gate(model, GateConfig("logit", 0.0))
    pieces = list(model.generate("w3 w1", max_tokens=8))
    ids = model.encode("w3 w1").tolist()
    for _ in range(8):
        ids.append(int(model.logits(torch.tensor(ids))[0, -1].argmax()))
    assert "w3 w1" + "".join(pieces) == model.decode(ids)
    assert len(pieces) > 1


def test_sampling_follows_its_seed(model: LoadedModel) -> None:
    def sample(seed: int) -> str:
        return "".join(model.generate("w3", max_tokens=12, temperature=1.5, seed=seed))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_text_ends_at_the_end_token_and_at_the_context(model: LoadedModel) -> None:
    model.hf.config.eos_token_id = None
    long = " ".join(["w3"] * 20)
    assert len("".join(model.generate(long, max_tokens=50)).split()) <= 3
    with pytest.raises(GossamerError, match="leaves no room in 24"):
        model.generate(" ".join(["w3"] * 23))
    first = int(model.logits(model.encode("w3"))[0, -1].argmax())
    model.hf.config.eos_token_id = [first]
    assert list(model.generate("w3")) == []


def test_generate_refuses_at_once(model: LoadedModel) -> None:
    with pytest.raises(GossamerError, match="max_tokens is 0"):
        model.generate("w3", max_tokens=0)
    with pytest.raises(GossamerError, match="temperature is -1"):
        model.generate("w3", temperature=-1)
    model.tokenizer.bos_token = None
    with pytest.raises(GossamerError, match="prompt is empty"):
        model.generate("")


def test_characters_of_several_tokens_come_out_whole(tiny: Callable[..., PreTrainedModel]) -> None:
    """Bytes of one character are held back until it is complete."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from gossamer.models.generation import _pieces

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    hf = tiny("gpt2", vocab_size=256)
    from gossamer.models import anatomy

    model = LoadedModel("bytes", hf, anatomy(hf), optional_tokenizer=tokenizer)
    ids = tokenizer("é東x").input_ids
    assert len(ids) == 6
    assert list(_pieces(model, torch.tensor(tokenizer("a").input_ids), iter(ids))) == ["é", "東", "x"]


def test_gate_and_ungate(model: LoadedModel, ids_BT: Tensor) -> None:
    dense = model.logits(ids_BT)
    assert model.gate is None
    assert not model.is_sparse
    assert gate(model, GateConfig("logit", 0.0)) is model
    assert model.gate == GateConfig("logit", 0.0)
    assert len(gates_of(model.hf)) == 2
    assert not torch.allclose(model.logits(ids_BT), dense)
    with pytest.raises(GossamerError, match="already has gates"):
        gate(model)
    assert torch.equal(ungate(model).logits(ids_BT), dense)
    assert model.gate is None
    assert "attn_implementation" not in model.hf.config.to_dict()


def test_description_is_one_line(model: LoadedModel) -> None:
    line = model.describe()
    assert "\n" not in line
    assert "gpt2, 2 layers × 4 heads, width 32" in line
    assert "context 24, float32 on cpu, dense attention" in line
    assert "logit gates" in gate(model).describe()


def test_provenance_tells_weights_apart(model: LoadedModel, gpt2_folder: Path) -> None:
    before = model.provenance()
    assert load(gpt2_folder).provenance() == before
    with torch.no_grad():
        model.hf.transformer.wpe.weight[0, 0] += 1e-3
    assert model.provenance()["weights_sha256"] != before["weights_sha256"]


def test_pairs_must_share_their_tokens(
    model: LoadedModel, gpt2_folder: Path, few_words: PreTrainedTokenizerFast
) -> None:
    twin = load(gpt2_folder)
    assert same_tokenizer(model, twin)
    require_same_tokenizer(model, twin)
    other = load(gpt2_folder, tokenizer=few_words)
    assert not same_tokenizer(model, other)
    with pytest.raises(GossamerError, match=r"\(53 tokens\) and .* \(20 tokens\) do not share a tokenizer"):
        require_same_tokenizer(model, other)
