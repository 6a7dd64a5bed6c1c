"""The gate-margin audit: how close gate logits are to zero, and which edges flip when the text is computed otherwise.

Exact arithmetic would flip nothing in a cache, beside padding or in another batch; rounding does where |g| is tiny.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.attention import tape
from gossamer.corpus import Sequences
from gossamer.evaluate.report import Flips, MarginAudit
from gossamer.models import LoadedModel

EDGES = tuple(10.0 ** (exponent / 4) for exponent in range(-24, 13))  # 1e-6 … 1e3, four bins a decade
MOST_NUMBERS = 2**25  # gate logits held at once
PADDING_SHARE = 8  # one in so many positions


@dataclass(frozen=True)
class Outcome:
    """The open edges [B,H,Q,K] of every layer, and the logits, of one way to compute a text."""

    open_L: list[Tensor]
    logits_BTV: Tensor


@dataclass(frozen=True)
class Reference:
    """One forward over whole rows: what the other ways are compared with."""

    ids_BT: Tensor
    outcome: Outcome
    gate_L: list[Tensor]  # logits, minus infinity on forbidden pairs


@torch.no_grad()
def margin_audit(sparse: LoadedModel, text: Sequences, *, tell: Callable[[str], None] | None = None) -> MarginAudit:
    """Audit some sequences of the text, each read as one document."""
    heads = sparse.anatomy.n_layers * sparse.anatomy.n_heads
    rows = max(1, min(len(text), MOST_NUMBERS // (heads * text.length**2)))
    ids_BT = torch.as_tensor(np.ascontiguousarray(text.ids_NT[:rows], dtype=np.int64)).to(sparse.device)
    reference = refer(sparse.hf, ids_BT)
    open_counts, shut_counts = histogram(reference.gate_L, reference.outcome.open_L)
    flips = []
    for variant in (_bf16, _cached, _one_by_one, _left_padded):
        if tell is not None:
            tell(f"gate margins: {variant.__name__.strip('_').replace('_', ' ')}")
        if (found := variant(sparse, reference)) is not None:
            flips.append(found)
    pairs = sum(int(gate_BHQK.isfinite().sum()) for gate_BHQK in reference.gate_L)
    return MarginAudit(rows, EDGES, open_counts, shut_counts, pairs, tuple(flips))


@torch.no_grad()
def refer(hf: nn.Module, ids_BT: Tensor) -> Reference:
    """One forward over whole rows, with everything that is compared."""
    with tape(hf, record=("gate", "open")) as recorded:
        logits_BTV = hf(input_ids=ids_BT, use_cache=False).logits
    layers = recorded.layers("open")
    outcome = Outcome([recorded["open", layer] for layer in layers], logits_BTV)
    return Reference(ids_BT, outcome, [recorded["gate", layer] for layer in layers])


def histogram(gate_L: list[Tensor], open_L: list[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Allowed pairs by |gate logit|, open and shut; what lies outside falls into the first or the last bin."""
    edges = torch.tensor(EDGES[1:-1], dtype=torch.float64)
    counts = torch.zeros(2, len(EDGES) - 1, dtype=torch.long)
    for gate_BHQK, open_BHQK in zip(gate_L, open_L, strict=True):
        allowed_BHQK = gate_BHQK.isfinite()
        for row, chosen_BHQK in enumerate((open_BHQK, ~open_BHQK & allowed_BHQK)):
            size = gate_BHQK[chosen_BHQK].abs().cpu()
            bins = torch.bucketize(size, edges.to(size.dtype), right=True)
            counts[row] += torch.bincount(bins, minlength=counts.shape[1])
    opened, shut = counts.tolist()
    return tuple(opened), tuple(shut)


def compare(name: str, what: str, reference: Reference, other: Outcome) -> Flips:
    """Count the edges that differ, and how much the logits moved."""
    opened = shut = before = pairs = 0
    margin = -math.inf
    for gate_BHQK, was_BHQK, is_BHQK in zip(reference.gate_L, reference.outcome.open_L, other.open_L, strict=True):
        opened += int((is_BHQK & ~was_BHQK).sum())
        shut += int((was_BHQK & ~is_BHQK).sum())
        before += int(was_BHQK.sum())
        pairs += int(gate_BHQK.isfinite().sum())
        flipped = gate_BHQK[is_BHQK != was_BHQK].abs()
        margin = max(margin, float(flipped.max())) if len(flipped) else margin
    one, two = reference.outcome.logits_BTV.double(), other.logits_BTV.double()
    log_one, log_two = one.log_softmax(-1), two.log_softmax(-1)
    return Flips(
        name=name,
        what=what,
        pairs=pairs,
        open_before=before,
        opened=opened,
        shut=shut,
        largest_margin_flipped=None if margin == -math.inf else margin,
        largest_logit_change=float((one - two).abs().max()),
        divergence=float((log_one.exp() * (log_one - log_two)).sum(-1).mean()),
    )


