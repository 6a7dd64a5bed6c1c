"""The tape: what one forward should record and replace, seen from inside the attention function.

    with tape(model, record=["weights"], replace=[HeadOutput(3, [5], 0.0)]) as t:
        model(ids)
    t["weights", 3]                      # [B,H,Q,K], the weights that values were multiplied with

A long text's matrices need not exist at once: `watch` is called with every tile of every layer as it is computed.

A tape belongs to one model and one context (thread or task); two never see each other's. A record or a replacement
that never fired is an error at the end of the block. When no tape is open, nothing is done and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor, nn

from gossamer.attention.call import AttentionCall, Tile, Watcher
from gossamer.attention.reference import Edits, Extras
from gossamer.attention.sampling import refuse_checkpointing
from gossamer.errors import GossamerError, nearest

MATRIX_RECORDS = ("weights", "softmax", "scores", "gate", "open")
RECORDS = (*MATRIX_RECORDS, "allowed", "q", "k", "v", "head_output")


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """Put `value` (broadcast to [rows, positions, heads, E]) in place of heads' outputs before the projection."""

    layer: int
    heads: Sequence[int] | int | None
    value: Tensor | float
    positions: Sequence[int] | Tensor | int | None = None
    rows: Sequence[int] | Tensor | int | None = None


@dataclass(frozen=True, eq=False)
class Weights:
    """Multiply values with these weights [B,H,Q,K] instead of the layer's own; `heads` limits it to some heads."""

    layer: int
    weights_BHQK: Tensor
    heads: Sequence[int] | int | None = None


@dataclass(frozen=True, eq=False)
class ForceOpen:
    """Open the marked edges, whatever their gates say (pairs that are not allowed stay shut)."""

    layer: int
    mask_BHQK: Tensor


@dataclass(frozen=True, eq=False)
class ForceShut:
    """Shut the marked edges; also works on a model without gates."""

    layer: int
    mask_BHQK: Tensor


@dataclass(frozen=True, eq=False)
class FrozenGates:
    """Use this pattern of open edges instead of the gates' own decision."""

    layer: int
    open_BHQK: Tensor


# Called with the layer and then as a `Watcher` is.
TapeWatcher = Callable[[int, Tile, Tensor, Tensor], None]
Replacement = HeadOutput | Weights | ForceOpen | ForceShut | FrozenGates


@dataclass(eq=False)
class Tape:
    """What was recorded: `t[name, layer]`, or `t.calls(name, layer)` when several forwards ran."""

    recorded: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    wanted: set[tuple[str, int]] = field(default_factory=set)
    by_module: dict[int, LayerTape] = field(default_factory=dict)

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """The one tensor recorded under (name, layer)."""
        calls = self.calls(*key)
        if len(calls) > 1:
            raise GossamerError(
                f"{len(calls)} forwards ran inside the tape, so [{key[0]!r}, {key[1]}] is not one tensor; use"
                f" calls({key[0]!r}, {key[1]})."
            )
        return calls[0]

    def calls(self, name: str, layer: int) -> list[Tensor]:
        """Every tensor recorded under (name, layer), one a forward."""
        if (name, layer) not in self.wanted:
            raise GossamerError(
                f"This tape does not record {name!r} in layer {layer}; ask for it when opening the tape."
            )
        if (name, layer) not in self.recorded:
            raise GossamerError(f"No forward has recorded {name!r} in layer {layer} yet.")
        return self.recorded[name, layer]

    def layers(self, name: str) -> list[int]:
        """The layers in which `name` was recorded."""
        return sorted(layer for recorded, layer in self.recorded if recorded == name)


@dataclass(eq=False)
class LayerTape:
    """One layer's part of a tape."""

    tape: Tape
    layer: int
    records: frozenset[str]
    replacements: list[Replacement]
    fired: set[int] = field(default_factory=set)
    watch: TapeWatcher | None = None
    was_shown: bool = False

    @property
    def needs_matrices(self) -> bool:
        """Whether [B,H,Q,K] tensors must exist; otherwise the fast path serves the tape too."""
        edited = any(not isinstance(replacement, HeadOutput) for replacement in self.replacements)
        return edited or not self.records.isdisjoint(MATRIX_RECORDS)

    def edits(self, call: AttentionCall) -> Edits:
        """The layer's replacements of edges and weights, checked and broadcast."""
        batch, heads, n_query, _ = call.query_BHQE.shape
        shape = (batch, heads, n_query, call.key_BHKE.shape[2])
        edits = Edits()
        for index, replacement in enumerate(self.replacements):
            if not isinstance(replacement, HeadOutput):
                edits = merge(edits, _edit(replacement, shape, call.query_BHQE.device))
                self.fired.add(index)
        return edits


