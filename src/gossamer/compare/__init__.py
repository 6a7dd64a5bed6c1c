"""Compare: a dense and a sparse model on the same prompts, circuits, maps, patterns, statistics, relations in one."""

from gossamer.callable_room import make_callable
from gossamer.compare.comparison import Comparison, Side
from gossamer.compare.run import FULL, QUICK, Effort, compare

__all__ = ["FULL", "QUICK", "Comparison", "Effort", "Side", "compare"]

make_callable(__name__, "compare")
