"""Direct effects: for every target, how much each source gives it along paths that pass no other feature.

A target is a linear read of the stream: a feature's encoder at its position, or a direction among the logits. Its
cotangent is pulled back through the frozen blocks, many targets at a time, and met on the way by what each source
writes. Sources are the features, an error for each layer and position, the token vectors, and all biases together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gossamer.attribution.replacement import Replacement

MEMORY_BUDGET = 256 * 2**20  # bytes of cotangents held at once


@dataclass(frozen=True, eq=False)
class Reads:
    """Targets in front of one block: cotangents [T,Q,D] of the stream there, and what biases gave them on the way."""

    layer: int
    cotangent_TQD: Tensor
    constant_T: Tensor


@dataclass(frozen=True, eq=False)
class Writes:
    """What the active features write in the place of one MLP, sorted by position."""

    column_N: Tensor
    vector_ND: Tensor
    bounds_Q: list[int]  # where each position begins, and the end


class DirectEffects:
    """Direct effects on any targets of a replacement model."""

    def __init__(self, replacement: Replacement) -> None:
        self.replacement, self.frozen = replacement, replacement.frozen
        self.n_features = len(replacement.features)
        self.n_errors = self.frozen.n_layers * self.frozen.n_positions
        self.n_sources = self.n_features + self.n_errors + self.frozen.n_positions + 1
        self.dtype = self.frozen.embedding_QD.dtype

    @torch.no_grad()
    def on_features(self, chosen_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of (features, their effects [T,S]) for some features, given by number, layer by layer."""
        layer_N = self.replacement.features.layer_N[chosen_N]
        for layer in range(self.frozen.n_layers):
            for batch_N in chosen_N[layer_N == layer].split(self._batch_size):
                yield batch_N, self.on(self._feature_reads(layer, batch_N))

    @torch.no_grad()
    def on_logits(self, direction_TV: Tensor) -> Tensor:
        """Effects [T,S] on directions among the logits."""
        frozen = self.frozen
        batches = [
            self.on(Reads(frozen.n_layers, frozen.logit_cotangents(part), frozen.logit_constants(part)))
            for part in direction_TV.split(self._batch_size)
        ]
        return torch.cat(batches)

    @torch.no_grad()
    def on(self, reads: Reads) -> Tensor:
        """Effects [T,S] on these targets; columns are features, errors (layer by layer), tokens, and the bias."""
        cotangent_TQD, bias_T = reads.cotangent_TQD, reads.constant_T
        effect_TS = torch.zeros(len(cotangent_TQD), self.n_sources, dtype=self.dtype, device=cotangent_TQD.device)
        for layer in reversed(range(reads.layer)):
            self._meet_mlp(layer, cotangent_TQD, effect_TS)
            bias_T = bias_T + torch.einsum("tqd,qd->t", cotangent_TQD, self._constant_LQD[layer])
            cotangent_TQD = self.frozen.pull_back_block(layer, cotangent_TQD)
        tokens_TQ = torch.einsum("tqd,qd->tq", cotangent_TQD, self.frozen.embedding_QD)
        effect_TS[:, self.n_features + self.n_errors : -1] = tokens_TQ
        effect_TS[:, -1] = bias_T + torch.einsum("tqd,qd->t", cotangent_TQD, self.frozen.position_QD)
        return effect_TS

    def _feature_reads(self, layer: int, chosen_T: Tensor) -> Reads:
        features, block = self.replacement.features, self.frozen.layers[layer]
        encoder_TD = self.replacement.encoders(chosen_T)
        read_TQD = encoder_TD.new_zeros(len(chosen_T), *self.frozen.embedding_QD.shape)
        read_TQD[torch.arange(len(chosen_T)), features.position_N[chosen_T]] = encoder_TD
        constant_T = encoder_TD @ block.mlp_norm.bias_D + self.replacement.encoder_biases(chosen_T)
        if not block.parallel:
            constant_T = constant_T + torch.einsum("tqd,qd->t", block.mlp_norm.transposed(read_TQD), block.constant_QD)
        return Reads(layer, block.pull_back_mlp_read(read_TQD), constant_T)

    def _meet_mlp(self, layer: int, cotangent_TQD: Tensor, effect_TS: Tensor) -> None:
        """What features and error write in the place of one MLP, as the targets read it."""
        n_positions = self.frozen.n_positions
        first = self.n_features + layer * n_positions
        errors_TQ = torch.einsum("tqd,qd->tq", cotangent_TQD, self.replacement.error_LQD[layer])
        effect_TS[:, first : first + n_positions] = errors_TQ
        writes = self._writes_L[layer]
        for position in range(n_positions):
            mine = slice(writes.bounds_Q[position], writes.bounds_Q[position + 1])
            if mine.start < mine.stop:
                read_TN = cotangent_TQD[:, position] @ writes.vector_ND[mine].T
                effect_TS.index_add_(1, writes.column_N[mine], read_TN)

    @cached_property
    def _constant_LQD(self) -> list[Tensor]:
        """What each block writes of its own: the attention's constants and the decoder bias."""
        biases = self.replacement.transcoders.decoder_bias_LD
        return [block.constant_QD + bias_D for block, bias_D in zip(self.frozen.layers, biases, strict=True)]

    @cached_property
    def _writes_L(self) -> list[Writes]:
        return [self._writes(layer) for layer in range(self.frozen.n_layers)]

    def _writes(self, layer: int) -> Writes:
        features, transcoders = self.replacement.features, self.replacement.transcoders
        columns, vectors = [], []
        for source in transcoders.sources(layer):
            mine = features.of_layer(source)
            columns.append(torch.arange(mine.start, mine.stop, device=features.layer_N.device))
            vectors.append(self.replacement.write_directions(source, layer) * features.activation_N[mine, None])
        column_N, vector_ND = torch.cat(columns), torch.cat(vectors)
        position_N, order_N = features.position_N[column_N].sort(stable=True)
        edges_Q = torch.arange(self.frozen.n_positions + 1, device=position_N.device)
        return Writes(column_N[order_N], vector_ND[order_N], torch.searchsorted(position_N, edges_Q).tolist())

    @cached_property
    def _batch_size(self) -> int:
        """How many targets are pulled back at once: about six tensors of this size exist on the way."""
        row = self.frozen.embedding_QD.numel() * self.frozen.embedding_QD.element_size()
        return max(1, min(512, MEMORY_BUDGET // (6 * row)))