def _edit(
    replacement: Weights | ForceOpen | ForceShut | FrozenGates, shape: tuple[int, ...], device: torch.device
) -> Edits:
    if isinstance(replacement, Weights):
        replaced_H = torch.zeros(shape[1], dtype=torch.bool, device=device)
        replaced_H[_indices(replacement.heads, shape[1], "head", device)] = True
        weights_BHQK = replacement.weights_BHQK.to(device)
        if weights_BHQK.dim() == 4 and weights_BHQK.shape[1] not in (1, shape[1]) and replacement.heads is not None:
            full = weights_BHQK.new_zeros(weights_BHQK.shape[0], *shape[1:])
            full[:, replaced_H] = weights_BHQK
            weights_BHQK = full
        return Edits(weights_BHQK=_broadcast(weights_BHQK, shape, replacement), replaced_H=replaced_H)
    if isinstance(replacement, FrozenGates):
        return Edits(frozen_open_BHQK=_broadcast(replacement.open_BHQK.to(device), shape, replacement))
    mask_BHQK = _broadcast(replacement.mask_BHQK.to(device), shape, replacement)
    if mask_BHQK.dtype != torch.bool:
        raise GossamerError(
            f"{type(replacement).__name__} for layer {replacement.layer} needs a boolean mask of edges."
        )
    if isinstance(replacement, ForceOpen):
        return Edits(force_open_BHQK=mask_BHQK)
    return Edits(force_shut_BHQK=mask_BHQK)


def _broadcast(tensor: Tensor, shape: tuple[int, ...], replacement: Replacement) -> Tensor:
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise GossamerError(
            f"{type(replacement).__name__} for layer {replacement.layer} has shape {list(tensor.shape)}, which does not"
            f" fit the attention's [batch, head, query, key] = {list(shape)}."
        ) from None


def merge(first: Edits, second: Edits) -> Edits:
    """Both edits at once; where they contradict, the second wins (and shut wins over open)."""

    def either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        return one | other if one is not None and other is not None else (one if other is None else other)

    weights, replaced = second.weights_BHQK, second.replaced_H
    if weights is None:
        weights, replaced = first.weights_BHQK, first.replaced_H
    elif first.weights_BHQK is not None:
        assert replaced is not None
        weights = torch.where(replaced[:, None, None], weights, first.weights_BHQK)
        replaced = either(first.replaced_H, replaced)
    frozen = first.frozen_open_BHQK if second.frozen_open_BHQK is None else second.frozen_open_BHQK
    return Edits(
        frozen,
        either(first.force_open_BHQK, second.force_open_BHQK),
        either(first.force_shut_BHQK, second.force_shut_BHQK),
        weights,
        replaced,
    )


_active: ContextVar[tuple[Tape, ...]] = ContextVar("gossamer_tapes", default=())


def active_tapes(module: nn.Module) -> list[LayerTape]:
    """This module's part of every open tape that has something to do with it, outermost first."""
    tapes = [tape.by_module[id(module)] for tape in _active.get() if id(module) in tape.by_module]
    return [layer for layer in tapes if layer.records or layer.replacements or layer.watch]


def merged_edits(tapes: Sequence[LayerTape], call: AttentionCall) -> Edits:
    """The edits of all open tapes."""
    return reduce(merge, [layer.edits(call) for layer in tapes], Edits())


def watcher_of(tapes: Sequence[LayerTape]) -> Watcher | None:
    """One watcher for all tapes that watch this layer."""
    watching = [layer for layer in tapes if layer.watch is not None]
    if not watching:
        return None

    def show(tile: Tile, softmax_BHQK: Tensor, open_BHQK: Tensor) -> None:
        for layer in watching:
            assert layer.watch is not None
            layer.was_shown = True
            layer.watch(layer.layer, tile, softmax_BHQK, open_BHQK)

    return show


def show_whole(call: AttentionCall, edits: Edits, extras: Extras) -> None:
    """Where matrices exist anyway, a watcher sees all of them as one tile."""
    if call.watch is None:
        return
    if edits.weights_BHQK is not None:
        raise GossamerError(
            "A tape cannot watch edges while another replaces the weights they have; use one of the two."
        )
    whole = Tile(0, *(slice(0, size) for size in extras.softmax_BHQK.shape))
    call.watch(whole, extras.softmax_BHQK, extras.open_BHQK)


def replace_heads(tapes: Sequence[LayerTape], out_BQHE: Tensor) -> Tensor:
    """Outputs of heads with the tapes' replacements put in."""
    device = out_BQHE.device
    for layer in tapes:
        for index, replacement in enumerate(layer.replacements):
            if not isinstance(replacement, HeadOutput):
                continue
            rows = _indices(replacement.rows, out_BQHE.shape[0], "batch row", device)
            positions = _indices(replacement.positions, out_BQHE.shape[1], "position", device)
            heads = _indices(replacement.heads, out_BQHE.shape[2], "head", device)
            value = torch.as_tensor(replacement.value, device=device).to(out_BQHE.dtype)
            shape = (len(rows), len(positions), len(heads), out_BQHE.shape[3])
            try:
                value = value.expand(shape)
            except RuntimeError:
                raise GossamerError(
                    f"HeadOutput for layer {replacement.layer} has a value of shape {list(value.shape)}, which does not"
                    f" fit [rows, positions, heads, head width] = {list(shape)}."
                ) from None
            out_BQHE = out_BQHE.clone()
            out_BQHE[rows[:, None, None], positions[:, None], heads] = value
            layer.fired.add(index)
    return out_BQHE


