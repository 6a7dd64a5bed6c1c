"""One layer by its formulas: rows, gradients, noise; the fast path on every combination of features."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer.attention import AttentionCall, GateTerms, blocked_attention, gated_attention
from gossamer.attention import call as call_module
from gossamer.attention.call import tiles_of
from gossamer.attention.reference import noise_of
from gossamer.attention.sampling import LayerNoise, NoisePool

B, H, T, E = 2, 3, 37, 6
KINDS = ("logit", "mass", "flow")
OFFSET = {"logit": 0.3, "mass": 2.8, "flow": 2.8}


UNITS = torch.tensor([0.4, 1.0, 3.0], dtype=torch.float64)


def make_noise(tau: float = 0.7, *, step: int = 2, layer: int = 3, forward: int = 0, units: bool = False) -> LayerNoise:
    return LayerNoise(tau, 0.8, 1.3, NoisePool(1, step), layer, forward, UNITS if units else None)


def make_call(
    kind: str | None,
    *,
    noise: LayerNoise | None = None,
    masked: bool = False,
    softcap: float | None = None,
    sink: bool = False,
    length: int = T,
    queries: int | None = None,
) -> tuple[AttentionCall, list[Tensor]]:
    """A call in float64 and its leaves: q, k, v, offsets, query term, key term, sink."""
    generator = torch.Generator().manual_seed(5)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    n_query = length if queries is None else queries
    q, k, v = leaf(B, H, n_query, E), leaf(B, H, length, E), leaf(B, H, length, E + 2)
    offset_H, query_BQ, key_BHK, sink_H = leaf(H), leaf(B, n_query), leaf(B, H, length), leaf(H)
    with torch.no_grad():
        offset_H.add_(OFFSET.get(kind or "logit", 0.0))
    gate = None
    if kind is not None:
        flow = kind == "flow"
        gate = GateTerms(offset_H, kind != "logit", query_BQ if flow else None, key_BHK if flow else None)
    allowed = None
    if masked:
        allowed = torch.ones(n_query, length, dtype=torch.bool).tril(length - n_query).repeat(B, 1, 1, 1)
        allowed = allowed & (torch.rand(B, 1, 1, length, generator=generator) > 0.2)
        allowed[0, :, :, : length // 2] = False  # the first half of one row: queries without any key
    call = AttentionCall(q, k, v, 0.7, allowed, gate, noise, softcap, sink_H if sink else None)
    return call, [q, k, v, offset_H, query_BQ, key_BHK, sink_H]


def outcome(fast: bool, call: AttentionCall, leaves: list[Tensor]) -> list[Tensor | None]:
    for leaf in leaves:
        leaf.grad = None
    if fast:
        out, expected_H, open_H = blocked_attention(call)
    else:
        out, extras = gated_attention(call)
        expected_H, open_H = extras.expected_open_H, extras.open_H
    generator = torch.Generator().manual_seed(9)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    if expected_H is not None:
        loss = loss + (expected_H * torch.randn(H, generator=generator, dtype=out.dtype)).sum() * 0.3
    loss.backward()
    sums = [expected_H, open_H] if call.noise is not None else [None, None]
    return [t if t is None else t.detach().clone() for t in (out, *sums, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("tile_elements", [700, 256 * 1024])
def test_fast_path_equals_reference_with_every_feature(
    kind: str | None, tile_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "TILE_ELEMENTS", tile_elements)
    shapes: list[dict[str, Any]] = [{}, {"masked": True}, {"masked": True, "queries": 3}, {"queries": 1}]
    noises = [None, make_noise(0.0), make_noise(0.7), make_noise(0.7, units=True)]
    for shape, noise, softcap, sink in itertools.product(shapes, noises, (None, 2.0), (False, True)):
        if kind is None and noise is not None:
            continue
        call, leaves = make_call(kind, noise=noise, softcap=softcap, sink=sink, **shape)
        fast, slow = outcome(True, call, leaves), outcome(False, call, leaves)
        for index, (one, other) in enumerate(zip(fast, slow, strict=True)):
            assert (one is None) == (other is None), (shape, noise, softcap, sink, index)
            if one is not None and other is not None:
                assert torch.isfinite(other).all()
                assert (one - other).abs().max() < 1e-9, (shape, noise, softcap, sink, index)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_sums_to_one_minus_its_closed_mass(kind: str, sink: bool) -> None:
    call, _ = make_call(kind, masked=True, sink=sink)
    _, extras = gated_attention(call)
    allowed_BHQK = call.explicit_allowed().expand_as(extras.softmax_BHQK)
    is_open = extras.open_BHQK > 0
    assert 0.1 < is_open.sum() / allowed_BHQK.sum() < 0.9
    assert not (is_open & ~allowed_BHQK).any()
    closed_BHQ = (extras.softmax_BHQK * ~is_open).sum(-1)
    sink_BHQ = torch.zeros_like(closed_BHQ)
    if call.sink_H is not None:
        scores = extras.scores_BHQK.masked_fill(~allowed_BHQK, -torch.inf)
        sink_B1 = call.sink_H[None, :, None].expand_as(closed_BHQ)
        sink_BHQ = torch.cat([scores, sink_B1[..., None]], -1).softmax(-1)[..., -1]
    empty_BHQ = ~allowed_BHQK.any(-1)
    assert empty_BHQ.any()
    assert not empty_BHQ.all()
    rows = extras.weights_BHQK.sum(-1)
    assert (rows - (1 - closed_BHQ - sink_BHQ))[~empty_BHQ].abs().max() < 1e-12
    assert (rows[empty_BHQ] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_an_all_closed_row_gives_zeros(kind: str) -> None:
    call, leaves = make_call(kind, masked=True)
    with torch.no_grad():
        leaves[3].sub_(1e4)
    for result in (gated_attention(call)[0], blocked_attention(call)[0]):
        assert (result == 0).all()
        result.sum().backward()
        assert all(leaf.grad is None or torch.isfinite(leaf.grad).all() for leaf in leaves)


@pytest.mark.parametrize("kind", KINDS)
def test_straight_through_gradient_is_the_formula(kind: str) -> None:
    """d out / d offset_h = sum over edges of p v sigmoid'(z / tau_b) / tau_b, written out by hand."""
    noise = make_noise()
    call, leaves = make_call(kind, noise=noise)
    grad_BQHE = torch.randn(B, T, H, E + 2, dtype=torch.float64)
    out, _, _ = blocked_attention(call)
    found_H = torch.autograd.grad(out, leaves[3], grad_BQHE)[0]
    with torch.no_grad():
        _, extras = gated_attention(call)
        assert extras.gate_BHQK is not None
        z = extras.gate_BHQK + noise.tau * noise_of(call, noise, extras.gate_BHQK)
        slope = torch.sigmoid(z / noise.tau_backward) * torch.sigmoid(-z / noise.tau_backward) / noise.tau_backward
        value_of_edge = torch.einsum("bqhe,bhke->bhqk", grad_BQHE, call.value_BHKE)
        share = (z > 0).double().mean()
        assert 0.1 < share < 0.9
        expected_H = (extras.softmax_BHQK * slope * value_of_edge).sum((0, 2, 3))
    assert (found_H - expected_H).abs().max() < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sink", [False, True])
