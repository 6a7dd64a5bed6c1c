"""A comparison of a tiny random pair, and the same with names and tokens that break careless drawing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_pairs import make_dense, make_sparse

from gossamer.attribution.explain import Explanation
from gossamer.attribution.pair import ROLES
from gossamer.compare import Comparison, Effort, Side, compare
from gossamer.corpus import tokenizer
from gossamer.models import LoadedModel

SMALL = Effort(prompts=6, maps=5, attributed=4, edges=True, steps=1, random_draws=2, resamples=100)
NASTY = ("\n", "🦎", "שלום", "$x^{$", "<script>", "\t", " ", "&amp;", "\\alpha_")
NAMES = {"dense": "Dense <b>$x^{$", "sparse": "Sparse 🦎 <script>"}


@pytest.fixture(scope="session")
def models() -> tuple[LoadedModel, LoadedModel]:
    dense = make_dense(tokenizer.load())
    return dense, make_sparse(dense)


@pytest.fixture(scope="session")
def pair(models: tuple[LoadedModel, LoadedModel]) -> Comparison:
    return compare(*models, "ioi", effort=SMALL, force=True)


@pytest.fixture(scope="session")
def nasty(pair: Comparison) -> Comparison:
    """The same result under names that are markup and mathematics, on tokens of every kind."""
    sides = {role: _renamed(side, NAMES[role]) for role, side in pair.sides.items()}
    statistics = replace(
        pair.statistics,
        dense=replace(pair.statistics.dense, model=NAMES["dense"]),
        sparse=replace(pair.statistics.sparse, model=NAMES["sparse"]),
    )
    relations = replace(pair.relations, models=tuple(NAMES.values()))
    assert pair.attribution is not None
    example = pair.attribution.example
    renamed = {role: _reworded(example.of(role), NAMES[role]) for role in ROLES}
    attribution = replace(pair.attribution, example=replace(example, **renamed))
    changes = {"statistics": statistics, "relations": relations, "attribution": attribution}
    return replace(pair, **sides, **changes, description="say $x^{$ <script>")


def _nasty_tokens(n: int) -> tuple[str, ...]:
    return tuple(NASTY[at % len(NASTY)] for at in range(n))


def _reworded(found: Explanation, name: str) -> Explanation:
    prompt = replace(found.tokens.prompt, tokens=_nasty_tokens(len(found.tokens.prompt)))
    return replace(found, tokens=replace(found.tokens, prompt=prompt, model=name))


def _renamed(side: Side, name: str) -> Side:
    tokens = tuple(_nasty_tokens(len(prompt)) for prompt in side.maps.tokens)
    heads = replace(side.heads, provenance=side.heads.provenance | {"model": {"name": name}})
    return Side(replace(side.maps, tokens=tokens, model=name), replace(side.report, model=name), heads)
