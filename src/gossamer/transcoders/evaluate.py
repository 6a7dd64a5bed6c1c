"""How good transcoders are, on held-out text: sparsity, what they leave unexplained, and what replacing MLPs costs.

Unexplained variance of a layer is Σ ‖y − ŷ‖² / Σ ‖y − mean y‖² over the counted positions (all but the first of a
document). In a replaced model what the MLP wrote there gives way to the reconstruction, computed from the replaced
model's own activations; the first position keeps its own. KL is from the model to the replaced model, mean over the
counted positions, in nats.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from gossamer.corpus.inputs import model_inputs
from gossamer.corpus.sequences import Sequences
from gossamer.errors import GossamerError
from gossamer.files import read_json, write_json
from gossamer.models import LoadedModel
from gossamer.transcoders.module import TranscoderSet
from gossamer.transcoders.sites import Replacement, counted_positions, mlp_activity, watched

FORMAT = 1


@dataclass(frozen=True)
class TranscoderReport:
    """One number a layer, and the whole model's."""

    l0: list[float]
    unexplained: list[float]
    dead_share: list[float]
    replacement_kl: list[float]
    all_replaced_kl: float
    n_positions: int
    provenance: dict[str, Any]

    @property
    def mean_l0(self) -> float:
        """Active features a layer and position, mean over layers."""
        return _mean(self.l0)

    @property
    def mean_unexplained(self) -> float:
        """Unexplained variance, mean over layers."""
        return _mean(self.unexplained)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the means over layers included."""
        means = {"mean_l0": self.mean_l0, "mean_unexplained": self.mean_unexplained}
        return {"format": FORMAT, **means, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote."""
        data = read_json(path)
        if data.pop("format", None) != FORMAT:
            raise GossamerError(f"{path} is not a transcoder report of format {FORMAT}.")
        return cls(**{name: value for name, value in data.items() if name not in ("mean_l0", "mean_unexplained")})


@torch.no_grad()
def evaluate(model: LoadedModel, transcoders: TranscoderSet, text: Sequences, *, batch: int = 16) -> TranscoderReport:
    """Measure transcoders on text they were not trained on."""
    transcoders.require_model(model)
    model.hf.eval()
    shape, sums = transcoders.shape, _Sums(transcoders)
    kl_L = torch.zeros(shape.n_layers + 1, dtype=torch.float64, device=model.device)
    for start in range(0, len(text), batch):
        part = text.rows(slice(start, start + batch))
        sums.add(*mlp_activity(model, part))
        kl_L += _replacement_divergences(model, transcoders, part)
    if sums.n == 0:
        raise GossamerError("The text has no position behind the first of a document; give longer sequences.")
    return TranscoderReport(
        l0=(sums.active_LF.sum(1) / sums.n).tolist(),
        unexplained=sums.unexplained().tolist(),
        dead_share=(sums.active_LF == 0).double().mean(1).tolist(),
        replacement_kl=(kl_L[:-1] / sums.n).tolist(),
        all_replaced_kl=float(kl_L[-1] / sums.n),
        n_positions=sums.n,
        provenance={"transcoders": transcoders.provenance, "text": text.fingerprint()},
    )


class _Sums:
    """Sums over batches, in float64."""

    def __init__(self, transcoders: TranscoderSet) -> None:
        shape, device = transcoders.shape, transcoders.encoder_LFD.device
        self.transcoders, self.n = transcoders, 0
        self.active_LF = torch.zeros(shape.n_layers, shape.n_features, dtype=torch.float64, device=device)
        self.written_LD = torch.zeros(shape.n_layers, shape.width, dtype=torch.float64, device=device)
        self.squares_L = torch.zeros(shape.n_layers, dtype=torch.float64, device=device)
        self.errors_L = torch.zeros(shape.n_layers, dtype=torch.float64, device=device)

    def add(self, inputs_LND: Tensor, outputs_LND: Tensor) -> None:
        transcoders = self.transcoders
        features = [transcoders.encode(layer, input_ND) for layer, input_ND in enumerate(inputs_LND)]
        for layer, output_ND in enumerate(outputs_LND):
            error_ND = transcoders.reconstruct(features, layer, inputs_LND[layer]) - output_ND
            self.active_LF[layer] += (features[layer] > 0).sum(0)
            self.written_LD[layer] += output_ND.double().sum(0)
            self.squares_L[layer] += output_ND.double().square().sum()
            self.errors_L[layer] += error_ND.double().square().sum()
        self.n += outputs_LND.shape[1]

    def unexplained(self) -> Tensor:
        variance_L = self.squares_L - self.written_LD.square().sum(1) / self.n
        return self.errors_L / variance_L.clamp(min=torch.finfo(torch.float64).tiny)


def _replacement_divergences(model: LoadedModel, transcoders: TranscoderSet, text: Sequences) -> Tensor:
    """Summed KL with each layer's MLP replaced, and last with all of them [L + 1]."""
    counted_BT = counted_positions(text).to(model.device)
    expected_NV = _log_probabilities(model, text, counted_BT)
    n_layers = transcoders.n_layers
    choices = [{layer} for layer in range(n_layers)] + [set(range(n_layers))]
    sums = []
    for layers in choices:
        with watched(model, replacement(transcoders, layers, counted_BT)):
            replaced_NV = _log_probabilities(model, text, counted_BT)
        sums.append(F.kl_div(replaced_NV, expected_NV, log_target=True, reduction="sum").double())
    return torch.stack(sums)


def replacement(transcoders: TranscoderSet, layers: set[int], counted_BT: Tensor) -> Replacement:
    """For `watched`: put the reconstructions of some layers in the place of what the MLPs wrote, where counted."""

    features: list[Tensor] = []

    def replace(layer: int, inputs: list[Tensor], written_BTD: Tensor) -> Tensor:
        if layer == 0:  # a new forward
            features.clear()
        if layer not in layers:
            return written_BTD
        features.extend(transcoders.encode(source, inputs[source]) for source in range(len(features), layer + 1))
        rebuilt_BTD = transcoders.reconstruct(features, layer, inputs[layer]).to(written_BTD.dtype)
        return torch.where(counted_BT[..., None], rebuilt_BTD, written_BTD)

    return replace


def _log_probabilities(model: LoadedModel, text: Sequences, counted_BT: Tensor) -> Tensor:
    logits_BTV: Tensor = model.hf(**model_inputs(text, model.device)).logits
    return F.log_softmax(logits_BTV[counted_BT].float(), dim=-1)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
