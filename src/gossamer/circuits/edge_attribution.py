"""Edge attribution patching with integrated gradients: a score for every edge from a few backward passes.

After Syed, Rager and Conmy (2023, arXiv 2310.10348) and Hanna, Pezzelle and Belinkov (2024, arXiv 2403.17806).
With `w_u` what source u writes, `x_v` what receiver v reads and m the metric,

    score(u -> v) = mean over prompts of  sum over positions and width of  (w_u(clean) - w_u(corrupt)) * G_v,

an estimate of what the metric loses when the edge alone is given its corrupt value. `G_v` is the gradient of m at x_v
through v alone (not through the residual stream that runs past it), by method:

    gradient             at the clean run
    clean-corrupt        the mean of the clean and the corrupt run
    inputs               the mean along the straight path of the EMBEDDING's output from corrupt to clean, at the
                         midpoints (k - 1/2)/steps
    activations          for the edges out of u, the mean along the straight path of what u's LAYER writes (all heads of
                         a layer together, or one MLP, or the embedding), everything else clean

Gates are constants in every gradient. For `inputs` the scores of the edges out of the embedding sum to the metric's
difference, but for a `remainder`: the jumps where gates flip on the way, and the error of the quadrature.

Gradients at every receiver are never held at once: each layer's are contracted with what the sources wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gossamer.attention.edge_gradients import midpoints
from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.edge_metrics import Metric
from gossamer.circuits.projections import InputSlices
from gossamer.circuits.streams import Listener, Parts, recorded
from gossamer.tasks import TokenBatch

Method = Literal["gradient", "clean-corrupt", "inputs", "activations"]
METHODS: tuple[str, ...] = get_args(Method)


class GradientRun(Listener):
    """Keeps the gradient at every receiver of one run, in the small form in which the backward pass meets it."""

    def __init__(self, parts: Parts, *, start: Callable[[Tensor], Tensor] | None = None) -> None:
        self.parts, self.start = parts, start
        self.leaf: Tensor | None = None
        self.reads_LBTD: list[Tensor] = []
        self.at_projection: list[tuple[int, InputSlices, list[Tensor]]] = []
        self.at_mlp: dict[int, list[Tensor]] = {}
        self.at_logits: list[Tensor] = []

    def embedded(self, resid_BTD: Tensor) -> Tensor | None:
        """Begin the path here, unless it begins later."""
        return self._begin(resid_BTD) if self.start is not None else None

    def attention_reads(self, layer: int, resid_BTD: Tensor) -> None:
        """Norms are differentiated here later, once a receiver."""
        self.reads_LBTD.append(resid_BTD.detach())

    def projection(self, layer: int, part: InputSlices, out: Tensor) -> None:
        """The gradient at the output of a projection says all of its receivers'."""
        if out.requires_grad:
            found: list[Tensor] = []
            self.at_projection.append((layer, part, found))
            out.register_hook(found.append)

    def mlp_reads(self, layer: int, resid_BTD: Tensor) -> Tensor | None:
        """A name of its own for the MLP's input, so that its gradient leaves out the residual stream's."""
        return self._watched(resid_BTD, self.at_mlp.setdefault(layer, []))

    def logits_read(self, resid_BTD: Tensor) -> Tensor | None:
        """Likewise for the final norm."""
        return self._watched(resid_BTD, self.at_logits)

    def _begin(self, value: Tensor) -> Tensor:
        assert self.start is not None
        self.leaf = self.start(value).detach().requires_grad_()
        return self.leaf

    @staticmethod
    def _watched(resid_BTD: Tensor, found: list[Tensor]) -> Tensor | None:
        if not resid_BTD.requires_grad:
            return None
        alias_BTD = resid_BTD.view_as(resid_BTD)
        alias_BTD.register_hook(found.append)
        return alias_BTD

    def contract(self, changed_SBPD: Tensor, add: Callable[[int, slice, Tensor], None]) -> None:
        """Hand each place's gradients, contracted with every source it reads, to `add(n_sources, receivers, SR)`.

        `changed_SBPD` holds the last P positions; in front of them nothing has changed, and gradients do not count.
        """
        graph, changed_SX = self.parts.graph, changed_SBPD.flatten(1)
        last = slice(-changed_SBPD.shape[2], None)
        for layer, part, found in self.at_projection:
            first = graph.attention_receivers(layer).start
            receivers = slice(first + part.receivers.start, first + part.receivers.stop)
            norm = self.parts.model.anatomy.attention_norms[layer]
            for gradient in found:
                normed_RBPD = part.gradient_to_normed(gradient[:, last])
                gradient_RBPD = _through_norm(norm, self.reads_LBTD[layer][:, last], normed_RBPD)
                _add(graph, changed_SX, receivers, gradient_RBPD, add)
        at_single = [(graph.mlp_receiver(layer), found) for layer, found in self.at_mlp.items()]
        for receiver, found in [*at_single, (graph.logits_receiver, self.at_logits)]:
            for gradient in found:
                _add(graph, changed_SX, slice(receiver, receiver + 1), gradient[None, :, last], add)


