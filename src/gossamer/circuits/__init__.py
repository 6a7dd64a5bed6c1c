"""Circuits: which heads and edges a behaviour needs, measured by exact interventions."""

from gossamer.circuits.attention_curves import edge_curve
from gossamer.circuits.attention_edges import AttentionEdges
from gossamer.circuits.compare import Comparison, compare
from gossamer.circuits.component_graph import ComponentGraph
from gossamer.circuits.edges import EdgeCircuits, EdgeScores, edge_circuits, edge_scores, random_edge_circuits
from gossamer.circuits.effect import LEVELS, Baseline, Curve, Estimate, RandomCircuits, ShutCurve, size_ratio
from gossamer.circuits.patching import Effects, PositionEffects, effects, position_effects
from gossamer.circuits.smallest import HeadCircuits, smallest_circuit

__all__ = [
    "LEVELS",
    "AttentionEdges",
    "Baseline",
    "Comparison",
    "ComponentGraph",
    "Curve",
    "EdgeCircuits",
    "EdgeScores",
    "Effects",
    "Estimate",
    "HeadCircuits",
    "PositionEffects",
    "RandomCircuits",
    "ShutCurve",
    "compare",
    "edge_circuits",
    "edge_curve",
    "edge_scores",
    "effects",
    "position_effects",
    "random_edge_circuits",
    "size_ratio",
    "smallest_circuit",
]
