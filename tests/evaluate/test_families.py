"""The evaluation runs on families other than GPT-2, with every kind of gate, on packed text."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from random_pairs import LENGTH
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from gossamer.attention import GateConfig, gates_of
from gossamer.evaluate import Effort, SparsityReport, evaluate
from gossamer.models import LoadedModel, gate
from gossamer.models.checkpoint import finish

LITTLE = Effort(sequences=3, prompts=2, shift_sequences=2, baseline_sequences=1, audit_sequences=2)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def make_family(family: str, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
    torch.manual_seed(0)
    grouped = {} if family == "gpt_neox" else {"num_key_value_heads": 2}
    window = {"sliding_window": 16} if family == "mistral" else {}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **SIZES, **grouped, **window, **ids)
    hf = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.normal_(std=0.3)
    return finish(hf, name=family, source="a test", tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize(
    ("family", "kind", "offset"),
    [("llama", "logit", 0.0), ("gpt_neox", "mass", 2.5), ("mistral", "flow", 3.0), ("olmo2", "logit", -0.5)],
)
def test_families(family: str, kind: str, offset: float, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.txt").write_text(
            "Anna has a red box. Tom put the dog at the park." * (number % 3 + 1)
        )
    dense = make_family(family, tokenizer)
    sparse = gate(copy.deepcopy(dense), GateConfig(kind=kind, offset=offset))  # type: ignore[arg-type]
    assert len(gates_of(sparse.hf)) == 2
    report = evaluate(dense, sparse, text=tmp_path, length=LENGTH, tasks=["ioi"], effort=LITTLE)
    check(report)


def check(report: SparsityReport) -> None:
    density = report.density
    assert 0.02 < density.of_causal_pairs < density.of_document_pairs < 0.98
    counted = sum(count or 0 for row in report.head_table("sparse").open_edges for count in row)
    assert counted == pytest.approx(density.open_edges, rel=0.01)
    assert report.score("without attention").divergence.value > 0
    assert report.margins is not None
    for flips in report.margins.flips:
        if flips.name != "bfloat16":
            assert flips.of_open < 0.02, flips
            assert flips.largest_logit_change < 0.2, flips
    assert report.baselines is not None
    for baseline in report.baselines.each:
        assert baseline.curve[0].of_causal_pairs > baseline.curve[-1].of_causal_pairs
        assert baseline.curve[0].difference == pytest.approx(0, abs=1e-3)