def record(tapes: Sequence[LayerTape], call: AttentionCall, out_BQHE: Tensor, extras: Extras | None) -> None:
    """Keep what the tapes asked for; tensors stay in the graph."""
    for layer in tapes:
        for name in layer.records:
            layer.tape.recorded.setdefault((name, layer.layer), []).append(_value(name, call, out_BQHE, extras))


def _value(name: str, call: AttentionCall, out_BQHE: Tensor, extras: Extras | None) -> Tensor:
    small = {"q": call.query_BHQE, "k": call.key_BHKE, "v": call.value_BHKE, "head_output": out_BQHE}
    if name in small:
        return small[name]
    allowed_BHQK = call.explicit_allowed()
    if name == "allowed":
        return allowed_BHQK.expand(call.query_BHQE.shape[0], -1, -1, -1)
    assert extras is not None
    if name == "open":
        return extras.open_BHQK.detach() > 0
    if name in ("scores", "gate"):
        value = extras.scores_BHQK if name == "scores" else extras.gate_BHQK
        if value is None:
            raise GossamerError("This model has no gates, so a tape cannot record 'gate'; record 'scores' instead.")
        return value.masked_fill(~allowed_BHQK, -torch.inf)
    return extras.weights_BHQK if name == "weights" else extras.softmax_BHQK


def _indices(
    wanted: Sequence[int] | Tensor | int | None, size: int, what: str, device: torch.device | None = None
) -> Tensor:
    if wanted is None:
        return torch.arange(size, device=device)
    indices = torch.as_tensor(wanted, device=device).reshape(-1)
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise GossamerError(f"A replacement names its {what}s by whole numbers, not by {indices.dtype} values.")
    if len(indices) == 0 or int(indices.min()) < -size or int(indices.max()) >= size:
        raise GossamerError(f"A replacement names {what} {indices.tolist()} but there are {size}, counted from 0.")
    return indices % size


@contextmanager
def tape(
    model: nn.Module,
    *,
    record: Sequence[str] = (),
    replace: Sequence[Replacement] = (),
    layers: Sequence[int] | None = None,
    watch: TapeWatcher | None = None,
) -> Iterator[Tape]:
    """Record and watch (in `layers`, default all) and replace during the forwards of this block.

    Names to record: weights (after the gate), softmax (before it), scores, gate (its logits), open, allowed,
    q, k, v (heads repeated) and head_output [B,Q,H,E].
    """
    opened = _open(model, record, replace, layers, watch)
    token = _active.set((*_active.get(), opened))
    try:
        yield opened
    finally:
        _active.reset(token)
    _require_fired(opened)


def _open(
    model: nn.Module,
    record: Sequence[str],
    replace: Sequence[Replacement],
    layers: Sequence[int] | None,
    watch: TapeWatcher | None,
) -> Tape:
    from gossamer.attention.gates import attentions_of

    record = [record] if isinstance(record, str) else record
    for name in record:
        if name not in RECORDS:
            raise GossamerError(
                f"A tape cannot record {name!r}; it knows {', '.join(RECORDS)}.{nearest(name, RECORDS)}"
            )
    refuse_checkpointing(model, "a tape")
    modules = {mark.layer: module for mark, module in attentions_of(model)}
    if not modules:
        raise GossamerError(f"{type(model).__name__} does not run on Gossamer's attention; load it with gossamer.load.")
    chosen = set(modules) if layers is None else set(layers)
    for layer in [*sorted(chosen), *(replacement.layer for replacement in replace)]:
        if layer not in modules:
            raise GossamerError(f"The tape names layer {layer} but the model has layers 0 to {max(modules)}.")
    opened = Tape(wanted={(name, layer) for name in record for layer in chosen})
    for layer, module in modules.items():
        names = frozenset(record) if layer in chosen else frozenset()
        mine = [replacement for replacement in replace if replacement.layer == layer]
        opened.by_module[id(module)] = LayerTape(opened, layer, names, mine, watch=watch if layer in chosen else None)
    return opened


def _require_fired(opened: Tape) -> None:
    missing = sorted(opened.wanted - set(opened.recorded), key=lambda pair: (pair[1], pair[0]))
    if missing:
        name, layer = missing[0]
        raise GossamerError(
            f"Nothing was recorded for {name!r} in layer {layer}: no forward of this model reached it inside the tape."
        )
    for part in opened.by_module.values():
        if part.watch is not None and not part.was_shown:
            raise GossamerError(f"Nothing was watched in layer {part.layer}: no forward of this model reached it.")
        for index, replacement in enumerate(part.replacements):
            if index not in part.fired:
                raise GossamerError(
                    f"The replacement {type(replacement).__name__} in layer {part.layer} never fired: no forward of"
                    " this model reached it inside the tape."
                )
