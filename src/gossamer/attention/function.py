"""The one attention function: registered with transformers under the name `gossamer`, for every family alike.

It honours or refuses by name whatever a model passes, gates if the module has a gate, serves the tape if one is open,
and is the library's own attention otherwise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from gossamer.attention.blocked import blocked_attention
from gossamer.attention.call import AttentionCall, GateTerms
from gossamer.attention.gates import ATTENTION_NAME, GATE_KEY, SiteMark, mark_of
from gossamer.attention.masks import allowed_pairs, build_mask, refuse_unseparated_documents
from gossamer.attention.reference import gated_attention
from gossamer.attention.residual import residual_log_norm, write_log_norm
from gossamer.attention.sampling import LayerNoise, SampledGates, active_sampling
from gossamer.attention.tape import LayerTape, active_tapes, merged_edits, record, replace_heads, show_whole, watcher_of
from gossamer.errors import GossamerError

# What models hand down without any meaning for attention weights once the mask is built.
HARMLESS = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "sliding_window",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "num_items_in_batch",
        "labels",
        "logits_to_keep",
    }
)


def gossamer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention output [B,Q,H,E] and, where someone asked for them, the weights [B,H,Q,K] used."""
    _refuse_unknown(kwargs)
    _refuse_other_attention(module, kwargs)
    mark = mark_of(module)
    gated = _is_gated(module, mark)
    allowed = allowed_pairs(attention_mask, query.shape[2], key.shape[2])
    if allowed is None:
        refuse_unseparated_documents(kwargs.get("position_ids"))
    query, key, value = _same_precision(query, key, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    tapes, wants_weights = active_tapes(module), _weights_wanted()

    plain = not gated and not tapes and not wants_weights and softcap is None and s_aux is None
    if plain and (dropout or not _trains_on_cpu(query, key, value)):
        precise = bool(getattr(module, "reorder_and_upcast_attn", False))
        return _dense(query, key, value, allowed, scaling, dropout, precise=precise), None

    call = AttentionCall(query, key, value, scaling, allowed, softcap=softcap, sink_H=s_aux, dropout=float(dropout))
    sampling = active_sampling(module) if gated else None
    if sampling is not None or tapes:
        _refuse_recomputation()
    with torch.autocast(query.device.type, enabled=False):  # gates are decided in float32
        if gated:
            assert mark is not None
            call = _with_gate(call, module, mark, sampling.noise_for(module) if sampling is not None else None)
        return _attend(call, sampling, tapes, wants_weights=wants_weights)


def _attend(
    call: AttentionCall, sampling: SampledGates | None, tapes: list[LayerTape], *, wants_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """By the reference where matrices must exist, by the fast path otherwise; then serve sampling and tapes."""
    call = replace(call, watch=watcher_of(tapes))
    extras, open_H = None, None
    if wants_weights or call.dropout or any(tape.needs_matrices for tape in tapes):
        edits = merged_edits(tapes, call)
        out_BQHE, extras = gated_attention(call, edits)
        show_whole(call, edits, extras)
        expected_H, open_H = extras.expected_open_H, extras.open_H
    else:
        out_BQHE, expected_H, open_H = blocked_attention(call)
    if sampling is not None:
        assert expected_H is not None
        assert open_H is not None
        sampling.account(call, expected_H, open_H)
    out_BQHE = replace_heads(tapes, out_BQHE)
    record(tapes, call, out_BQHE, extras)
    weights_BHQK = extras.weights_BHQK.to(call.query_BHQE.dtype) if extras is not None and wants_weights else None
    return out_BQHE, weights_BHQK


def _with_gate(call: AttentionCall, module: nn.Module, mark: SiteMark, noise: LayerNoise | None) -> AttentionCall:
    """The call with the module's gate; a flow gate adds the size of what each edge writes."""
    gate = module.gate
    assert isinstance(gate, nn.Module)
    offset_H = gate(call.query_BHQE)
    terms = GateTerms(offset_H, relative=mark.kind != "logit")
    if mark.kind == "flow":
        assert mark.projection_path is not None
        projection = module.get_submodule(mark.projection_path)
        key_term_BHK = write_log_norm(projection, call.value_BHKE)
        terms = GateTerms(offset_H, True, -residual_log_norm(module), key_term_BHK)
    return replace(call, gate=terms, noise=noise)


def _trains_on_cpu(*tensors: Tensor) -> bool:
    """Where the fast path beats torch's own kernel, whose backward in bfloat16 takes three times as long."""
    return torch.is_grad_enabled() and any(t.requires_grad and t.device.type == "cpu" for t in tensors)


def _dense(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, scaling: float, dropout: float, *, precise: bool
) -> Tensor:
    """Ordinary attention by torch's own kernel; `precise` computes it in float32 as `reorder_and_upcast_attn` asks."""
    dtype = value.dtype
    if precise:
        query, key, value = query.float(), key.float(), value.float()
    out_BHQE = functional.scaled_dot_product_attention(
        query, key, value, allowed, dropout, is_causal=allowed is None and query.shape[2] > 1, scale=scaling
    )
    if allowed is not None:  # rows without any allowed key: zeros, whatever the kernel makes of them
        out_BHQE = out_BHQE.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return out_BHQE.transpose(1, 2).to(dtype)


def _same_precision(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One precision for all three: autocast's if it is on, else that of the values."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    if dtype != torch.float64 and value.dtype == torch.float64:
        dtype = torch.float64
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _is_gated(module: nn.Module, mark: SiteMark | None) -> bool:
    declared = getattr(getattr(module, "config", None), GATE_KEY, None) is not None
    has_gate = mark is not None and mark.kind is not None and hasattr(module, "gate")
    if declared and not has_gate:
        raise GossamerError(
            "The model's config says its attention is gated (gossamer_gate) but no gate was loaded; load it with"
            " gossamer.load, or it would run as a dense model."
        )
    if has_gate and not declared:
        raise GossamerError(
            "The model has gates but its config lost the gossamer_gate key; attach the gates again with gossamer."
        )
    return has_gate


def _refuse_unknown(kwargs: dict[str, Any]) -> None:
    for name, given in kwargs.items():
        if name in HARMLESS or name == "is_causal" or given is None:
            continue
        raise GossamerError(
            f"The model passed {name!r} to its attention, which gossamer does not know and will not ignore; use a model"
            " without it."
        )


def _refuse_other_attention(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if getattr(module, "is_cross_attention", False):
        raise GossamerError("Cross attention cannot be gated; use a decoder-only model.")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise GossamerError("Attention that sees later tokens cannot be gated; use a causal language model.")


def _refuse_recomputation() -> None:
    """Activation checkpointing runs attention under its own hooks, and again inside the backward pass."""
    hooks_of = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    hooks = hooks_of(False)
    checkpointed = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    if checkpointed or torch._C._current_graph_task_id() != -1:
        raise GossamerError(
            "Activation checkpointing runs attention a second time, which sampled gates and tapes cannot follow; switch"
            " it off."
        )


def _weights_wanted() -> bool:
    """Whether this forward was asked for `output_attentions`."""
    try:
        from transformers.utils.output_capturing import _active_collector
    except ImportError:
        return False
    collected = _active_collector.get()
    return bool(collected) and "attentions" in collected


AttentionInterface.register(ATTENTION_NAME, gossamer_attention)
AttentionMaskInterface.register(ATTENTION_NAME, build_mask)