class LaterGradientRun(GradientRun):
    """A gradient run whose path begins at what one layer's attention or MLP writes."""

    def __init__(self, parts: Parts, *, start: Callable[[Tensor], Tensor], layer: int, mlp: bool) -> None:
        super().__init__(parts, start=start)
        self.begins = (layer, mlp)

    def embedded(self, resid_BTD: Tensor) -> None:
        """Not here."""

    def attention_wrote(self, layer: int, out_BTD: Tensor) -> Tensor | None:
        """Here, if this is the layer."""
        return self._begin(out_BTD) if self.begins == (layer, False) else None

    def mlp_wrote(self, layer: int, out_BTD: Tensor) -> Tensor | None:
        """Here, if this is the layer."""
        return self._begin(out_BTD) if self.begins == (layer, True) else None


def _add(
    graph: ComponentGraph,
    changed_SX: Tensor,
    receivers: slice,
    gradient_RBPD: Tensor,
    add: Callable[[int, slice, Tensor], None],
) -> None:
    n_sources = graph.n_sources_of(receivers.start)
    add(n_sources, receivers, changed_SX[:n_sources] @ gradient_RBPD.flatten(1).T)


def _through_norm(norm: nn.Module | None, resid_BTD: Tensor, gradient_RBTD: Tensor) -> Tensor:
    """Gradients [R,B,T,D] in front of a norm from those behind it, whose place they take."""
    if norm is None:
        return gradient_RBTD
    with torch.enable_grad():
        leaf_BTD = resid_BTD.detach().requires_grad_()
        normed_BTD = norm(leaf_BTD)
    for gradient_BTD in gradient_RBTD:  # one forward serves all receivers
        gradient_BTD.copy_(torch.autograd.grad(normed_BTD, leaf_BTD, gradient_BTD, retain_graph=True)[0])
    return gradient_RBTD


