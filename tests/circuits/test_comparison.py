"""What is said about circuits of two models: rules, and sizes that mean something."""

from __future__ import annotations

import numpy as np

from gossamer.circuits.comparison import _size, rules_in_words
from gossamer.circuits.effect import Baseline, Curve


def test_rules_refer_to_one_another_only_where_they_have_the_same_parts() -> None:
    heads = {"ranking": "by effect", "left out": "replaced"}
    both = {"ranking": "by effect", "left out": "shut"}
    single = {"ranking": "by weight", "left out": "shut", "MLPs": "free"}
    assert rules_in_words({"heads": heads, "both": both, "single": single}) == [
        "heads, ranking: by effect; left out: replaced",
        "both as heads, but left out: shut",
        "single, ranking: by weight; left out: shut; MLPs: free",
    ]
    fewer = {"ranking": "by weight", "left out": "shut"}
    assert rules_in_words({"single": single, "fewer": fewer})[1] == "fewer, ranking: by weight; left out: shut"


def test_a_level_that_nothing_kept_reaches_on_some_prompts_has_no_size() -> None:
    """Shutting edges puts nothing in their place: with none kept the metric may lie anywhere between the two runs."""
    baseline = Baseline(np.full(8, 10.0), np.zeros(8))
    metric_SN = np.stack([np.linspace(3, 7, 8), np.full(8, 7.0), np.full(8, 10.0)])
    curve = Curve("edges", 4, np.array([0, 2, 4]), metric_SN, baseline, {})
    found = _size(curve, 0.65)
    assert found is not None
    assert found.value == 2
    assert _size(curve, 0.5) is None  # 0.5 with none kept
    assert _size(curve, 0.55) is None  # inside its interval