def test_expected_density_gradient_equals_finite_differences(kind: str, sink: bool) -> None:
    call, leaves = make_call(kind, noise=make_noise(0.0), sink=sink, softcap=2.0, length=5)

    def expected(*tensors: Tensor) -> Tensor:
        q, k, v, offset_H, query_BQ, key_BHK, sink_H = tensors
        flow = kind == "flow"
        gate = GateTerms(offset_H, kind != "logit", query_BQ if flow else None, key_BHK if flow else None)
        return blocked_attention(AttentionCall(q, k, v, 0.7, None, gate, call.noise, 2.0, sink_H if sink else None))[1]

    assert torch.autograd.gradcheck(expected, tuple(leaves), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_with_constant_gates_gradients_equal_finite_differences(kind: str) -> None:
    call, leaves = make_call(kind, length=5, sink=True)
    assert call.gate is not None
    _, extras = gated_attention(call)
    assert extras.gate_BHQK is not None
    assert extras.gate_BHQK.abs().min() > 1e-4, "no gate may flip within the differences' step"

    def out(q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor) -> Tensor:
        return blocked_attention(AttentionCall(q, k, v, 0.7, None, call.gate, sink_H=sink_H))[0]

    assert torch.autograd.gradcheck(out, (*leaves[:3], leaves[6]), eps=1e-6, atol=1e-6)


def test_a_value_behind_a_closed_edge_has_no_effect() -> None:
    call, leaves = make_call("logit")
    _, extras = gated_attention(call)
    before, _, _ = blocked_attention(call)
    with torch.no_grad():
        leaves[2][0, 1, 4] += 100.0  # a logit gate does not look at values
    after, _, _ = blocked_attention(call)
    closed_Q = extras.open_BHQK[0, 1, :, 4] == 0
    assert closed_Q[5:].any()
    assert not closed_Q[5:].all()
    assert torch.equal(before[0, closed_Q, 1], after[0, closed_Q, 1])
    assert (before[0, ~closed_Q, 1] != after[0, ~closed_Q, 1]).all()


def test_noise_is_logistic_and_a_function_of_its_counters_only() -> None:
    call, _ = make_call("logit", length=64)
    like = torch.zeros(B, H, 64, 64, dtype=torch.float64)
    lower = torch.ones(64, 64).tril().bool()

    def drawn(**counters: int) -> Tensor:
        return noise_of(call, make_noise(1.0, **counters), like)[..., lower]

    first = drawn()
    assert torch.equal(first, drawn())
    for changed in ({"step": 3}, {"layer": 4}, {"forward": 1}):
        other = drawn(**changed)
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 0.05
    assert abs(first.mean()) < 0.1
    assert abs(first.std() - math.pi / math.sqrt(3)) < 0.1


def test_an_edge_is_open_with_probability_sigmoid_of_g_over_tau() -> None:
    q = torch.zeros(1, 1, 256, 4)
    call = AttentionCall(q, q, q, 1.0, None, GateTerms(torch.tensor([0.5])))
    opened, allowed = 0.0, 0
    for step in range(4):
        noise = LayerNoise(0.6, 1.0, 0.6, NoisePool(0, step), 0, 0)
        noisy = AttentionCall(q, q, q, 1.0, None, call.gate, noise)
        _, expected_H, open_H = blocked_attention(noisy)
        opened, allowed = opened + float(open_H.sum()), allowed + int(noisy.count_allowed())
        assert float(expected_H.sum()) / int(noisy.count_allowed()) == pytest.approx(
            1 / (1 + math.exp(-0.5 / 0.6)), rel=1e-4
        )
    assert opened / allowed == pytest.approx(1 / (1 + math.exp(-0.5 / 0.6)), abs=0.01)


def test_tiles_cover_every_allowed_pair_once() -> None:
    for masked in (False, True):
        call, _ = make_call("logit", masked=masked, length=130)
        seen = torch.zeros(B, H, 130, 130)
        for tile in tiles_of(call):
            seen[tile.batch, tile.head, tile.query, tile.key] += 1
        allowed = call.explicit_allowed().expand_as(seen)
        assert seen.max() == 1
        assert (seen[allowed] == 1).all()
        assert seen.sum() < 0.8 * seen.numel()
        assert int(call.count_allowed()) == int(allowed.sum())


@pytest.mark.parametrize("kind", [None, *KINDS])
@pytest.mark.parametrize("first", [40, 70])
def test_blocks_of_queries_without_any_key(kind: str | None, first: int) -> None:
    call, leaves = make_call(kind, length=70, sink=True, noise=make_noise() if kind else None)
    allowed = torch.ones(70, 70, dtype=torch.bool).tril()[None, None].clone()
    allowed[:, :, :first] = False
    call = replace(call, allowed_BHQK=allowed)
    for one, other in zip(outcome(True, call, leaves), outcome(False, call, leaves), strict=True):
        if one is not None and other is not None:
            assert torch.isfinite(one).all()
            assert (one - other).abs().max() < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_size_query_by_key_is_kept_for_the_backward(kind: str) -> None:
    call, _ = make_call(kind, noise=make_noise(), length=300)
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        blocked_attention(call)
    assert 0 < max(kept) < 300 * 300
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        gated_attention(call)
    assert max(kept) >= 300 * 300


@pytest.mark.parametrize("kind", KINDS)
def test_units_scale_temperatures_and_leave_open_what_is_open(kind: str) -> None:
    without, _ = make_call(kind, noise=make_noise(0.0))
    scaled, _ = make_call(kind, noise=make_noise(0.0, units=True))
    plain, in_units = gated_attention(without)[1], gated_attention(scaled)[1]
    assert torch.equal(plain.open_BHQK, in_units.open_BHQK)
    assert 0.1 < plain.open_BHQK.sum() / without.explicit_allowed().sum() / B / H < 0.9
    for head, unit in enumerate(UNITS.tolist()):
        noise = LayerNoise(0.0, 0.8 * unit, 1.3 * unit, NoisePool(1, 2), 3, 0)
        alone = gated_attention(make_call(kind, noise=noise)[0])[1]
        assert alone.expected_open_H is not None
        assert in_units.expected_open_H is not None
        assert torch.allclose(alone.expected_open_H[head], in_units.expected_open_H[head], rtol=1e-12)
