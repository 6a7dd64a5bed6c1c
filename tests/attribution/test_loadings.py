"""Head loadings against every path of a tiny model, one by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch
from edge_models import gated, tiny

from gossamer.attribution.frozen import FrozenModel, freeze
from gossamer.attribution.loadings import Buckets, Sources, Targets, load_edges
from gossamer.models.micro import micro

IDS = torch.tensor([3, 17, 8, 25])
FAMILIES = ["gpt2", "llama", "gpt_neox", "gpt_neox in sequence", "olmo2", "gemma2"]
EXACT = {"rtol": 1e-9, "atol": 1e-12}
Bucket = tuple[int, int] | str


def some_sources(frozen: FrozenModel) -> Sources:
    """At every position one that writes in front of everything, and one that writes behind every MLP but the first."""
    n_positions, width = frozen.embedding_QD.shape
    writes = torch.zeros(2 * n_positions, frozen.n_layers + 1, width, dtype=torch.float64)
    writes[:n_positions, 0] = frozen.embedding_QD
    writes[n_positions:, 2:] = torch.randn_like(writes[n_positions:, 2:])
    return Sources(torch.arange(n_positions).repeat(2), writes)


def some_targets(frozen: FrozenModel) -> Targets:
    """At every position one that reads where each MLP does, and the logits."""
    n_positions, width = frozen.embedding_QD.shape
    layer_T = torch.arange(frozen.n_layers + 1).repeat_interleave(n_positions)
    position_T = torch.arange(n_positions).repeat(frozen.n_layers + 1)
    return Targets(position_T, layer_T, torch.randn(len(layer_T), width, dtype=torch.float64))


def every_path(
    frozen: FrozenModel, source: int, sources: Sources, target: int, targets: Targets
) -> dict[Bucket, float]:
    """The buckets of one edge, path by path."""
    buckets: dict[Bucket, float] = defaultdict(float)
    key, query = int(sources.position_S[source]), int(targets.position_T[target])
    reads, parallel = int(targets.layer_T[target]), frozen.layers[0].parallel
    n_attention = min(reads if parallel else reads + 1, frozen.n_layers)
    for slot in range(reads + 1):
        start = (slot, key, sources.writes_SWD[source, slot], ())
        for end, vector, steps in walks(frozen, start, n_attention):
            if end == query:
                bucket = bucket_of(key, query, steps)
                buckets[bucket] += float(vector @ targets.cotangent_TD[target])
    return buckets


Steps = tuple[tuple[int, int, int], ...]  # layer, head, where to


def walks(frozen: FrozenModel, start, n_attention: int) -> Iterator[tuple[int, torch.Tensor, Steps]]:
    layer, position, vector, steps = start
    if layer >= n_attention:
        yield position, vector, steps
        return
    yield from walks(frozen, (layer + 1, position, vector, steps), n_attention)
    placed_QD = torch.zeros_like(frozen.embedding_QD)
    placed_QD[position] = vector
    for head in range(len(frozen.layers[layer].pattern_HQK)):
        written_QD = frozen.apply_head(layer, head, placed_QD)
        for there in range(position, frozen.n_positions):
            taken = (*steps, (layer, head, there))
            yield from walks(frozen, (layer + 1, there, written_QD[there], taken), n_attention)


def bucket_of(key: int, query: int, steps: Steps) -> Bucket:
    if {there for *_, there in steps} - {key, query}:
        return "others"
    if not steps:
        return "no head"
    if key == query:
        return steps[-1][:2]
    return next(step[:2] for step in steps if step[2] == query)


def loaded(buckets: Buckets, edge: int) -> dict[Bucket, float]:
    found: dict[Bucket, float] = {
        (int(layer), int(head)): float(buckets.heads_ELH[edge, layer, head])
        for layer, head in buckets.heads_ELH[edge].nonzero()
    }
    return found | {"no head": float(buckets.no_head_E[edge]), "others": float(buckets.others_E[edge])}


@pytest.mark.parametrize("make", [tiny, gated])
@pytest.mark.parametrize("family", FAMILIES)
def test_buckets_are_the_sums_over_their_paths(family, make) -> None:
    torch.manual_seed(3)
    n_layers = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    heads = {"n_head": 2} if family == "gpt2" else {"num_attention_heads": 2}
    heads |= {} if family.startswith("gpt") else {"num_key_value_heads": 1}
    frozen = freeze(make(family, **n_layers, **heads), IDS)
    sources, targets = some_sources(frozen), some_targets(frozen)
    n_targets = len(targets.position_T)
    first_to_last_logit = n_targets - 1
    picked = torch.cat([torch.randperm(len(sources.position_S) * n_targets)[:20], torch.tensor([first_to_last_logit])])
    pairs = picked // n_targets, picked % n_targets
    buckets = load_edges(frozen, sources, targets, pairs)
    seen = set()
    for edge, (source, target) in enumerate(zip(*(part.tolist() for part in pairs), strict=True)):
        expected, found = every_path(frozen, source, sources, target, targets), loaded(buckets, edge)
        for bucket in expected | found:
            assert found.get(bucket, 0.0) == pytest.approx(expected.get(bucket, 0.0), rel=1e-9, abs=1e-12)
        seen |= {bucket if isinstance(bucket, str) else "head" for bucket, size in expected.items() if size}
    assert seen == {"head", "no head", "others"}


@pytest.mark.parametrize("make", [tiny, gated])
@pytest.mark.parametrize("family", [*FAMILIES, "qwen3", "phi3"])
def test_buckets_sum_to_the_edge_and_edges_to_the_frozen_gradient(family, make) -> None:
    frozen = freeze(make(family), torch.tensor([3, 17, 8, 25, 8, 11, 2]))
    sources, targets = some_sources(frozen), some_targets(frozen)
    buckets = load_edges(frozen, sources, targets)
    total = buckets.heads_ELH.sum((1, 2)) + buckets.no_head_E + buckets.others_E
    torch.testing.assert_close(total, buckets.edge_E, rtol=1e-9, atol=1e-11)
    edge_ST = buckets.edge_E.unflatten(0, (len(sources.position_S), -1))
    for target in range(len(targets.position_T)):
        expected_S = by_the_frozen_model(frozen, sources, targets, target)
        torch.testing.assert_close(edge_ST[:, target], expected_S, **EXACT)
    assert (buckets.edge_E.abs() > 1e-3).double().mean() > 0.1


def by_the_frozen_model(frozen: FrozenModel, sources: Sources, targets: Targets, target: int) -> torch.Tensor:
    """The edges into one target by the frozen model's own pull-back."""
    reads = int(targets.layer_T[target])
    cotangent_QD = torch.zeros_like(frozen.embedding_QD)
    cotangent_QD[targets.position_T[target]] = targets.cotangent_TD[target]
    if reads < frozen.n_layers and not frozen.layers[reads].parallel:
        cotangent_QD = frozen.pull_back_block(reads, cotangent_QD)
    edge_S = torch.zeros(len(sources.position_S), dtype=torch.float64)
    for slot in reversed(range(reads + 1)):
        edge_S += (sources.writes_SWD[:, slot] * cotangent_QD[sources.position_S]).sum(-1)
        if slot:
            cotangent_QD = frozen.pull_back_block(slot - 1, cotangent_QD)
    return edge_S


def test_a_batch_of_edges_is_the_edges_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from gossamer.attribution import loadings

    frozen = freeze(gated("llama"), IDS)
    sources, targets = some_sources(frozen), some_targets(frozen)
    whole = load_edges(frozen, sources, targets)
    monkeypatch.setattr(loadings, "MOST_EDGES", 7)
    torch.testing.assert_close(load_edges(frozen, sources, targets).heads_ELH, whole.heads_ELH)


def test_the_micro_models_answer_goes_by_one_head() -> None:
    """`b` at position 2 writes 4 to its logit behind the repeated `a`: all of it by the induction head."""
    model = micro(gated=True)
    frozen = freeze(model, model.encode("a b a"))
    writes = torch.zeros(1, 3, frozen.embedding_QD.shape[1], dtype=torch.float64)
    writes[0, 0] = frozen.embedding_QD[2]
    logit_b = Targets(torch.tensor([3]), torch.tensor([2]), frozen.unembedding_VD[[2]])
    buckets = load_edges(frozen, Sources(torch.tensor([2]), writes), logit_b)
    assert float(buckets.edge_E) == pytest.approx(4)
    assert loaded(buckets, 0) == {(1, 0): pytest.approx(4), "no head": 0, "others": 0}
