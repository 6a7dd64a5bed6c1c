"""Head loadings as a result: named sources and targets, and the buckets of the edges between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gossamer.attribution.frozen import FrozenModel, freeze
from gossamer.attribution.hops import SHARE, Carriers, Floats, Hop, carriers, hop_into
from gossamer.attribution.loadings import Sources, Targets, every_pair, load_edges
from gossamer.attribution.result import Ints
from gossamer.attribution.targets import Prompt, Target, begin_tokens
from gossamer.circuits.store import Stored
from gossamer.models import LoadedModel


@dataclass(frozen=True, eq=False)
class HeadLoadings(Stored):
    """Edges (source, target) from a key to a query position, each split over heads, `no head` and `others`."""

    FORMAT: ClassVar[str] = "gossamer head loadings"

    model: str
    tokens: tuple[str, ...]
    n_begin: int
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    source_E: Ints
    target_E: Ints
    key_E: Ints
    query_E: Ints
    edge_E: Floats
    heads_ELH: Floats
    no_head_E: Floats
    others_E: Floats
    provenance: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.edge_E)

    @property
    def missing_E(self) -> Floats:
        """What the buckets do not sum to: rounding."""
        return np.asarray(self.edge_E - self.heads_ELH.sum((1, 2)) - self.no_head_E - self.others_E)

    def heads_LH(self, hop: Hop) -> Floats:
        """What each head carries over a hop, summed over the edges between its two positions."""
        return np.asarray(self.heads_ELH[(self.key_E == hop.key) & (self.query_E == hop.query)].sum(0))

    def carriers(self, hop: Hop | None = None, share: float = SHARE) -> Carriers:
        """The fewest heads that carry a share of a hop, by default the one into the last position."""
        return carriers(self.heads_LH(hop or self.answer_hop), share)

    def edge_carriers(self, edge: int, share: float = SHARE) -> Carriers:
        """The fewest heads that carry a share of one edge's single hops."""
        return carriers(self.heads_ELH[edge], share)

    @property
    def answer_hop(self) -> Hop:
        """The hop into the last position, from another one, over which heads carry the most."""
        total_K, last = np.zeros(len(self.tokens)), len(self.tokens) - 1
        mine = self.query_E == last
        np.add.at(total_K, self.key_E[mine], self.heads_ELH[mine].sum((1, 2)))
        return hop_into(total_K, last, n_begin=self.n_begin)


def token_loadings(model: LoadedModel, prompt: Prompt, target: Target) -> HeadLoadings:
    """The loadings of every token's embedding and every MLP's output, as they were in the run, on the target.

    Needs no transcoder: what an MLP gives out is taken as given and is a source at its position, so a path ends where
    an MLP reads it. A probability is taken to first order in the logits.
    """
    frozen = freeze(model, prompt.ids_T(model))
    sources, names = stream_sources(frozen, prompt.tokens)
    return named_loadings(frozen, prompt.tokens, (sources, names), (logit_target(frozen, target), [target.describe()]))


def named_loadings(
    frozen: FrozenModel,
    tokens: Sequence[str],
    sources: tuple[Sources, Sequence[str]],
    targets: tuple[Targets, Sequence[str]],
    edges: tuple[Tensor, Tensor] | None = None,
) -> HeadLoadings:
    """The loadings of edges, by default of all pairs, between named sources and targets."""
    (writers, source_names), (readers, target_names) = sources, targets
    edges = edges or every_pair(len(source_names), len(target_names))
    buckets = load_edges(frozen, writers, readers, edges)
    source_E, target_E = (index.cpu().numpy() for index in edges)
    return HeadLoadings(
        model=frozen.model.name,
        tokens=tuple(tokens),
        n_begin=begin_tokens(frozen.model, frozen.ids_Q.tolist()),
        sources=tuple(source_names),
        targets=tuple(target_names),
        source_E=source_E,
        target_E=target_E,
        key_E=writers.position_S.cpu().numpy()[source_E],
        query_E=readers.position_T.cpu().numpy()[target_E],
        edge_E=_array(buckets.edge_E),
        heads_ELH=_array(buckets.heads_ELH),
        no_head_E=_array(buckets.no_head_E),
        others_E=_array(buckets.others_E),
        provenance={"model": frozen.model.provenance()},
    )


def stream_sources(frozen: FrozenModel, tokens: Sequence[str]) -> tuple[Sources, list[str]]:
    """At every position its embedding (token and position) and what every MLP wrote there, with names."""
    n_positions, n_slots = frozen.n_positions, frozen.n_layers + 1
    written_WQD = [frozen.embedding_QD + frozen.position_QD]
    written_WQD += [layer.mlp_written_QD for layer in frozen.layers]
    writes_SWD = frozen.embedding_QD.new_zeros(n_slots, n_positions, n_slots, frozen.embedding_QD.shape[1])
    for slot, written_QD in enumerate(written_WQD):
        writes_SWD[slot, :, slot] = written_QD
    every_Q = torch.arange(n_positions, device=writes_SWD.device)
    parts = ["embedding", *(f"MLP {layer}" for layer in range(frozen.n_layers))]
    names = [f"{part} at {position} {token!r}" for part in parts for position, token in enumerate(tokens)]
    return Sources(every_Q.repeat(n_slots), writes_SWD.flatten(0, 1)), names


def logit_target(frozen: FrozenModel, target: Target) -> Targets:
    """A target as something that reads the stream behind the last block, to first order in the logits."""
    cap = getattr(frozen.model.hf.config, "final_logit_softcapping", None)
    raw_V = frozen.logits_V.detach().requires_grad_()
    with torch.enable_grad():
        logits_V = torch.tanh(raw_V / cap) * cap if cap else raw_V
        (direction_V,) = torch.autograd.grad(target.of(logits_V[None]).sum(), raw_V)
    cotangent_D = frozen.logit_cotangents(direction_V[None])[0, -1]
    at = torch.tensor([frozen.n_positions - 1], device=cotangent_D.device)
    return Targets(at, torch.full_like(at, frozen.n_layers), cotangent_D[None])


def _array(tensor: Tensor) -> Floats:
    return tensor.double().cpu().numpy()
