"""Time of a training step with sampled gates against the same step with the library's eager attention.

Both models take turns in one process, so that whatever else the machine does falls on both alike.

    python benchmarks/attention_step.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gossamer.attention as attention


def model_of(
    layers: int, heads: int, width: int, vocabulary: int, positions: int, *, gate: str | None
) -> GPT2LMHeadModel:
    config = GPT2Config(
        n_layer=layers, n_head=heads, n_embd=width, vocab_size=vocabulary, n_positions=positions,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    model.set_attn_implementation("eager")
    if gate is not None:
        sites = [
            attention.AttentionSite(i, block.attn, heads, block.attn.c_proj, block)
            for i, block in enumerate(model.transformer.h)
        ]
        attention.attach_gates(model, sites, attention.GateConfig(kind=gate, offset=1.0))  # type: ignore[arg-type]
    return model


def step_of(model: GPT2LMHeadModel, ids: torch.Tensor, *, gated: bool, bf16: bool) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(number: int) -> None:
        sampling = attention.sampled_gates(model, tau=0.7, seed=1, step=number) if gated else nullcontext()
        with sampling as run:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = model(ids).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
            if run is not None:
                loss = loss + run.expected_open
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(name: str, shape: tuple[int, int, int, int], length: int, batch: int, *, bf16: bool, rounds: int) -> None:
    ids = torch.randint(0, shape[3], (batch, length), generator=torch.Generator().manual_seed(0))
    kinds = (None, "logit", "mass", "flow")
    steps = {
        kind: step_of(model_of(*shape, length, gate=kind), ids, gated=kind is not None, bf16=bf16) for kind in kinds
    }
    times: dict[str | None, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        for kind in kinds:
            start = time.perf_counter()
            steps[kind](number)
            if number:  # the first round warms up
                times[kind].append(time.perf_counter() - start)
    eager = statistics.median(times[None])
    for kind in kinds:
        median = statistics.median(times[kind])
        print(f"{name:44s} {kind or 'eager':6s} {median * 1e3:9.1f} ms  {median / eager:5.2f} x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=["bundled", "small"], default=None)
    options = parser.parse_args()
    if options.only != "small":
        compare(
            "bundled size, T=128, batch 32, bf16 autocast",
            (12, 12, 168, 1000),
            128,
            32,
            bf16=True,
            rounds=options.rounds,
        )
    if options.only != "bundled":
        compare("GPT-2 small, T=256, batch 4, float32", (12, 12, 768, 50257), 256, 4, bf16=False, rounds=options.rounds)
        compare(
            "GPT-2 small, T=256, batch 4, bf16 autocast", (12, 12, 768, 50257), 256, 4, bf16=True, rounds=options.rounds
        )


if __name__ == "__main__":
    main()
