"""The model in training: a copy of the dense one, gated, with the chosen parameters trainable."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gossamer.attention import gates_of
from gossamer.errors import GossamerError
from gossamer.models import LoadedModel, gate
from gossamer.sparsify.config import SparsifyConfig


@dataclass
class Student:
    """A model in training. Dropout stays off: the constraint compares with the dense model as it is used."""

    model: LoadedModel
    dtype: torch.dtype  # of the weights that were loaded, and of those that are saved
    bf16: bool
    adapters: Any = None  # peft's wrapper around the same modules

    @property
    def hf(self) -> nn.Module:
        """The transformers model."""
        return self.model.hf

    def trainable(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name."""
        return {name: parameter for name, parameter in self.hf.named_parameters() if parameter.requires_grad}

    def finished(self) -> LoadedModel:
        """The trained model: adapters merged, in the precision it came in (gates stay float32)."""
        if self.adapters is not None:
            self.adapters.merge_and_unload()
            self.adapters = None
        offsets = [layer.offset_H.detach().clone() for layer in gates_of(self.hf)]
        self.hf.to(self.dtype)
        for layer, offset_H in zip(gates_of(self.hf), offsets, strict=True):
            layer.offset_H.data = offset_H
        self.hf.requires_grad_(True)
        return self.model


def prepare(dense: LoadedModel, config: SparsifyConfig) -> Student:
    """A trainable copy of `dense`; `dense` itself is left as it is."""
    if dense.is_sparse:
        raise GossamerError(f"{dense.name} is gated already: give the dense model it came from.")
    model = copy.deepcopy(dense)
    dtype = model.hf.dtype
    keep_dtype = config.trainable == "lora"
    if not keep_dtype:
        model.hf.float()  # small updates vanish in bfloat16 weights
    if not config.control:
        model = gate(model, config.gate_config())
    model.hf.eval().requires_grad_(False)
    student = Student(model, dtype, bf16=config.bf16 or model.hf.dtype == torch.bfloat16)
    _unfreeze(student, config)
    return student


def parameter_groups(student: Student, config: SparsifyConfig) -> list[dict[str, Any]]:
    """Weights, and the gates' offsets with a rate of their own and no decay."""
    offsets = {id(parameter) for layer in gates_of(student.hf) for parameter in layer.parameters()}
    trainable = list(student.trainable().values())
    weights = [parameter for parameter in trainable if id(parameter) not in offsets]
    gates = [parameter for parameter in trainable if id(parameter) in offsets]
    groups: list[dict[str, Any]] = [
        {"params": weights, "base_rate": config.learning_rate, "weight_decay": config.weight_decay},
        {"params": gates, "base_rate": config.gate_learning_rate, "weight_decay": 0.0},
    ]
    return [group | {"lr": group["base_rate"]} for group in groups if group["params"]]


def _unfreeze(student: Student, config: SparsifyConfig) -> None:
    if config.trainable == "full":
        student.hf.requires_grad_(True)
    elif config.trainable == "attention":
        for attention in student.model.anatomy.attentions:
            attention.requires_grad_(True)
    else:
        student.adapters = _add_adapters(student, config)
    for layer in gates_of(student.hf):
        layer.requires_grad_(True)


def _add_adapters(student: Student, config: SparsifyConfig) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise GossamerError("LoRA needs the peft package: pip install 'gossamer[lora]'.") from error
    targets = _adapted_modules(student.model, flow=config.gate == "flow" and not config.control)
    settings = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=0.0,
        target_modules=targets,
        fan_in_fan_out=type(student.hf.get_submodule(targets[0])).__name__ == "Conv1D",
        bias="none",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return get_peft_model(student.hf, settings)


def _adapted_modules(model: LoadedModel, *, flow: bool) -> list[str]:
    """The attention's projections; not the output projection under a flow gate, which reads its plain weights."""
    projections: set[int] = set()
    for attention in model.anatomy.attentions:
        projections |= {id(module) for module in attention.modules() if _is_projection(module)}
    if flow:
        projections -= {id(module) for module in model.anatomy.output_projections}
    return [name for name, module in model.hf.named_modules() if id(module) in projections]


def _is_projection(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