def _bf16(sparse: LoadedModel, reference: Reference) -> Flips:
    low = copy.deepcopy(sparse.hf).to(torch.bfloat16)
    outcome = refer(low, reference.ids_BT).outcome
    return compare("bfloat16", "weights and activations in bfloat16, gates' offsets in float32", reference, outcome)


def _cached(sparse: LoadedModel, reference: Reference) -> Flips:
    """One token at a time with the key-value cache."""
    ids_BT = reference.ids_BT
    pieces, cache = [], None
    with tape(sparse.hf, record=("open",)) as recorded:
        for position in range(ids_BT.shape[1]):
            step = sparse.hf(input_ids=ids_BT[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            pieces.append(step.logits)
    layers = recorded.layers("open")
    open_L = [_stacked(recorded.calls("open", layer), ids_BT.shape[1]) for layer in layers]
    outcome = Outcome(open_L, torch.cat(pieces, 1))
    return compare("cache", "one token at a time with the key-value cache", reference, outcome)


def _stacked(rows: list[Tensor], length: int) -> Tensor:
    """Rows [B,H,1,k] of a growing cache as one pattern [B,H,Q,K]; a cache that forgets keeps the latest keys."""
    pattern_BHQK = torch.zeros(*rows[0].shape[:2], length, length, dtype=torch.bool, device=rows[0].device)
    for position, row_BH1K in enumerate(rows):
        width = min(row_BH1K.shape[-1], position + 1)
        pattern_BHQK[:, :, position, position + 1 - width : position + 1] = row_BH1K[:, :, 0, -width:]
    return pattern_BHQK


def _one_by_one(sparse: LoadedModel, reference: Reference) -> Flips | None:
    """Each row alone instead of all in one batch."""
    if len(reference.ids_BT) < 2:
        return None
    alone = [refer(sparse.hf, ids_BT).outcome for ids_BT in reference.ids_BT.split(1)]
    open_L = [torch.cat(layers) for layers in zip(*(outcome.open_L for outcome in alone), strict=True)]
    outcome = Outcome(open_L, torch.cat([outcome.logits_BTV for outcome in alone]))
    return compare("single rows", "each sequence alone instead of in a batch", reference, outcome)


def _left_padded(sparse: LoadedModel, reference: Reference) -> Flips | None:
    """Padding in front, masked out; rows are shortened where the model has no room for it."""
    length = reference.ids_BT.shape[1]
    n_padding = max(1, length // PADDING_SHARE)
    room = sparse.room_after(length + n_padding)
    if room is not None and room < 0:
        if length + room < 2:
            return None
        reference = refer(sparse.hf, reference.ids_BT[:, : length + room])
    outcome = padded(sparse.hf, reference.ids_BT, n_padding)
    return compare("left padding", f"{n_padding} padding tokens in front of every sequence", reference, outcome)


@torch.no_grad()
def padded(hf: nn.Module, ids_BT: Tensor, n_padding: int) -> Outcome:
    """The rows behind `n_padding` masked tokens; patterns and logits without them."""
    rows, length = ids_BT.shape
    ids = torch.cat([ids_BT.new_zeros(rows, n_padding), ids_BT], 1)
    real = torch.cat([ids_BT.new_zeros(rows, n_padding), ids_BT.new_ones(rows, length)], 1)
    positions = (real.cumsum(1) - 1).clamp(min=0)
    with tape(hf, record=("open",)) as recorded:
        logits_BTV = hf(input_ids=ids, attention_mask=real, position_ids=positions, use_cache=False).logits
    here = slice(n_padding, None)
    open_L = [recorded["open", layer][:, :, here, here] for layer in recorded.layers("open")]
    return Outcome(open_L, logits_BTV[:, here])
