"""One block of a frozen model: what its heads carry, forwards and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gossamer.attribution.frozen_norm import FrozenNorm


@dataclass(frozen=True, eq=False)
class FrozenLayer:
    """One block: the carried pattern, the map from residual stream to values and back, the norms around it."""

    pattern_HQK: Tensor
    value_HED: Tensor  # of each head; heads of one group share theirs
    value_bias_HE: Tensor
    output_HED: Tensor
    output_bias_D: Tensor
    attention_norm: FrozenNorm
    attention_post: FrozenNorm
    mlp_norm: FrozenNorm
    mlp_post: FrozenNorm
    parallel: bool
    resid_QD: Tensor
    mlp_input_QD: Tensor
    mlp_output_QD: Tensor

    def apply(self, resid_NQD: Tensor, heads: Sequence[int] | None = None) -> Tensor:
        """What these heads (default all) write when the residual stream before the block is [..., Q, D]; no biases."""
        value_XD, output_XD, pattern_HQK = self._flat(heads)
        values = (self.attention_norm.linear(resid_NQD) @ value_XD.T).unflatten(-1, (len(pattern_HQK), -1))
        carried = torch.einsum("hqk,...khe->...qhe", pattern_HQK, values)
        return self.attention_post.linear(carried.flatten(-2) @ output_XD)

    def pull_back(self, cotangent_NQD: Tensor, heads: Sequence[int] | None = None) -> Tensor:
        """The transpose of `apply`: a cotangent of what these heads wrote, as one of the residual stream they read."""
        value_XD, output_XD, pattern_HQK = self._flat(heads)
        carried = self.attention_post.transposed(cotangent_NQD) @ output_XD.T
        values = torch.einsum("hqk,...qhe->...khe", pattern_HQK, carried.unflatten(-1, (len(pattern_HQK), -1)))
        return self.attention_norm.transposed(values.flatten(-2) @ value_XD)

    @cached_property
    def mlp_written_QD(self) -> Tensor:
        """What the MLP wrote to the stream: its output, behind its post-norm where there is one."""
        return self.mlp_post.linear(self.mlp_output_QD) + self.mlp_post.bias_D

    @cached_property
    def constant_QD(self) -> Tensor:
        """What the attention writes of its own: value biases times the carried row mass, output and norm biases."""
        value_HE = self.value_bias_HE + torch.einsum("hed,d->he", self.value_HED, self.attention_norm.bias_D)
        carried_QHE = torch.einsum("hqk,he->qhe", self.pattern_HQK, value_HE)
        written_QD = torch.einsum("qhe,hed->qd", carried_QHE, self.output_HED) + self.output_bias_D
        return self.attention_post.linear(written_QD) + self.attention_post.bias_D

    def pull_back_mlp_read(self, cotangent_NQD: Tensor) -> Tensor:
        """A cotangent of the MLP's input, as one of the residual stream before the block."""
        read_NQD = self.mlp_norm.transposed(cotangent_NQD)
        return read_NQD if self.parallel else read_NQD + self.pull_back(read_NQD)

    def _flat(self, heads: Sequence[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        if heads is None:
            return self.value_HED.flatten(0, 1), self.output_HED.flatten(0, 1), self.pattern_HQK
        chosen = list(heads)
        return self.value_HED[chosen].flatten(0, 1), self.output_HED[chosen].flatten(0, 1), self.pattern_HQK[chosen]
