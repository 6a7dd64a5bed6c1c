"""Gates: which edges a head may carry, and how they are attached to a Hugging Face model.

For head h and an allowed pair (query i, key j) with score `s_ij` every gate has a logit `g_ij`; the edge is open
where `g_ij > 0`:

    logit   g = s + b_h                                                  the published gate, with one offset a head
    mass    g = log softmax(s) + b_h                                     how much of the row's attention it is
    flow    g = log(softmax(s) * |W_O^h v_j| / |residual_i|) + b_h       how much it writes, beside what is there

The offsets `b_h` live in a `gate` SUBMODULE of the attention module, so that PEFT's `modules_to_save` keeps them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gossamer.attention.residual import ResidualNorm
from gossamer.errors import GossamerError, nearest

ATTENTION_NAME = "gossamer"
GATE_KEY = "gossamer_gate"
GATE_VERSION = 1

GateKind = Literal["logit", "mass", "flow"]

# Families whose attention never asks transformers' registry: switching them would change nothing, in silence.
BYPASSING_FAMILIES = ("gpt_neo", "gptj", "bloom", "falcon", "mpt", "codegen", "xglm")


@dataclass(frozen=True)
class GateConfig:
    """What kind of gate a model has; stored in its config, so that it cannot get lost."""

    kind: GateKind = "logit"
    offset: float = 4.0
    version: int = GATE_VERSION

    def __post_init__(self) -> None:
        if self.kind not in get_args(GateKind):
            kinds = get_args(GateKind)
            raise GossamerError(
                f"Gate kind {self.kind!r} is unknown; use one of {', '.join(kinds)}.{nearest(str(self.kind), kinds)}"
            )
        if self.version != GATE_VERSION:
            raise GossamerError(
                f"This gate was written in version {self.version!r} of the gate format and only version {GATE_VERSION}"
                " is understood; install a matching gossamer."
            )
        if isinstance(self.offset, bool) or not isinstance(self.offset, int | float) or self.offset != self.offset:
            raise GossamerError(f"A gate's offset must be a number, not {self.offset!r}.")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form kept in the model's config."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GateConfig:
        """Read `to_dict`'s form; an unknown field, kind or version is refused."""
        if not isinstance(data, dict):
            raise GossamerError(f"A gate's configuration must be a mapping, not {type(data).__name__}.")
        known = [field.name for field in fields(cls)]
        if missing := [name for name in ("kind", "version") if name not in data]:
            raise GossamerError(f"The gate's configuration lacks the field {missing[0]!r}.")
        for name in data:
            if name not in known:
                raise GossamerError(f"The gate's configuration has the unknown field {name!r}.{nearest(name, known)}")
        return cls(**data)


