"""The taxonomy against the eye: labels written before it was run on those heads, on the bundled model (no network)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gossamer as gs
from gossamer.maps import head_name, parse_head
from gossamer.maps.capture import capture
from gossamer.patterns.taxonomy import LABELS, classify

SETS: dict[str, Any] = json.loads(Path(__file__).with_name("labelled_by_eye.json").read_text("utf-8"))["sets"]
SHAPES = {"smollm2": (30, 9), "bundled/dense": (12, 12)}


@pytest.mark.parametrize("model", SHAPES)
def test_the_labelled_heads_are_those_that_were_drawn(model: str) -> None:
    layers, heads = SHAPES[model]
    left = [head_name(layer, head) for layer in range(layers) for head in range(heads)]
    for part in (SETS["first"], SETS["second"]):
        rng = np.random.default_rng(part[model]["seed"])
        drawn = [left[index] for index in sorted(rng.choice(len(left), 36, replace=False))]
        assert drawn == list(part[model]["labels"])
        left = [name for name in left if name not in drawn]


def test_labels_are_classes() -> None:
    for part in SETS.values():
        for about in part.values():
            for label in about["labels"].values():
                assert set(label["parts"]) <= set(LABELS)
                assert len(label["parts"]) <= 2
                assert set(label.get("unsure", ())) <= set(LABELS)


def test_the_taxonomy_agrees_with_the_eye_on_the_second_set() -> None:
    """Measured: 61 % the same label, 81 % the pattern seen first."""
    about = SETS["second"]["bundled/dense"]
    report = classify(capture(gs.load("bundled/dense"), about["prompts"]))
    same, first = [], []
    for name, label in about["labels"].items():
        layer, head = parse_head(name)
        found = report.parts[layer][head] or (report.label(layer, head),)
        same.append(set(found) == set(label["parts"]))
        first.append(label["parts"][0] in found)
    assert np.mean(same) >= 0.55
    assert np.mean(first) >= 0.75
