"""What works well if nothing else was asked for.

Two ways of training. With many tokens weights learn to do without edges: the published gate, a wide slack at first so
that edges go before the weights have learned it, rates that move the weights far. With few tokens such rates cost more
than they repair, and the loss would still be above its bound at the end. Then it is the offsets that learn, from a
start at which nothing is lost: a gate on the share of the row that an edge holds shuts half of all edges for free.
"""

from __future__ import annotations

from typing import Any

from gossamer.sparsify.config import SparsifyConfig
from gossamer.sparsify.text import SELF, Text

DEFAULT_MINUTES = 10.0
WIDE_AT_FIRST = 3.0
FEW_TOKENS = 1_000_000
WITH_FEW_TOKENS: dict[str, Any] = {
    "gate": "mass",
    "keep_mass": 0.9999,
    "learning_rate": 2e-5,
    "gate_learning_rate": 0.04,
    "noise_start": 0.05,
    "noise_end": 0.02,
    "aim": 0.25,
}


def with_habits(config: SparsifyConfig, given: dict[str, Any], text: Text) -> SparsifyConfig:
    """Length, slack and what to learn from, where they were not given.

    Where the dense model runs along anyway, its own predictions are learned from: half of the signal, or all of it on
    its own samples, where they are what the samples are drawn from and keep a small text from being learned by heart.
    """
    if config.steps is None and config.minutes is None:
        config = config.replace(minutes=DEFAULT_MINUTES)
    if "slack_start" not in given:
        config = config.replace(slack_start=WIDE_AT_FIRST * config.slack)
    if "distillation" not in given and config.constraint == "cross-entropy" and config.reference == "paired":
        config = config.replace(distillation=1.0 if isinstance(text, str) and text == SELF else 0.5)
    return config


def with_few_tokens(config: SparsifyConfig, given: dict[str, Any]) -> SparsifyConfig:
    """The settings of a run of minutes, if fewer than `FEW_TOKENS` fit into them; what was given stays."""
    changes = {name: value for name, value in WITH_FEW_TOKENS.items() if name not in given}
    if "gate_offset" in given or given.get("gate") == "logit":
        changes.pop("keep_mass", None)  # a raw score keeps nearly all mass only where nearly all edges are open
    if config.trainable == "lora":
        changes.pop("learning_rate", None)  # adapters begin at nothing and have to come up
    if "slack_start" not in given:
        changes["slack_start"] = config.slack
    return config.replace(**changes)
