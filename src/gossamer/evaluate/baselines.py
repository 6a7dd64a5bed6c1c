"""What sparsity costs without training: the dense model with its edges cut by a rule.

Each rule is a ladder of settings from everything open to almost nothing. A few rungs draw the curve of loss against
density; between them, bisection finds the sparsest rung that still reaches a given loss.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.attention import GateConfig, gates_of
from gossamer.corpus import Sequences
from gossamer.evaluate.losses import evaluating, parts, rows_at_once
from gossamer.evaluate.report import Baseline, BaselinePoint
from gossamer.models import LoadedModel, gate
from gossamer.sparsify.calibrate import calibrate
from gossamer.sparsify.density import Density, density_of
from gossamer.sparsify.forward import IGNORED, cross_entropy_sum, logits_of, model_inputs, target_tensor
from gossamer.sparsify.measure import measure

RUNGS = 65
CURVE_STEP = 8
CALIBRATION_SEQUENCES = 4
WIDE_OPEN = 1e3  # opens every edge; much more would eat the scores' digits
RUINED = 1.0  # nats above the dense model; the curve goes no further once the sparse model's density is passed

Measured = tuple[float, Density]


class Rule(ABC):
    """A way to cut edges, with a ladder of settings that open fewer and fewer."""

    name: str
    what: str
    settings: tuple[float, ...]

    @abstractmethod
    def measure(self, setting: float, text: Sequences) -> Measured:
        """Loss and density of the dense model under this setting."""


class _GatedRule(Rule):
    """A rule that a gate can express, on a gated copy of the dense model."""

    def __init__(self, dense: LoadedModel, kind: Any) -> None:
        self.model = gate(copy.deepcopy(dense), GateConfig(kind=kind, offset=WIDE_OPEN))
        self.rows = rows_at_once(64, int(dense.hf.config.vocab_size), copies=8)

    def open_all(self, offset: float) -> None:
        for layer in gates_of(self.model.hf):
            layer.offset_H.data.fill_(offset)

    def measured(self, text: Sequences) -> Measured:
        result = measure(self.model.hf, text, batch=max(1, self.rows * 64 // text.length))
        assert result.density is not None
        return result.loss, result.density


class ScoreThreshold(_GatedRule):
    """The logit gate as calibration leaves it: per head, the offset that keeps a given share of its attention."""

    name = "score threshold"
    what = "logit gate, untrained; each head's offset keeps the same share of its attention (calibrated on this text)"

    def __init__(self, dense: LoadedModel, sample: Sequences) -> None:
        super().__init__(dense, "logit")
        self.sample = sample.rows(slice(0, CALIBRATION_SEQUENCES))
        dropped = 1 / (1 + np.exp(-np.linspace(-9.2, 7.6, RUNGS - 1)))
        self.settings = (1.0, *(1 - dropped).tolist())

    def measure(self, setting: float, text: Sequences) -> Measured:
        """`setting` is the share of attention kept."""
        self.open_all(WIDE_OPEN if setting == 1 else 0.0)
        if setting < 1:
            calibrate(self.model.hf, self.sample, keep_mass=setting)
        return self.measured(text)


class WeightThreshold(_GatedRule):
    """One threshold on softmax weights for the whole model: the mass gate with a single offset."""

    name = "weight threshold"
    what = "mass gate, untrained; one threshold on attention weights for all heads"

    def __init__(self, dense: LoadedModel) -> None:
        super().__init__(dense, "mass")
        thresholds = 1 / (1 + np.exp(-np.linspace(-16, 9, RUNGS - 1)))
        self.settings = (0.0, *thresholds.tolist())

    def measure(self, setting: float, text: Sequences) -> Measured:
        """`setting` is the smallest weight that stays."""
        self.open_all(WIDE_OPEN if setting == 0 else -float(np.log(setting)))
        return self.measured(text)


class LocalWindow(Rule):
    """Attention to the last tokens and the first, for all heads; the softmax runs over these alone."""

    name = "local window"
    what = "the last tokens and the document's first, softmax over these alone"

    def __init__(self, dense: LoadedModel, length: int) -> None:
        self.model = dense
        widths = np.unique(np.geomspace(1, length, RUNGS).round().astype(int))
        self.settings = tuple(float(width) for width in widths[::-1])
        self.rows = rows_at_once(length, int(dense.hf.config.vocab_size), copies=4)

    @torch.no_grad()
    def measure(self, setting: float, text: Sequences) -> Measured:
        """`setting` is the number of last tokens a query sees, itself included."""
        hf, device = self.model.hf, self.model.device
        nats, tokens, pairs = 0.0, 0, 0
        for part in parts(text, self.rows):
            inputs, targets_BQ = model_inputs(part, device), target_tensor(part, device)
            seen_BQK = window_mask(part, int(setting)).to(device)
            inputs["attention_mask"] = seen_BQK[:, None]
            nats += float(cross_entropy_sum(logits_of(hf, inputs, bf16=False), targets_BQ))
            tokens += int((targets_BQ != IGNORED).sum())
            pairs += int(seen_BQK.sum())
        layers, heads = self.model.anatomy.n_layers, self.model.anatomy.n_heads
        density = density_of(text, open_edges=pairs * layers * heads, n_layers=layers, n_heads=heads)
        return nats / tokens, density


def window_mask(text: Sequences, width: int) -> Tensor:
    """The pairs [B,Q,K] of a document in which the key is among the last `width` tokens or the document's first."""
    length = text.length
    index_T = torch.arange(length)
    causal_QK = index_T[:, None] >= index_T
    near_QK = index_T[:, None] - index_T < width
    if text.segments_NT is None:
        return (causal_QK & (near_QK | (index_T == 0))).expand(len(text), -1, -1)
    segments_BT = torch.as_tensor(text.segments_NT)
    same_BQK = segments_BT[:, :, None] == segments_BT[:, None, :]
    first_BQ = same_BQK.long().argmax(-1)
    return causal_QK & same_BQK & (near_QK | (first_BQ[:, :, None] == index_T))


