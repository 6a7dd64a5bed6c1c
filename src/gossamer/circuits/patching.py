"""Exact patching: the effect of every head, MLP, and head at every position.

    denoising   into the corrupt run, a component's clean output:  (m(patched) - m(corrupt)) / (m(clean) - m(corrupt))
    noising     into the clean run, its corrupt output:            (m(clean) - m(patched)) / (m(clean) - m(corrupt))
    zero, mean  into the clean run, zeros or the component's mean over all corrupt prompts and positions: as noising

A head is replaced in front of the output projection, an MLP where it writes to the residual stream, at every position.
Everything behind it is computed anew. Means over prompts come before the ratio.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from gossamer.circuits.effect import Baseline, Estimate, Floats, estimate
from gossamer.circuits.ranking import NO_EFFECT, ranked
from gossamer.circuits.runs import Batch, PairedRuns, Progress, WhichRun
from gossamer.circuits.scenarios import Scenarios, Source, measure
from gossamer.circuits.store import Stored
from gossamer.errors import GossamerError, nearest
from gossamer.models import LoadedModel
from gossamer.tasks import Task

Method = Literal["denoising", "noising", "zero", "mean"]
Component = tuple[int, int]  # (layer, head); the MLP of a layer counts as the head behind the last one


@dataclass(frozen=True, eq=False)
class Effects(Stored):
    """The metric of every prompt with one component replaced: heads [L, H, N] and MLPs [L, N]."""

    FORMAT: ClassVar[str] = "gossamer component effects"

    method: Method
    heads_LHN: Floats
    mlps_LN: Floats
    baseline: Baseline
    gate_flips: tuple[int, int]
    provenance: dict[str, Any]

    def _ratio(self, metric_N: Floats) -> Floats:
        explained = self.baseline.explained(metric_N)
        return explained if self.method == "denoising" else 1.0 - explained

    def _change(self, metric_N: Floats, prompts: Any) -> Floats:
        """How far these prompts' mean moves from the run that was patched, in differences over all prompts."""
        patched, corrupt = metric_N[..., prompts].mean(-1), self.baseline.corrupt_N[prompts].mean()
        clean = self.baseline.clean_N[prompts].mean()
        moved = patched - corrupt if self.method == "denoising" else clean - patched
        with np.errstate(divide="ignore", invalid="ignore"):
            change = moved / np.float64(self.baseline.difference)
        return np.where(np.isfinite(change), change, np.nan)

    @property
    def effect_LH(self) -> Floats:
        """The effect of every head."""
        return self._ratio(self.heads_LHN)

    @property
    def effect_mlp_L(self) -> Floats:
        """The effect of every MLP."""
        return self._ratio(self.mlps_LN)

    def interval(self, layer: int, head: int) -> Estimate:
        """The effect of a head with its interval over prompts."""
        samples_R = self.baseline.explained_samples(self.heads_LHN[layer, head][None])[0]
        return estimate(float(self.effect_LH[layer, head]), samples_R if self.method == "denoising" else 1 - samples_R)

    def ranking(self, *, mlps: bool = False, by_magnitude: bool = False, prompts: Any = slice(None)) -> list[Component]:
        """Heads (and MLPs) from the largest effect on, those without any last; ties by (layer, head).

        `prompts` ranks on some of the prompts. Their changes are still measured by the difference over ALL prompts:
        their own may be small, or of the other sign.
        """
        effect_LC = self._change(self.heads_LHN, prompts)
        if mlps:
            effect_LC = np.concatenate([effect_LC, self._change(self.mlps_LN, prompts)[:, None]], axis=1)
        order_C = ranked(effect_LC.ravel(), by_magnitude=by_magnitude, negligible=NO_EFFECT)
        width = effect_LC.shape[1]
        return [(int(component) // width, int(component) % width) for component in order_C]


@dataclass(frozen=True, eq=False)
class PositionEffects(Stored):
    """As `Effects` for heads, one position at a time: metric [L, H, T, N]; NaN behind the end of shorter prompts."""

    FORMAT: ClassVar[str] = "gossamer position effects"

    method: Method
    heads_LHTN: Floats
    baseline: Baseline
    gate_flips: tuple[int, int]
    provenance: dict[str, Any]

    @property
    def effect_LHT(self) -> Floats:
        """The effect of every head at every position, over the prompts that have this position."""
        effect_LHT = np.full(self.heads_LHTN.shape[:-1], np.nan)
        for position in range(len(self.heads_LHTN[0, 0])):
            long_N = ~np.isnan(self.heads_LHTN[0, 0, position])
            baseline = Baseline(self.baseline.clean_N[long_N], self.baseline.corrupt_N[long_N])
            explained_LH = baseline.explained(self.heads_LHTN[:, :, position, long_N])
            effect_LHT[:, :, position] = explained_LH if self.method == "denoising" else 1 - explained_LH
        return effect_LHT


def effects(
    model: LoadedModel,
    task: Task,
    *,
    method: Method = "denoising",
    batch: Batch = "auto",
    progress: Progress | None = None,
    runs: PairedRuns | None = None,
) -> Effects:
    """The exact effect of every head and MLP of a model on a task; `runs` reuses runs recorded before."""
    base, source = _base_and_source(method)
    runs = runs or PairedRuns(model, task, whole=source in ("zero", "mean"), batch=batch, progress=progress)
    n_layers, n_heads = runs.parts.n_layers, runs.parts.n_heads
    metric_RN = measure(runs, every_component(n_layers, n_heads, source), base=base)
    n_head_rows = n_layers * n_heads
    return Effects(
        method=method,
        heads_LHN=metric_RN[:n_head_rows].reshape(n_layers, n_heads, -1),
        mlps_LN=metric_RN[n_head_rows:],
        baseline=runs.baseline,
        gate_flips=runs.gate_flips(),
        provenance=provenance(model, task),
    )


def position_effects(
    model: LoadedModel,
    task: Task,
    *,
    method: Method = "denoising",
    batch: Batch = "auto",
    progress: Progress | None = None,
) -> PositionEffects:
    """The exact effect of every head at every single position."""
    base, source = _base_and_source(method)
    runs = PairedRuns(model, task, whole=source in ("zero", "mean"), batch=batch, progress=progress)
    n_layers, n_heads = runs.parts.n_layers, runs.parts.n_heads
    lengths_N = np.zeros(len(task), dtype=np.int64)
    for tokens in task.tokens:
        lengths_N[list(tokens.rows)] = tokens.clean_BT.shape[1]
    n_positions = int(lengths_N.max())
    heads_CLH = np.eye(n_layers * n_heads, dtype=bool).reshape(-1, n_layers, n_heads)
    heads_RLH = np.repeat(heads_CLH, n_positions, 0)
    positions_R = np.tile(np.arange(n_positions), len(heads_CLH))
    scenarios = Scenarios(heads_RLH, np.zeros((len(heads_RLH), n_layers), dtype=bool), source, positions_R)
    metric_LHTN = measure(runs, scenarios, base=base).reshape(n_layers, n_heads, n_positions, -1)
    metric_LHTN[:, :, np.arange(n_positions)[:, None] >= lengths_N] = np.nan
    return PositionEffects(method, metric_LHTN, runs.baseline, runs.gate_flips(), provenance(model, task))


def every_component(n_layers: int, n_heads: int, source: Source) -> Scenarios:
    """Each head alone in (layer, head) order, then each MLP alone."""
    n_both = n_layers * n_heads + n_layers
    heads_RLH = np.zeros((n_both, n_layers, n_heads), dtype=bool)
    heads_RLH[: n_layers * n_heads] = np.eye(n_layers * n_heads, dtype=bool).reshape(-1, n_layers, n_heads)
    mlps_RL = np.zeros((n_both, n_layers), dtype=bool)
    mlps_RL[n_layers * n_heads :] = np.eye(n_layers, dtype=bool)
    return Scenarios(heads_RLH, mlps_RL, source)


def _base_and_source(method: str) -> tuple[WhichRun, Source]:
    known = get_args(Method)
    if method not in known:
        raise GossamerError(
            f"There is no patching method {method!r}; choose one of {', '.join(known)}.{nearest(method, known)}"
        )
    if method == "denoising":
        return "corrupt", "clean"
    return "clean", "corrupt" if method == "noising" else method  # type: ignore[return-value]


def provenance(model: LoadedModel, task: Task) -> dict[str, Any]:
    """What a result was made from."""
    return {
        "model": model.provenance(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "task": {
            "name": task.name,
            "prompts": len(task),
            "seed": task.seed,
            "metric": task.metric,
            "fingerprint": task.fingerprint,
        },
    }
