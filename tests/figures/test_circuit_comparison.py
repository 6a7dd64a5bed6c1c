from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib import pyplot as plt

from gossamer.figures.circuit_comparison import circuit_comparison
from gossamer.figures.style import DENSE, SPARSE


@dataclass(frozen=True)
class Steps:
    """A curve that jumps to 1 at a size."""

    total: int
    jump: int

    @property
    def sizes_S(self) -> np.ndarray:
        return np.array([0, self.jump - 1, self.jump, self.total])

    @property
    def explained_S(self) -> np.ndarray:
        return np.array([0.0, 0.5, 0.95, 1.0])

    def interval_S(self) -> tuple[np.ndarray, np.ndarray]:
        return self.explained_S - 0.1, self.explained_S + 0.1

    def smallest(self, level: float) -> int | None:
        reached = np.flatnonzero(self.explained_S >= level)
        return int(self.sizes_S[reached[0]]) if len(reached) else None


def test_both_models_in_every_panel_with_their_sizes() -> None:
    panels = {
        "heads": {"dense": Steps(144, 61), "sparse": Steps(144, 9)},
        "edges": {"dense": Steps(32_491, 4_500), "sparse": Steps(32_491, 90)},
    }
    figure = circuit_comparison(
        panels,
        title="$copy",
        notes=["one rule"],
        random={"edges": {"dense": (4_500, [0.1, 0.2]), "sparse": (90, [0.3])}},
    )
    heads, edges = figure.axes
    assert heads.get_title(loc="left") == "heads kept, of 144"
    assert [line.get_color() for line in heads.lines[:2]] == [DENSE, SPARSE]
    assert [text.get_text() for text in heads.texts] == ["61", "9"]
    assert [text.get_text() for text in edges.texts] == ["4,500", "90"]
    assert edges.get_xscale() == "symlog"
    assert heads.get_xscale() == "linear"
    assert [line.get_xdata().tolist() for line in edges.lines[-2:]] == [[4_500, 4_500], [90]]
    labels = [text.get_text() for text in edges.get_legend().get_texts()]
    assert labels == [f"random, as many as {role}" for role in ("dense", "sparse")]
    assert figure._supxlabel.get_text() == "one rule"  # type: ignore[attr-defined]
    plt.close(figure)


def test_more_panels_than_a_row_holds() -> None:
    panels = {f"unit {number}": {"dense": Steps(10, 3)} for number in range(5)}
    figure = circuit_comparison(panels, title="t")
    assert [axes.get_title(loc="left") for axes in figure.axes] == [f"unit {number} kept, of 10" for number in range(5)]
    assert len({axes.get_subplotspec().rowspan.start for axes in figure.axes}) == 2
    plt.close(figure)


def test_a_level_that_is_never_reached_has_no_mark() -> None:
    figure = circuit_comparison({"heads": {"dense": Steps(10, 3)}}, title="t", level=1.1)
    assert not figure.axes[0].texts
    plt.close(figure)