@contextmanager
def without_weight_gradients(model: nn.Module) -> Iterator[None]:
    """Gradients of activations only, for the length of the block."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@dataclass(frozen=True, eq=False)
class _Pass:
    """One forward and backward pass: on which prompts, how much it counts, and for which sources."""

    run: GradientRun
    ids_BT: Tensor
    weight: float
    sources: slice = field(default_factory=lambda: slice(None))


@dataclass(eq=False)
class Attribution:
    """Scores summed over prompts, batch by batch, with the metric of the untouched runs."""

    parts: Parts
    metric: Metric
    method: Method
    steps: int
    score_SR: Tensor = field(init=False)

    def __post_init__(self) -> None:
        graph = self.parts.graph
        self.score_SR = torch.zeros(len(graph.sources), len(graph.receivers), dtype=torch.float64)

    def add(self, batch: TokenBatch) -> tuple[Tensor, Tensor]:
        """Add a batch's scores; the metric [B] of its clean and of its corrupt run."""
        clean, clean_BV = recorded(self.parts, batch.clean_BT)
        corrupt, corrupt_BV = recorded(self.parts, batch.corrupt_BT)
        first = _first_difference(batch)
        changed_SBPD = clean.written_SBTD[:, :, first:] - corrupt.written_SBTD[:, :, first:]

        def measured(logits_BV: Tensor) -> Tensor:
            return self.metric(logits_BV, batch, clean_BV)

        with without_weight_gradients(self.parts.model.hf):
            for planned in self._passes(batch, clean.written_SBTD, corrupt.written_SBTD):
                self._take(planned, measured, changed_SBPD)
        return measured(clean_BV).detach(), measured(corrupt_BV).detach()

    def _passes(self, batch: TokenBatch, clean_SBTD: Tensor, corrupt_SBTD: Tensor) -> Iterator[_Pass]:
        """The forward and backward passes of the method."""
        if self.method == "activations":
            for sources in _layers_of_sources(self.parts.graph):
                ends = corrupt_SBTD[sources].sum(0), clean_SBTD[sources].sum(0)
                for share in midpoints(self.steps):
                    run = self._later_run(sources, torch.lerp(*ends, share))
                    yield _Pass(run, batch.clean_BT, 1 / self.steps, sources)
        elif self.method == "clean-corrupt":
            for ids_BT in (batch.clean_BT, batch.corrupt_BT):
                yield _Pass(GradientRun(self.parts, start=lambda resid_BTD: resid_BTD), ids_BT, 0.5)
        else:
            shares = midpoints(self.steps) if self.method == "inputs" else [1.0]
            for share in shares:
                place_BTD = torch.lerp(corrupt_SBTD[0], clean_SBTD[0], share)
                run = GradientRun(self.parts, start=partial(_always, place_BTD))
                yield _Pass(run, batch.clean_BT, 1 / len(shares))

    def _later_run(self, sources: slice, place_BTD: Tensor) -> GradientRun:
        node = self.parts.graph.sources[sources.start]
        if node.kind == "embedding":
            return GradientRun(self.parts, start=partial(_always, place_BTD))
        start = partial(_always, place_BTD)
        return LaterGradientRun(self.parts, start=start, layer=node.layer, mlp=node.kind == "mlp")

    def _take(self, planned: _Pass, measured: Callable[[Tensor], Tensor], changed_SBPD: Tensor) -> None:
        """One forward and backward pass; its scores are added, with its weight, for its sources."""
        run = planned.run
        total = measured(self.parts.logits(planned.ids_BT, run)).sum()
        assert run.leaf is not None
        torch.autograd.grad(total, run.leaf)
        of_these = torch.zeros(len(changed_SBPD), dtype=torch.bool)
        of_these[planned.sources] = True

        def add(n_sources: int, receivers: slice, score_SR: Tensor) -> None:
            chosen_S = of_these[:n_sources].nonzero()[:, 0]
            self.score_SR[chosen_S, receivers] += planned.weight * score_SR.double().cpu()[chosen_S]

        run.contract(changed_SBPD, add)


def _first_difference(batch: TokenBatch) -> int:
    """The first position at which any clean prompt differs from its corrupt one; before it both runs are the same."""
    different_T = (batch.clean_BT != batch.corrupt_BT).any(0)
    different_T[-1] = True
    return int(different_T.nonzero()[0])


def _layers_of_sources(graph: ComponentGraph) -> list[slice]:
    """Sources that the model writes together: the embedding, each layer's heads, each MLP."""
    layers = [slice(0, 1)]
    for layer in range(graph.n_layers):
        layers += [graph.head_sources(layer), slice(graph.mlp_source(layer), graph.mlp_source(layer) + 1)]
    return layers


def _always(value: Tensor, _: Tensor) -> Tensor:
    return value