def rules_for(dense: LoadedModel, text: Sequences) -> list[Rule]:
    """The three baselines."""
    return [ScoreThreshold(dense, text), WeightThreshold(dense), LocalWindow(dense, text.length)]


class Climb:
    """A rule on one text: rungs are measured once, and remembered."""

    def __init__(self, rule: Rule, text: Sequences, dense_loss: float) -> None:
        self.rule, self.text, self.dense_loss = rule, text, dense_loss
        self.points: dict[int, BaselinePoint] = {}

    def point(self, rung: int) -> BaselinePoint:
        """The rung's setting, density and loss."""
        if rung not in self.points:
            setting = self.rule.settings[rung]
            loss, density = self.rule.measure(setting, self.text)
            self.points[rung] = BaselinePoint(
                setting, density.of_causal_pairs, density.per_token, loss - self.dense_loss
            )
        return self.points[rung]

    def curve(self, sparsest: float) -> None:
        """Measure every few rungs until the model is ruined and sparser than `sparsest`."""
        for rung in [*range(0, len(self.rule.settings), CURVE_STEP), len(self.rule.settings) - 1]:
            point = self.point(rung)
            if point.difference > RUINED and point.of_causal_pairs < sparsest:
                return

    def last(self, holds: Callable[[BaselinePoint], bool]) -> BaselinePoint | None:
        """The sparsest rung for which `holds`: the sparsest one measured so far, then bisection up to the next."""
        known = sorted(self.points)
        good = [rung for rung in known if holds(self.points[rung])]
        if not good:
            return None
        low = good[-1]
        high = min([rung for rung in known if rung > low], default=low + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if holds(self.point(middle)) else (low, middle)
        return self.point(low)


def baseline(rule: Rule, text: Sequences, *, dense_loss: float, sparse: BaselinePoint, slack: float) -> Baseline:
    """The curve of one rule, and where it meets the sparse model's loss and density."""
    climb = Climb(rule, text, dense_loss)
    with evaluating(rule.model.hf):  # type: ignore[attr-defined]
        climb.curve(sparse.of_causal_pairs)
        at_loss = climb.last(lambda point: point.difference <= sparse.difference)
        at_slack = climb.last(lambda point: point.difference <= slack)
        at_density = climb.last(lambda point: point.of_causal_pairs >= sparse.of_causal_pairs)
    assert at_density is not None, "with everything open no model is denser"
    curve = tuple(climb.points[rung] for rung in sorted(climb.points))
    return Baseline(rule.name, rule.what, curve, at_loss, at_slack, at_density)
