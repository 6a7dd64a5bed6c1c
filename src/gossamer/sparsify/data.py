"""Training text as arrays, and the order in which a run reads it."""

from __future__ import annotations

from gossamer.corpus.order import split_held_out, step_rows
from gossamer.corpus.sequences import Integers, Sequences

__all__ = ["Integers", "Sequences", "split_held_out", "step_rows"]
