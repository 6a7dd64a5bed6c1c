"""Attention maps: every open edge of every head, stored as edges.

Reading, slicing and saving maps needs no torch; `gossamer.maps.capture` makes them from a model and does.
"""

from gossamer.maps.builder import MapBuilder, from_matrices
from gossamer.maps.store import AttentionMaps, Edges, head_name, parse_head

__all__ = ["AttentionMaps", "Edges", "MapBuilder", "from_matrices", "head_name", "parse_head"]
