"""Transcoders: sparse features in the place of MLPs, per layer or across layers."""

from gossamer.transcoders.cache import Cache, fill_cache
from gossamer.transcoders.circuit_tracer import write_circuit_tracer
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.door import BUNDLED, load
from gossamer.transcoders.evaluate import TranscoderReport, evaluate
from gossamer.transcoders.exact import from_mlp
from gossamer.transcoders.module import TranscoderSet, TranscoderShape, Weights
from gossamer.transcoders.run import TrainedTranscoders, train
from gossamer.transcoders.sites import counted_positions, mlp_activity, watched

__all__ = [
    "BUNDLED",
    "Cache",
    "TrainedTranscoders",
    "TranscoderConfig",
    "TranscoderReport",
    "TranscoderSet",
    "TranscoderShape",
    "Weights",
    "counted_positions",
    "evaluate",
    "fill_cache",
    "from_mlp",
    "load",
    "mlp_activity",
    "train",
    "watched",
    "write_circuit_tracer",
]
