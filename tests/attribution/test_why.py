"""Gate logits split over pairs of sources: exact, and each part what it says."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from edge_models import FAMILIES, gated, tiny
from random_transcoders import random_transcoders

from gossamer import GateConfig, GossamerError, LoadedModel, gate
from gossamer.attention import tape
from gossamer.attribution.frozen import freeze
from gossamer.attribution.frozen_scores import freeze_scores
from gossamer.attribution.nodes import BIAS, TOKEN
from gossamer.attribution.replacement import Replacement, replace_mlps
from gossamer.attribution.why import ScoreSplit, split_score

IDS = torch.tensor([3, 5, 9, 2, 7, 1, 4])
BILINEAR = [family for family in FAMILIES if family != "gemma2"]


def made(model: LoadedModel) -> Replacement:
    return replace_mlps(freeze(model, IDS), random_transcoders(model, "cross-layer"))


@pytest.mark.parametrize("make", [tiny, gated], ids=["dense", "gated"])
@pytest.mark.parametrize("family", BILINEAR)
def test_the_parts_sum_to_the_gate_logit(family: str, make: Callable[[str], LoadedModel]) -> None:
    model = make(family)
    replacement = made(model)
    wanted = "gate" if model.is_sparse else "scores"
    with tape(model.hf, record=[wanted]) as run:
        model.logits(IDS)
    for layer, head, query, key in ((0, 0, 5, 2), (1, 1, 6, 6), (1, 2, 4, 0)):
        split = split_score(replacement, layer, head, query, key)
        expected = float(run[wanted, layer][0, head, query, key])
        total = split.gate_logit if model.is_sparse else split.score
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert split.parts_SS.sum() == pytest.approx(split.score, rel=1e-9, abs=1e-9)
        np.testing.assert_allclose(split.parts_SS.sum(1), split.by_query(), atol=1e-12)
        np.testing.assert_allclose(split.parts_SS.sum(0), split.by_key(), atol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_part_is_what_the_score_loses_with_both_sources(family: str) -> None:
    """Bilinear: the score without s in the query and t in the key, taken apart by inclusion and exclusion."""
    replacement = made(gated(family))
    frozen = replacement.frozen
    split = split_score(replacement, 1, 1, 5, 3)
    sides = freeze_scores(frozen, 1, 1)
    block = frozen.layers[1]
    tokens = np.flatnonzero(split.sources.is_kind(TOKEN))

    def normed(scale_5: float, scale_3: float) -> torch.Tensor:
        """The normed stream in front of layer 1 with two tokens' vectors scaled, MLP 0 held."""
        embedding_QD = frozen.embedding_QD.clone()
        embedding_QD[5] *= scale_5
        embedding_QD[3] *= scale_3
        first = frozen.layers[0]
        resid_QD = embedding_QD + frozen.position_QD
        resid_QD = resid_QD + first.apply(resid_QD) + first.constant_QD + first.mlp_written_QD
        return block.attention_norm.linear(resid_QD) + block.attention_norm.bias_D

    def score(one: torch.Tensor, other: torch.Tensor) -> float:
        query_E = sides.query.map_QED[5] @ one[5] + sides.query.bias_QE[5]
        key_E = sides.key.map_QED[3] @ other[3] + sides.key.bias_QE[3]
        return float(sides.scaling * query_E @ key_E)

    whole, no_query, no_key = normed(1, 1), normed(0, 1), normed(1, 0)
    without_both = score(whole, whole) - score(no_query, whole) - score(whole, no_key) + score(no_query, no_key)
    assert split.parts_SS[tokens[5], tokens[3]] == pytest.approx(without_both, rel=1e-8)
    assert abs(without_both) > 1e-6


def test_the_largest_pairs_are_named_and_come_back_from_disk(tmp_path) -> None:
    split = split_score(made(gated("llama")), 1, 0, 5, 2)
    largest = split.largest(4)
    sizes = [abs(pair.part) for pair in largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(np.abs(split.parts_SS).max())
    assert split.sources.is_kind(BIAS)[-1]
    loaded = ScoreSplit.load(split.save(tmp_path / "split.safetensors"))
    assert loaded.largest(4) == largest
    assert loaded.gate_logit == split.gate_logit


def test_pairs_that_give_nothing_are_not_named() -> None:
    """In front of the first layer a query reads its own token and the bias, and so does a key: four pairs at most."""
    split = split_score(made(gated("llama")), 0, 0, 5, 2)
    largest = split.largest(100)
    assert len(largest) == np.count_nonzero(split.parts_SS) <= 4
    assert all(pair.part for pair in largest)


def test_what_is_not_bilinear_is_refused() -> None:
    for kind in ("mass", "flow"):
        with pytest.raises(GossamerError, match=f"A {kind} gate decides by an edge's share"):
            split_score(made(gate(tiny("gpt2"), GateConfig(kind, 5.0))), 0, 0, 1, 0)
    with pytest.raises(GossamerError, match="caps its scores softly"):
        split_score(made(tiny("gemma2")), 0, 0, 1, 0)
    replacement = made(tiny("gpt2"))
    with pytest.raises(GossamerError, match="may not attend to 4"):
        split_score(replacement, 0, 0, 2, 4)
    with pytest.raises(GossamerError, match="There is no edge from 0 to 9"):
        split_score(replacement, 0, 0, 9, 0)
