"""Loadings of embeddings and MLP outputs on a target: complete, and kept by files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from edge_models import gated, tiny

from gossamer.attribution.frozen import freeze
from gossamer.attribution.head_loadings import HeadLoadings, token_loadings
from gossamer.attribution.hops import Hop
from gossamer.attribution.targets import Target, read_prompt

IDS = [3, 17, 8, 25, 8, 11]


@pytest.mark.parametrize(("family", "make"), [("gpt2", tiny), ("llama", gated), ("gpt_neox", gated), ("olmo2", tiny)])
def test_sources_and_constants_sum_to_the_logit(family, make) -> None:
    model = make(family)
    prompt = read_prompt(model, IDS)
    found = token_loadings(model, prompt, Target("logit", 5, "five"))
    frozen = freeze(model, prompt.ids_T(model))
    direction_NV = frozen.logits_V.new_zeros(1, len(frozen.logits_V))
    direction_NV[0, 5] = 1
    constants = float(frozen.logit_constants(direction_NV))
    cotangent_NQD = frozen.logit_cotangents(direction_NV)
    for index in reversed(range(frozen.n_layers)):
        constants += float((cotangent_NQD[0] * frozen.layers[index].constant_QD).sum())
        cotangent_NQD = frozen.pull_back_block(index, cotangent_NQD)
    assert found.edge_E.sum() + constants == pytest.approx(float(frozen.logits_V[5]), rel=1e-9)
    np.testing.assert_allclose(found.missing_E, 0, atol=1e-10)


def test_hops_sum_over_the_edges_between_two_positions(tmp_path: Path) -> None:
    model = gated("llama")
    made = token_loadings(model, read_prompt(model, IDS), Target("log probability", 5, "five"))
    found = HeadLoadings.load(made.save(tmp_path / "loadings.safetensors"))
    assert len(found) == 6 * 3
    assert found.sources[7] == "MLP 0 at 1 '17'"
    hop = Hop(2, 5)
    edges = [edge for edge, name in enumerate(found.sources) if " at 2 " in name]
    np.testing.assert_allclose(found.heads_LH(hop), made.heads_ELH[edges].sum(0))
    assert found.answer_hop.query == 5
    assert found.carriers().total == pytest.approx(found.heads_LH(found.answer_hop).sum())
    assert found.edge_carriers(edges[0]).gross == pytest.approx(np.abs(made.heads_ELH[edges[0]]).sum())


def test_a_soft_capped_logit_is_taken_to_first_order() -> None:
    model = tiny("gemma2", size=0.8)
    cap = model.hf.config.final_logit_softcapping
    prompt = read_prompt(model, IDS)
    capped = token_loadings(model, prompt, Target("logit", 5, "five"))
    logit = float(model.logits(prompt.ids_T(model))[0, -1, 5])
    model.hf.config.final_logit_softcapping = None
    plain = token_loadings(model, prompt, Target("logit", 5, "five"))
    np.testing.assert_allclose(capped.edge_E, plain.edge_E * (1 - (logit / cap) ** 2), rtol=1e-9, atol=1e-12)
