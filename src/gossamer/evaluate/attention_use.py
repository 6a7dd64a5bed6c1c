"""What attention rows look like before and after the gate: open edges, first-token mass, entropy, head by head."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gossamer.attention import attentions_of, tape
from gossamer.corpus import Sequences
from gossamer.evaluate.losses import parts
from gossamer.evaluate.report import HeadTable, PerHead, RowUse
from gossamer.sparsify.density import count_pairs
from gossamer.sparsify.forward import logits_of, model_inputs

MOST_NUMBERS = 2**25  # recorded at once
MATRICES = 3

Sums = dict[str, Tensor]  # name to [L,H] in float64


@torch.no_grad()
def attention_use(hf: nn.Module, text: Sequences, *, role: str) -> HeadTable:
    """The per-head figures of one model, gated or not, on all of `text`."""
    heads = [mark.n_heads for mark, _ in attentions_of(hf)]
    per_row = MATRICES * text.length**2
    rows = max(1, MOST_NUMBERS // (sum(heads) * per_row))
    layers_at_once = max(1, MOST_NUMBERS // (rows * max(heads) * per_row))
    by_layer: list[Sums] = []
    for first in range(0, len(heads), layers_at_once):
        layers = range(first, min(first + layers_at_once, len(heads)))
        by_layer += _sums_of_layers(hf, text, list(layers), rows)
    sums = {name: torch.stack([layer[name] for layer in by_layer]) for name in by_layer[0]}
    return _table(sums, count_pairs(text)[0], role)


def _sums_of_layers(hf: nn.Module, text: Sequences, layers: list[int], rows: int) -> list[Sums]:
    device = next(hf.parameters()).device
    sums: list[Sums] = [defaultdict(lambda: torch.zeros((), dtype=torch.float64)) for _ in layers]
    for part in parts(text, rows):
        with tape(hf, record=("softmax", "open", "allowed"), layers=layers) as recorded:
            logits_of(hf, model_inputs(part, device), bf16=False)
        first_BQ, real_BQ = _first_tokens(part, device)
        for number, layer in enumerate(layers):
            softmax_BHQK, open_BHQK = recorded["softmax", layer], recorded["open", layer]
            found = row_sums(softmax_BHQK, open_BHQK, recorded["allowed", layer], first_BQ, real_BQ)
            for name, value_H in found.items():
                sums[number][name] = sums[number][name] + value_H.cpu()
    return sums


def _first_tokens(part: Sequences, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where each query's document begins, and which queries are not padding."""
    shape = part.ids_NT.shape
    if part.segments_NT is None:
        return torch.zeros(shape, dtype=torch.long, device=device), torch.ones(shape, dtype=torch.bool, device=device)
    segments_BQ = torch.as_tensor(part.segments_NT, device=device).long()
    same_BQK = segments_BQ[:, :, None] == segments_BQ[:, None, :]
    return same_BQK.long().argmax(-1), segments_BQ >= 0


def row_sums(
    softmax_BHQK: Tensor, open_BHQK: Tensor, allowed_BHQK: Tensor, first_BQ: Tensor, real_BQ: Tensor
) -> Mapping[str, Tensor]:
    """Sums over batch and queries, for each head [H], of everything a `RowUse` is made of."""
    n_heads = softmax_BHQK.shape[1]
    weights_BHQK = softmax_BHQK * open_BHQK
    information_BHQK = torch.special.entr(softmax_BHQK)
    carried_BHQ = weights_BHQK.sum(-1)
    n_keys_BHQ = allowed_BHQK.sum(-1).clamp(min=1).double().expand(-1, n_heads, -1)
    index_BHQ1 = first_BQ[:, None, :, None].expand(-1, n_heads, -1, 1)
    real_BHQ = real_BQ[:, None].expand(-1, n_heads, -1)
    alive_BHQ = real_BHQ & open_BHQK.any(-1) & (carried_BHQ > 0)
    safe_BHQ = carried_BHQ.clamp(min=torch.finfo(carried_BHQ.dtype).tiny)
    first_allowed_BHQ = allowed_BHQK.expand(-1, n_heads, -1, -1).gather(-1, index_BHQ1)[..., 0]

    def total(value_BHQ: Tensor, where_BHQ: Tensor) -> Tensor:
        return torch.where(where_BHQ, value_BHQ, 0).sum((0, 2), dtype=torch.float64)

    return {
        "rows": real_BHQ.sum((0, 2), dtype=torch.float64),
        "alive": alive_BHQ.sum((0, 2), dtype=torch.float64),
        "open": open_BHQK.sum((0, 2, 3), dtype=torch.float64) - total(open_BHQK.sum(-1).double(), ~real_BHQ),
        "carried": total(carried_BHQ, real_BHQ),
        "first_before": total(softmax_BHQK.gather(-1, index_BHQ1)[..., 0], real_BHQ),
        "first_after": total(weights_BHQK.gather(-1, index_BHQ1)[..., 0], real_BHQ),
        "first_uniform": total(first_allowed_BHQ / n_keys_BHQ, real_BHQ),
        "entropy_before": total(information_BHQK.sum(-1), real_BHQ),
        "entropy_after": total((information_BHQK * open_BHQK).sum(-1) / safe_BHQ + safe_BHQ.log(), alive_BHQ),
        "entropy_uniform": total(n_keys_BHQ.log(), real_BHQ),
        "entropy_uniform_after": total(n_keys_BHQ.log(), alive_BHQ),
    }


def _table(sums: Sums, causal_pairs: int, role: str) -> HeadTable:
    rows_LH, alive_LH = sums["rows"], sums["alive"]
    means = {name: sums[name] / rows_LH for name in ("first_before", "first_after", "entropy_before", "carried")}
    after_LH = torch.where(alive_LH > 0, sums["entropy_after"] / alive_LH.clamp(min=1), torch.nan)
    return HeadTable(
        role=role,
        rows=_all_heads({name: float(value.sum()) for name, value in sums.items()}),
        open_edges=_plain(sums["open"]),
        of_causal_pairs=_plain(sums["open"] / causal_pairs),
        entropy_after=_plain(after_LH),
        **{name: _plain(value_LH) for name, value_LH in means.items()},
    )


def _all_heads(sums: Mapping[str, float]) -> RowUse:
    rows, alive = sums["rows"], sums["alive"]
    always = ("first_before", "first_after", "first_uniform", "entropy_before", "entropy_uniform", "carried")
    return RowUse(
        **{name: sums[name] / rows for name in always},
        entropy_after=sums["entropy_after"] / alive if alive else None,
        entropy_uniform_after=sums["entropy_uniform_after"] / alive if alive else None,
        empty_rows=1 - alive / rows,
    )


def _plain(value_LH: Tensor) -> PerHead:
    return tuple(tuple(None if value != value else value for value in row) for row in value_LH.tolist())
