from __future__ import annotations

import pytest
import torch
from random_pairs import make_dense, make_sparse

from gossamer.attention import gates_of
from gossamer.corpus import Sequences
from gossamer.evaluate.margins import EDGES, Outcome, compare, histogram, margin_audit, padded, refer
from gossamer.models import LoadedModel


@pytest.fixture
def precise(sparse: LoadedModel) -> LoadedModel:
    sparse.hf.double()
    return sparse


def ids_of(text: Sequences) -> torch.Tensor:
    return torch.as_tensor(text.ids_NT)


def test_the_histogram_counts_every_allowed_pair_in_its_bin() -> None:
    gate_BHQK = torch.tensor([[[[0.5, -torch.inf], [-0.02, 3e-9]]]])
    opened, shut = histogram([gate_BHQK], [gate_BHQK > 0])
    for counts, sizes in ((opened, [0.5, 3e-9]), (shut, [0.02])):
        expected = [0] * (len(EDGES) - 1)
        for size in sizes:
            inside = [k for k in range(len(expected)) if EDGES[k] <= size < EDGES[k + 1]]
            expected[inside[0] if inside else 0] += 1
        assert list(counts) == expected


def test_the_audit_adds_up(sparse: LoadedModel, text: Sequences) -> None:
    audit = margin_audit(sparse, text)
    pairs = 5 * 24 * 25 // 2 * 8
    assert audit.pairs == pairs == sum(audit.open_counts) + sum(audit.shut_counts)
    assert sum(audit.open_counts) == audit.flips[0].open_before
    assert min(sum(audit.open_counts), sum(audit.shut_counts)) > pairs / 10
    assert audit.closer_than(EDGES[-1]) == 1
    gates = refer(sparse.hf, ids_of(text)).gate_L
    near = sum(int((gate_BHQK.abs() < 0.1).sum()) for gate_BHQK in gates)
    assert near > 0
    assert audit.closer_than(0.1) == pytest.approx(near / pairs)


def test_in_float64_nothing_flips_but_in_bfloat16(precise: LoadedModel, text: Sequences) -> None:
    flips = {part.name: part for part in margin_audit(precise, text).flips}
    assert set(flips) == {"bfloat16", "cache", "single rows", "left padding"}
    low = flips.pop("bfloat16")
    assert low.flipped > 0
    assert low.largest_margin_flipped is not None
    assert 0 < low.divergence < 1
    for part in flips.values():
        assert part.flipped == 0, part.name
        assert part.largest_logit_change < 1e-9, part.name
        assert part.largest_margin_flipped is None


def test_padding_leaves_room_where_the_model_has_none(tokenizer: object, text: Sequences) -> None:
    model = make_sparse(make_dense(tokenizer, n_positions=24))  # type: ignore[arg-type]
    found = {part.name: part for part in margin_audit(model, text).flips}["left padding"]
    assert found.pairs == 5 * 21 * 22 // 2 * 8


def test_padding_gives_the_same_patterns(precise: LoadedModel, text: Sequences) -> None:
    reference = refer(precise.hf, ids_of(text))
    found = padded(precise.hf, ids_of(text), 3)
    for was, now in zip(reference.outcome.open_L, found.open_L, strict=True):
        assert torch.equal(was, now)
        assert 0.05 < was.double().mean() < 0.5
    torch.testing.assert_close(found.logits_BTV, reference.outcome.logits_BTV)


def test_flips_are_counted_on_both_sides(precise: LoadedModel, text: Sequences) -> None:
    reference = refer(precise.hf, ids_of(text))
    open_L = [open_BHQK.clone() for open_BHQK in reference.outcome.open_L]
    was_open = open_L[0][0, 0].nonzero()[0]
    was_shut = (~open_L[1][2, 1]).tril().nonzero()[0]
    open_L[0][0, 0, was_open[0], was_open[1]] = False
    open_L[1][2, 1, was_shut[0], was_shut[1]] = True
    flips = compare("made up", "two edges", reference, Outcome(open_L, reference.outcome.logits_BTV))
    margins = [
        reference.gate_L[0][0, 0, was_open[0], was_open[1]].abs(),
        reference.gate_L[1][2, 1, was_shut[0], was_shut[1]].abs(),
    ]
    assert (flips.opened, flips.shut, flips.flipped) == (1, 1, 2)
    assert flips.largest_margin_flipped == pytest.approx(float(max(margins)))
    assert flips.largest_logit_change == flips.divergence == 0
    assert flips.of_open == 2 / flips.open_before


def test_a_model_on_the_verge_flips(sparse: LoadedModel, text: Sequences) -> None:
    """Offsets that put many logits within rounding of zero: float32 in another order is enough."""
    with torch.no_grad():
        for block in sparse.hf.transformer.h:
            block.attn.c_attn.weight[:, :16] *= 1e-9
            block.attn.c_attn.bias[:16] = 0
    for layer in gates_of(sparse.hf):
        layer.offset_H.data.fill_(1e-12)
    audit = margin_audit(sparse, text)
    assert audit.closer_than(1e-5) > 0.9
    assert sum(part.flipped for part in audit.flips) > 0
