from __future__ import annotations

import math

import pytest
import torch

from gossamer.attention import tape
from gossamer.corpus import Sequences
from gossamer.evaluate.attention_use import attention_use
from gossamer.evaluate.report import HeadTable
from gossamer.models import LoadedModel
from gossamer.sparsify.forward import model_inputs


def slow(model: LoadedModel, text: Sequences, layer: int, head: int) -> dict[str, float]:
    """Row by row, key by key, from the recorded softmax and gate logits."""
    names = ("softmax", "gate") if model.is_sparse else ("softmax",)
    with tape(model.hf, record=names) as recorded, torch.no_grad():
        model.hf(**model_inputs(text, "cpu"))
    sums: dict[str, float] = dict.fromkeys(
        ("rows", "open", "before", "after", "h_before", "h_after", "alive", "carried", "uniform"), 0.0
    )
    for row in range(len(text)):
        for query in range(text.length):
            segments = text.segments_NT[row] if text.segments_NT is not None else [0] * text.length
            keys = [key for key in range(query + 1) if segments[key] == segments[query]]
            softmax = [float(recorded["softmax", layer][row, head, query, key]) for key in keys]
            gates = [float(recorded["gate", layer][row, head, query, key]) if model.is_sparse else 1.0 for key in keys]
            weights = [p if g > 0 else 0.0 for p, g in zip(softmax, gates, strict=True)]
            sums["rows"] += 1
            sums["open"] += sum(g > 0 for g in gates)
            sums["before"] += softmax[0]
            sums["after"] += weights[0]
            sums["uniform"] += 1 / len(keys)
            sums["carried"] += sum(weights)
            sums["h_before"] -= sum(p * math.log(p) for p in softmax if p > 0)
            if any(g > 0 for g in gates):
                carried = [w / sum(weights) for w in weights]
                sums["alive"] += 1
                sums["h_after"] -= sum(w * math.log(w) for w in carried if w > 0)
    return sums


def check_head(table: HeadTable, expected: dict[str, float], layer: int, head: int) -> None:
    rows = expected["rows"]
    assert table.open_edges[layer][head] == expected["open"]
    for found, name in (
        (table.first_before, "before"),
        (table.first_after, "after"),
        (table.entropy_before, "h_before"),
        (table.carried, "carried"),
    ):
        assert found[layer][head] == pytest.approx(expected[name] / rows, abs=1e-5), name
    after = table.entropy_after[layer][head]
    if expected["alive"]:
        assert after == pytest.approx(expected["h_after"] / expected["alive"], abs=1e-5)
    else:
        assert after is None


@pytest.mark.parametrize("which", ["text", "packed"])
def test_rows_against_a_slow_loop(sparse: LoadedModel, which: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(which).rows(slice(0, 2))
    table = attention_use(sparse.hf, text, role="sparse")
    heads = [(0, 0), (0, 2), (1, 1), (1, 3)]
    expected = {place: slow(sparse, text, *place) for place in heads}
    for place in heads:
        check_head(table, expected[place], *place)
    assert table.rows.first_uniform == pytest.approx(expected[0, 0]["uniform"] / expected[0, 0]["rows"], abs=1e-6)
    assert table.dead_heads == ((1, 3),)
    assert 0 < expected[0, 0]["open"] < expected[0, 0]["rows"] * text.length / 2


def test_totals_are_the_mean_over_heads(sparse: LoadedModel, text: Sequences) -> None:
    table = attention_use(sparse.hf, text, role="sparse")
    flat = [value for row in table.first_after for value in row if value is not None]
    assert table.rows.first_after == pytest.approx(sum(flat) / 8, abs=1e-6)
    shares = [value for row in table.of_causal_pairs for value in row if value is not None]
    assert shares[0] == table.open_edges[0][0] / (5 * 24 * 25 // 2)  # type: ignore[operator]


def test_a_dense_model_is_the_same_before_and_after(dense: LoadedModel, text: Sequences) -> None:
    table = attention_use(dense.hf, text, role="dense")
    assert table.rows.first_before == table.rows.first_after
    assert table.rows.entropy_after == pytest.approx(table.rows.entropy_before, abs=1e-6)
    assert table.rows.carried == pytest.approx(1, abs=1e-6)
    assert table.rows.empty_rows == 0
    assert not table.dead_heads


def test_uniform_attention_has_no_excess(dense: LoadedModel, packed: Sequences) -> None:
    for block in dense.hf.transformer.h:
        block.attn.c_attn.weight.data[:, :16] = 0
        block.attn.c_attn.bias.data[:16] = 0
    rows = attention_use(dense.hf, packed, role="dense").rows
    for excess in (*rows.first_excess, *rows.entropy_excess):
        assert excess == pytest.approx(0, abs=1e-6)
    assert rows.first_uniform > 0.1


def test_memory_limits_change_nothing(sparse: LoadedModel, packed: Sequences, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention_use(sparse.hf, packed, role="sparse")
    monkeypatch.setattr("gossamer.evaluate.attention_use.MOST_NUMBERS", 1)
    piecewise = attention_use(sparse.hf, packed, role="sparse")
    assert whole.open_edges == piecewise.open_edges
    assert whole.rows.entropy_after == pytest.approx(piecewise.rows.entropy_after, abs=1e-6)
