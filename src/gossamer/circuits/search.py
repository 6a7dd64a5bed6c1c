"""Which sizes of a circuit are run when there are too many to run all: a grid, refined where a level is crossed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gossamer.circuits.effect import Baseline, Floats, Ints, smallest_from

Progress = Callable[[int, int], None]
Measure = Callable[[Sequence[int]], Floats]  # from sizes to the metric [S, N]

GRID_RATIO = 1.5
RESOLUTION = 0.02  # bisection stops when the bracket is this share of its upper end, or one
SIZES_AT_ONCE = 8  # between two reports of progress
SEARCH = (
    f"sizes growing by {GRID_RATIO}, then bisection of the last interval that crosses a level, to {RESOLUTION:.0%} of"
    " n; dips between the sizes that were run are not seen"
)


def searched(
    measure: Measure, total: int, baseline: Baseline, levels: Sequence[float], progress: Progress | None = None
) -> tuple[Ints, Floats]:
    """Sizes from 0 to `total` and their metrics [S, N]: a grid, then the middle of every bracket around a level."""
    found: dict[int, Floats] = {}
    wanted = grid(total)
    while wanted:
        planned = len(found) + len(wanted)
        for part in (wanted[first : first + SIZES_AT_ONCE] for first in range(0, len(wanted), SIZES_AT_ONCE)):
            found |= dict(zip(part, measure(part), strict=True))
            if progress is not None:
                progress(len(found), planned)
        sizes_S, metric_SN = _sorted(found)
        wanted = sorted(set(_middles(sizes_S, baseline.explained(metric_SN), levels)))
    return _sorted(found)


def grid(total: int) -> list[int]:
    """0, 1, 2, 3, 5, 7, ... by the grid's ratio, and everything."""
    sizes, size = {0, total}, 1.0
    while size < total:
        sizes.add(round(size))
        size = max(size * GRID_RATIO, size + 1)
    return sorted(sizes)


def _sorted(found: dict[int, Floats]) -> tuple[Ints, Floats]:
    sizes = sorted(found)
    return np.array(sizes, dtype=np.int64), np.stack([found[size] for size in sizes])


def _middles(sizes_S: Ints, explained_S: Floats, levels: Sequence[float]) -> Iterator[int]:
    """For each level that is reached: the size to try next, while its bracket is wide."""
    for level in levels:
        above = smallest_from(explained_S, sizes_S, level)
        if above is None or above == 0:
            continue
        below = int(sizes_S[sizes_S < above][-1])
        if above - below > max(1, int(RESOLUTION * above)):
            yield (above + below) // 2
