"""Scenarios: which heads and MLPs are replaced, by what, in many runs at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from gossamer.circuits.effect import Bools, Floats, Ints
from gossamer.circuits.runs import Group, PairedRuns, WhichRun
from gossamer.errors import GossamerError, nearest

Ablation = Literal["corrupt", "zero", "mean"]
Source = Literal["clean", "corrupt", "zero", "mean"]


def check_ablation(ablation: str) -> None:
    """Refuse a way of replacing that does not exist."""
    known = get_args(Ablation)
    if ablation not in known:
        raise GossamerError(
            f"There is no ablation {ablation!r}; choose one of {', '.join(known)}.{nearest(ablation, known)}"
        )


@dataclass(frozen=True, eq=False)
class Scenarios:
    """R interventions: the heads [R, L, H] and MLPs [R, L] that each replaces, by the activations of `source`.

    `positions_R`, if given, limits each to one position of the prompt; the others replace at every position.
    """

    heads_RLH: Bools
    mlps_RL: Bools
    source: Source
    positions_R: Ints | None = None

    def __len__(self) -> int:
        return len(self.heads_RLH)

    @property
    def first_layer_R(self) -> Ints:
        """The first layer in which each scenario changes anything; the number of layers if it changes nothing."""
        touched_RL = self.heads_RLH.any(-1) | self.mlps_RL
        n_layers = touched_RL.shape[1]
        return np.where(touched_RL.any(1), touched_RL.argmax(1), n_layers).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Values:
    """What is put in place of heads and MLPs, per layer, broadcastable to [N, S, H, E] and [N, S, D]."""

    heads_L: list[Tensor]
    mlps_L: list[Tensor]


class Replacement:
    """The edit that some scenarios of one group make."""

    def __init__(self, scenarios: Scenarios, picked_R: Ints, values: Values, group: Group) -> None:
        device = values.heads_L[0].device
        self.heads_RLH = torch.from_numpy(scenarios.heads_RLH[picked_R]).to(device)
        self.mlps_RL = torch.from_numpy(scenarios.mlps_RL[picked_R]).to(device)
        self.any_heads_L = self.heads_RLH.any(-1).any(0).tolist()
        self.any_mlp_L = self.mlps_RL.any(0).tolist()
        self.values = values
        self.position_RS: Tensor | None = None
        if scenarios.positions_R is not None:
            n_new = group.tokens.clean_BT.shape[1] - group.start
            position_R1 = torch.from_numpy(scenarios.positions_R[picked_R])[:, None] - group.start
            self.position_RS = (torch.arange(n_new)[None] == position_R1).to(device)

    def touches(self, layer: int) -> bool:
        """Whether a head or the MLP of this layer is replaced in any scenario."""
        return bool(self.any_heads_L[layer] or self.any_mlp_L[layer])

    def heads(self, layer: int, heads_RNSHE: Tensor) -> Tensor:
        """Head outputs, replaced where a scenario says so."""
        if not self.any_heads_L[layer]:
            return heads_RNSHE
        where = self.heads_RLH[:, layer, None, None, :, None]
        if self.position_RS is not None:
            where = where & self.position_RS[:, None, :, None, None]
        return torch.where(where, self.values.heads_L[layer][None], heads_RNSHE)

    def mlp(self, layer: int, written_RNSD: Tensor) -> Tensor:
        """What the MLP writes, replaced where a scenario says so."""
        if not self.any_mlp_L[layer]:
            return written_RNSD
        where = self.mlps_RL[:, layer, None, None, None]
        if self.position_RS is not None:
            where = where & self.position_RS[:, None, :, None]
        return torch.where(where, self.values.mlps_L[layer][None], written_RNSD)


@torch.no_grad()
def measure(runs: PairedRuns, scenarios: Scenarios, *, base: WhichRun) -> Floats:
    """The metric [R, N] of every scenario on every prompt (in the task's order), starting from the `base` run."""
    if scenarios.source in ("zero", "mean") and not runs.whole:
        raise GossamerError("Zero and mean ablation change every position; make the runs with whole=True.")
    metric_RN = np.zeros((len(scenarios), len(runs.task)))
    means = mean_activations(runs) if scenarios.source == "mean" else None
    done, total = 0, len(scenarios) * len(runs.task)
    for group in runs.groups:
        run, values = group.run(base), _values(group, scenarios.source, means)
        for picked_R, layer in _chunks(runs, group, scenarios):
            columns = np.array(group.tokens.rows)
            if layer == runs.parts.n_layers:
                metric_RN[np.ix_(picked_R, columns)] = run.metric_N.numpy()
            else:
                edit = Replacement(scenarios, picked_R, values, group)
                metric_RN[np.ix_(picked_R, columns)] = runs.restart(group, run, layer, len(picked_R), edit).numpy()
            done += len(picked_R) * len(columns)
            if runs.progress is not None:
                runs.progress(done, total)
    return metric_RN


def _chunks(runs: PairedRuns, group: Group, scenarios: Scenarios) -> Iterator[tuple[Ints, int]]:
    """Scenarios that begin in the same layer, as many as one forward takes."""
    first_layer_R = scenarios.first_layer_R
    if scenarios.positions_R is not None:  # a change before the first difference changes nothing
        first_layer_R = np.where(scenarios.positions_R < group.start, runs.parts.n_layers, first_layer_R)
        first_layer_R = np.where(
            scenarios.positions_R >= group.tokens.clean_BT.shape[1], runs.parts.n_layers, first_layer_R
        )
    step = max(1, runs.rows_per_forward(group.tokens.clean_BT.shape[1], group.start) // len(group.tokens))
    for layer in np.unique(first_layer_R):
        picked_R = np.flatnonzero(first_layer_R == layer)
        for first in range(0, len(picked_R), step):
            yield picked_R[first : first + step], int(layer)


def _values(group: Group, source: Source, means: Values | None) -> Values:
    if source in ("clean", "corrupt"):
        run = group.clean if source == "clean" else group.corrupt
        return Values(run.heads_LNSHE, run.mlps_LNSD)
    if source == "mean":
        assert means is not None
        return means
    zero_heads = [torch.zeros_like(heads[:1, :1]) for heads in group.clean.heads_LNSHE]
    return Values(zero_heads, [torch.zeros_like(mlp[:1, :1]) for mlp in group.clean.mlps_LNSD])


def mean_activations(runs: PairedRuns) -> Values:
    """Each head's and MLP's mean output over all corrupt prompts and all their positions."""
    n_tokens = sum(group.tokens.corrupt_BT.numel() for group in runs.groups)

    def mean(parts_G: list[Tensor]) -> Tensor:
        total = torch.stack([part.double().sum((0, 1), keepdim=True) for part in parts_G]).sum(0)
        return (total / n_tokens).to(parts_G[0].dtype)

    layers = range(runs.parts.n_layers)
    return Values(
        [mean([group.corrupt.heads_LNSHE[layer] for group in runs.groups]) for layer in layers],
        [mean([group.corrupt.mlps_LNSD[layer] for group in runs.groups]) for layer in layers],
    )