class Gate(nn.Module):
    """The learned offsets of one layer's gates, one number a head; float32 even in a bfloat16 model."""

    def __init__(self, kind: GateKind, n_heads: int, offset: float) -> None:
        super().__init__()
        self.kind = kind
        self.offset_H = nn.Parameter(torch.full((n_heads,), float(offset), dtype=torch.float32))

    def forward(self, _like: Tensor | None = None) -> Tensor:
        """The offsets. A call, not an attribute, so that wrappers around the module (PEFT) choose which copy."""
        return self.offset_H

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        def keep_precise(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype in (torch.bfloat16, torch.float16):
                return tensor.to(device=moved.device)
            return moved

        return super()._apply(keep_precise, recurse)

    def extra_repr(self) -> str:
        """Shown when the model is printed."""
        return f"kind={self.kind!r}, n_heads={self.offset_H.numel()}"


@dataclass(frozen=True)
class AttentionSite:
    """Where one layer's attention lives; `models.anatomy` makes these for every family."""

    layer: int
    module: nn.Module
    n_heads: int
    output_projection: nn.Module | None = None
    residual_source: nn.Module | None = None


@dataclass(frozen=True)
class SiteMark:
    """What the attention function needs to know of the module it is called for (kept as a plain attribute)."""

    layer: int
    n_heads: int
    kind: GateKind | None = None
    projection_path: str | None = None


MARK = "gossamer_site"


def mark_of(module: nn.Module) -> SiteMark | None:
    """The mark that `use_gossamer_attention` or `attach_gates` left on an attention module."""
    return getattr(module, MARK, None)


def attentions_of(model: nn.Module) -> Iterator[tuple[SiteMark, nn.Module]]:
    """Marked attention modules in layer order, also inside wrappers such as PEFT's."""
    marked = [(mark, module) for module in model.modules() if (mark := mark_of(module)) is not None]
    return iter(sorted(marked, key=lambda pair: pair[0].layer))


def attach_gates(model: nn.Module, sites: Sequence[AttentionSite], config: GateConfig) -> None:
    """Give every attention module a `gate`, note it in the model's config and route attention through Gossamer."""
    for site in sites:
        if hasattr(site.module, "gate"):
            what = (
                "already has gates; detach them first" if isinstance(site.module.gate, Gate) else "has its own `gate`"
            )
            raise GossamerError(f"The attention module of layer {site.layer} {what}.")
        if config.kind == "flow":
            _require_flow_parts(site)
    use_gossamer_attention(model, sites)
    for site in sites:
        device = next(site.module.parameters()).device
        site.module.gate = Gate(config.kind, site.n_heads, config.offset).to(device)
        path = _child_path(site.module, site.output_projection) if config.kind == "flow" else None
        setattr(site.module, MARK, SiteMark(site.layer, site.n_heads, config.kind, path))
        site.module.register_forward_pre_hook(_require_gossamer)
        if config.kind == "flow":
            assert site.residual_source is not None
            ResidualNorm.watch(site.residual_source, site.module)
    for module_config in _configs(model, sites):
        setattr(module_config, GATE_KEY, config.to_dict())


def detach_gates(model: nn.Module) -> None:
    """Remove gates and key; attention stays on Gossamer's function, ungated, equal to the library's own."""
    for mark, module in attentions_of(model):
        if hasattr(module, "gate"):
            del module.gate
        _remove_hook(module, _require_gossamer)
        setattr(module, MARK, SiteMark(mark.layer, mark.n_heads))
        if hasattr(module.config, GATE_KEY):
            delattr(module.config, GATE_KEY)
    ResidualNorm.unwatch(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and hasattr(part.config, GATE_KEY):
            delattr(part.config, GATE_KEY)


def _require_gossamer(module: nn.Module, _inputs: object) -> None:
    """Runs before a gated attention, since one that was switched away from Gossamer's function never reaches it."""
    chosen = getattr(module.config, "_attn_implementation", None)
    if chosen != ATTENTION_NAME:
        raise GossamerError(
            f"This model has gates but its attention was switched to {chosen!r}, which would run it as a dense model; "
            f"switch back with set_attn_implementation({ATTENTION_NAME!r}), or detach the gates."
        )


def _remove_hook(module: nn.Module, unwanted: object) -> None:
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is unwanted]:
        del module._forward_pre_hooks[key]


def gates_of(model: nn.Module) -> list[Gate]:
    """The gates in layer order (the trained copies where PEFT keeps its own); empty for an ungated model."""
    gates = [getattr(module, "gate", None) for _, module in attentions_of(model)]
    return [active_gate(gate) for gate in gates if isinstance(gate, nn.Module)]


def active_gate(gate: nn.Module) -> Gate:
    """The gate itself, or the copy that a PEFT wrapper trains in its place."""
    if isinstance(gate, Gate):
        return gate
    copies = getattr(gate, "modules_to_save", None)
    active = list(getattr(gate, "active_adapters", []))
    if copies is not None and active and active[0] in copies and not getattr(gate, "disable_adapters", False):
        return copies[active[0]]
    original = getattr(gate, "original_module", None)
    if not isinstance(original, Gate):
        raise GossamerError(
            f"The `gate` of an attention module was replaced by a {type(gate).__name__}; reload the model."
        )
    return original


def use_gossamer_attention(model: nn.Module, sites: Sequence[AttentionSite]) -> None:
    """Switch an ungated model to Gossamer's attention function (same numbers), so that tapes can see it."""
    import gossamer.attention.function  # noqa: F401  (registers the function and its masks)

    if not sites:
        raise GossamerError(
            f"{type(model).__name__} has no attention that Gossamer knows of; use a decoder-only model."
        )
    host = _host(model)
    _refuse_unsupported(host, sites)
    host.set_attn_implementation(ATTENTION_NAME)
    for site in sites:
        if getattr(site.module.config, "_attn_implementation", None) != ATTENTION_NAME:
            raise GossamerError(
                f"{type(host).__name__} does not let its attention implementation be replaced, so it cannot be gated."
            )
        if mark_of(site.module) is None:
            setattr(site.module, MARK, SiteMark(site.layer, site.n_heads))


def _host(model: nn.Module) -> PreTrainedModel:
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            return part
    raise GossamerError(f"{type(model).__name__} is not a Hugging Face transformers model.")


def _refuse_unsupported(host: PreTrainedModel, sites: Sequence[AttentionSite]) -> None:
    family = str(host.config.model_type)
    if family in BYPASSING_FAMILIES or not host._can_set_attn_implementation():
        raise GossamerError(
            f"The {family} family computes attention without transformers' registry of attention functions, so it"
            " cannot be gated; use a GPT-2, NeoX, Llama, Qwen, OLMo-2 or Mistral model."
        )
    if getattr(host.config, "is_encoder_decoder", False):
        raise GossamerError(f"{type(host).__name__} has cross attention, which has no gate; use a decoder-only model.")
    for site in sites:
        if getattr(site.module, "is_causal", True) is False:
            raise GossamerError(
                f"{type(host).__name__} attends to the future in layer {site.layer}; only causal language models can be"
                " gated."
            )


def _require_flow_parts(site: AttentionSite) -> None:
    if site.output_projection is None or site.residual_source is None:
        raise GossamerError(
            f"A flow gate needs the output projection and the block of layer {site.layer}, which this family does not"
            " name; use the logit or mass gate."
        )


def _child_path(parent: nn.Module, child: nn.Module | None) -> str:
    for name, module in parent.named_modules():
        if module is child and name:
            return name
    raise GossamerError("The output projection of a flow gate must be inside the attention module.")


def _configs(model: nn.Module, sites: Sequence[AttentionSite]) -> list[Any]:
    found = [_host(model).config, *(site.module.config for site in sites)]
    return list({id(config): config for config in found}.values())
