"""Where a model keeps its parts, by family, and the rule by which its blocks write to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from gossamer.attention import AttentionSite
from gossamer.errors import GossamerError
from gossamer.models.families import FAMILIES, Family, family_of

__all__ = ["FAMILIES", "Anatomy", "Family", "anatomy", "family_of"]


@dataclass(frozen=True)
class Anatomy:
    """The named parts of a causal LM; tuples run over layers.

    `attention_writers` and `mlp_writers` are the modules whose output is added to the residual stream: the part itself,
    or its post-norm where the family has one. `attention_norms` and `mlp_norms` read the residual stream; an entry is
    None where the family has no norm in front of that part. An attention module's output is the first of a tuple.
    """

    family: str
    embedding: nn.Module
    position_embedding: nn.Module | None
    blocks: tuple[nn.Module, ...]
    attentions: tuple[nn.Module, ...]
    attention_norms: tuple[nn.Module | None, ...]
    attention_writers: tuple[nn.Module, ...]
    input_projections: tuple[tuple[nn.Module, ...], ...]
    output_projections: tuple[nn.Module, ...]
    mlps: tuple[nn.Module, ...]
    mlp_norms: tuple[nn.Module | None, ...]
    mlp_writers: tuple[nn.Module, ...]
    final_norm: nn.Module
    unembedding: nn.Module
    n_layers: int
    n_heads: int
    n_key_heads: int
    d_model: int
    d_head: int
    parallel: bool
    post_norm: bool

    @property
    def rule(self) -> str:
        """How a block changes the residual stream, in one sentence: what the nodes and edges of a circuit are."""
        reads = "the stream before the block" if self.parallel else "the stream after attention wrote"
        writes = "through a norm of their own" if self.post_norm else "as they are"
        return f"Attention and MLP outputs are added to the residual stream {writes}; the MLP reads {reads}."

    def sites(self) -> list[AttentionSite]:
        """What the attention room needs to know of each layer."""
        return [
            AttentionSite(layer, attention, self.n_heads, self.output_projections[layer], self.blocks[layer])
            for layer, attention in enumerate(self.attentions)
        ]


def anatomy(model: nn.Module) -> Anatomy:
    """Name the parts of a transformers causal LM (a PEFT model is looked through), or refuse with a sentence."""
    hf = _unwrapped(model)
    config = _config_of(hf)
    family = family_of(config.to_dict())
    blocks = _blocks(hf, family)
    return Anatomy(
        family=family.name,
        embedding=_part(hf, family.embedding),
        position_embedding=_part(hf, family.position_embedding) if family.position_embedding else None,
        blocks=blocks,
        final_norm=_part(hf, family.final_norm),
        unembedding=_part(hf, family.unembedding),
        parallel=bool(family.parallel_flag and getattr(config, family.parallel_flag)),
        post_norm=family.attention_post_norm is not None,
        **(_block_parts(blocks, family) | _sizes(config, len(blocks))),
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def _config_of(hf: nn.Module) -> Any:
    config = getattr(hf, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise GossamerError(f"A {type(hf).__name__} is not a transformers model; load one with gossamer.load.")
    return config


def _blocks(hf: nn.Module, family: Family) -> tuple[nn.Module, ...]:
    blocks = _part(hf, family.blocks)
    if not isinstance(blocks, nn.ModuleList):
        raise GossamerError(f"This {family.name} model keeps its blocks in no list; load it as a causal LM.")
    return tuple(blocks)


def _block_parts(blocks: tuple[nn.Module, ...], family: Family) -> dict[str, Any]:
    attentions = _each(blocks, family.attention)
    mlps = _each(blocks, family.mlp)
    return {
        "attentions": attentions,
        "attention_norms": _each_or_none(blocks, family.attention_pre_norm),
        "attention_writers": _each(blocks, family.attention_post_norm or family.attention),
        "input_projections": tuple(tuple(_part(a, name) for name in family.input_projections) for a in attentions),
        "output_projections": _each(attentions, family.output_projection),
        "mlps": mlps,
        "mlp_norms": _each_or_none(blocks, family.mlp_pre_norm),
        "mlp_writers": _each(blocks, family.mlp_post_norm or family.mlp),
    }


def _sizes(config: Any, n_layers: int) -> dict[str, Any]:
    n_heads = int(config.num_attention_heads)
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_key_heads": int(getattr(config, "num_key_value_heads", None) or n_heads),
        "d_model": int(config.hidden_size),
        "d_head": int(getattr(config, "head_dim", None) or config.hidden_size // n_heads),
    }


def _each(modules: tuple[nn.Module, ...], name: str) -> tuple[nn.Module, ...]:
    return tuple(_part(module, name) for module in modules)


def _each_or_none(modules: tuple[nn.Module, ...], name: str | None) -> tuple[nn.Module | None, ...]:
    return tuple(_part(module, name) if name else None for module in modules)


def _part(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError as error:
        raise GossamerError(
            f"{type(module).__name__} has no part {name!r}, so its anatomy is unknown; load it as a causal LM."
        ) from error
