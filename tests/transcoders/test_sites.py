"""What is read and replaced is what the MLP reads and what reaches the residual stream, in every family."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch

from gossamer import GateConfig, gate
from gossamer.corpus.inputs import model_inputs
from gossamer.errors import GossamerError
from gossamer.transcoders import counted_positions, from_mlp, mlp_activity, watched

FAMILIES = ["gpt2", "gpt_neox", "llama", "olmo2", "gemma2"]


def blocks_seen(model, text) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What each block adds to the stream, what its attention writes, what its MLP module was called with."""
    added, attention, read = [], [], []

    def block_hook(module, args, kwargs, output) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        added.append((output[0] if isinstance(output, tuple) else output) - before)

    def attention_hook(module, args, output) -> None:
        attention.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as hooks, torch.no_grad():
        parts = model.anatomy
        for layer in range(parts.n_layers):
            block, writer = parts.blocks[layer], parts.attention_writers[layer]
            hooks.callback(block.register_forward_hook(block_hook, with_kwargs=True).remove)
            hooks.callback(writer.register_forward_hook(attention_hook).remove)
            reader = parts.mlps[layer].register_forward_pre_hook(lambda module, args: read.append(args[0]))
            hooks.callback(reader.remove)
        model.hf(**model_inputs(text, "cpu"))
    return added, attention, read


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_and_mlp_writes_make_up_a_block(family: str, model, text) -> None:
    of, some_text = model(family, dtype=torch.float64), text(3)
    added, attention, read = blocks_seen(of, some_text)
    inputs_LND, outputs_LND = mlp_activity(of, some_text)
    assert inputs_LND.shape == outputs_LND.shape == (3, 3 * 11, 12)
    for layer in range(3):
        expected = (added[layer] - attention[layer])[:, 1:].flatten(0, 1)
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(outputs_LND[layer], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(inputs_LND[layer], read[layer][:, 1:].flatten(0, 1))


def test_the_first_position_of_every_document_is_left_out(text) -> None:
    packed = text(2, segments=True)
    assert counted_positions(packed)[0].nonzero()[:, 0].tolist() == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
    packed.segments_NT[1, 8:] = -1
    assert counted_positions(packed)[1].nonzero()[:, 0].tolist() == [1, 2, 3, 4, 6, 7]
    assert counted_positions(text(2)).sum() == 22


def test_documents_of_a_packed_text_do_not_see_each_other(model, text) -> None:
    of, packed = model("llama", dtype=torch.float64), text(1, segments=True)
    before, _ = mlp_activity(of, packed)
    packed.ids_NT[0, 1:5] = (packed.ids_NT[0, 1:5] + 7) % 29
    after, _ = mlp_activity(of, packed)
    changed = (before - after).abs().amax((0, 2)) > 0
    assert changed.tolist() == [True] * 4 + [False] * 6


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_put_in_reaches_the_stream(family: str, model, text) -> None:
    of, some_text = model(family, dtype=torch.float64), text(2)
    with torch.no_grad():
        plain = of.hf(**model_inputs(some_text, "cpu")).logits
        with watched(of, lambda layer, inputs, written: written) as activity:
            same = of.hf(**model_inputs(some_text, "cpu")).logits
        with watched(of, lambda layer, inputs, written: torch.zeros_like(written) if layer == 1 else written):
            without = of.hf(**model_inputs(some_text, "cpu")).logits
        again = of.hf(**model_inputs(some_text, "cpu")).logits
    assert len(activity.inputs) == len(activity.outputs) == 3
    assert torch.equal(plain, same)
    assert torch.equal(plain, again)
    assert (plain - without).abs().max() > 1e-3


def test_a_gated_model_is_read_with_its_gates(model, text) -> None:
    of, some_text = model("gpt2"), text(2)
    dense, _ = mlp_activity(of, some_text)
    gate(of, GateConfig(offset=0.0))
    gated, _ = mlp_activity(of, some_text)
    assert not np.allclose(dense.numpy(), gated.numpy())


def test_copied_transcoders_reconstruct_every_mlp(model, text) -> None:
    of = model("gpt2", dtype=torch.float64, activation_function="relu")
    copied = from_mlp(of)
    assert (copied.kind, copied.activation, copied.n_features) == ("per-layer", "relu", 20)
    inputs_LND, outputs_LND = mlp_activity(of, text(4))
    features = [copied.encode(layer, inputs_LND[layer]) for layer in range(3)]
    assert all(0.1 < (feature_NF > 0).double().mean() < 0.9 for feature_NF in features)
    for layer in range(3):
        error = copied.reconstruct(features, layer) - outputs_LND[layer]
        assert error.abs().max() < 1e-12
    copied.require_model(of)


@pytest.mark.parametrize(("family", "word"), [("gpt2", "ReLU"), ("llama", "ReLU"), ("olmo2", "norm")])
def test_other_mlps_cannot_be_copied(family: str, word: str, model) -> None:
    with pytest.raises(GossamerError, match=word):
        from_mlp(model(family))
