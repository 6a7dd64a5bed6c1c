"""The transcoders that ship with the package: the files are those of the recipe, and they are as good as it says."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

import gossamer as gs
from gossamer.corpus import language
from gossamer.files import sha256
from gossamer.tasks.split import Split
from gossamer.transcoders.door import BUNDLED_FOLDER
from gossamer.transcoders.storage import TENSORS

HASHES = json.loads((Path(__file__).parents[2] / "recipes" / "bundled" / "hashes.json").read_text(encoding="utf-8"))
SHIPPED = [name.removeprefix("transcoders/") for name in HASHES if name.startswith("transcoders/")]


def test_exactly_what_the_recipe_shipped_is_in_the_package() -> None:
    assert sorted(path.parent.name for path in BUNDLED_FOLDER.glob(f"*/{TENSORS}")) == sorted(SHIPPED)
    assert sum(path.stat().st_size for path in BUNDLED_FOLDER.rglob("*") if path.is_file()) <= 40e6


@pytest.mark.parametrize("member", SHIPPED)
def test_shipped_transcoders_meet_their_promise(member: str) -> None:
    assert sha256(BUNDLED_FOLDER / member / TENSORS) == HASHES[f"transcoders/{member}"]
    model = gs.load(f"bundled/{member}")
    transcoders = gs.transcoders.load(f"bundled/{member}", model=model)
    assert transcoders.kind == "cross-layer"
    assert transcoders.n_features >= 768
    report = gs.transcoders.TranscoderReport.load(BUNDLED_FOLDER / member / "report.json")
    assert max(report.l0) <= 40
    assert report.mean_unexplained <= 0.2
    held_out = language.sequences(model.tokenizer, 24, length=128, seed=5, split=Split.HELD_OUT)
    measured = gs.transcoders.evaluate(model, transcoders, held_out)
    assert measured.l0 == pytest.approx(report.l0, rel=0.2)
    # A mean over layers needs more text: the rare large outputs of some layers are most of their variance.
    assert median(measured.unexplained) <= 1.5 * median(report.unexplained) + 0.01
