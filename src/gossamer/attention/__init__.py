"""Attention with gates: one function for every family, the tape that looks inside it, and the sampling for training."""

from gossamer.attention.blocked import blocked_attention
from gossamer.attention.call import AttentionCall, GateTerms
from gossamer.attention.function import gossamer_attention
from gossamer.attention.gates import (
    ATTENTION_NAME,
    GATE_KEY,
    AttentionSite,
    Gate,
    GateConfig,
    attach_gates,
    attentions_of,
    detach_gates,
    gates_of,
    use_gossamer_attention,
)
from gossamer.attention.reference import gated_attention
from gossamer.attention.sampling import SampledGates, sampled_gates
from gossamer.attention.tape import ForceOpen, ForceShut, FrozenGates, HeadOutput, Tape, Weights, tape

__all__ = [
    "ATTENTION_NAME",
    "GATE_KEY",
    "AttentionCall",
    "AttentionSite",
    "ForceOpen",
    "ForceShut",
    "FrozenGates",
    "Gate",
    "GateConfig",
    "GateTerms",
    "HeadOutput",
    "SampledGates",
    "Tape",
    "Weights",
    "attach_gates",
    "attentions_of",
    "blocked_attention",
    "detach_gates",
    "gated_attention",
    "gates_of",
    "gossamer_attention",
    "sampled_gates",
    "tape",
    "use_gossamer_attention",
]
