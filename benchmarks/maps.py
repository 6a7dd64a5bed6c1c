"""Sizes and times of attention maps and their pictures: `python benchmarks/maps.py`, or one of `--only NAMES`.

    stored    bytes an edge on disk: 144 heads, 1,024 tokens, 0.5 % of pairs open
    capture   what capturing adds to the same gated forward of a model of GPT-2 small's size (medians, taking turns)
    long      2,048 tokens x 144 heads on a random rotary model (NeoX, 12 x 12), with the process' peak memory
    taxonomy  recall on constructed maps, class by class (seeds and lengths that no threshold was chosen on)
    head-grid 144 + 144 heads on 128 tokens as SVG and as PDF

All models are random: what counts for size and time is how many edges are open and where.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, PretrainedConfig

from gossamer.attention import GateConfig, gates_of, tape
from gossamer.figures.head_grid import head_grid
from gossamer.figures.style import save_figure
from gossamer.maps import AttentionMaps, from_matrices
from gossamer.maps.capture import capture
from gossamer.models import LoadedModel, gate
from gossamer.models.checkpoint import finish
from gossamer.patterns.constructed import KINDS, construct
from gossamer.patterns.taxonomy import classify

LAYERS, HEADS, WIDTH, DENSITY = 12, 12, 768, 0.005
VOCABULARY = 5_000


def random_gated(config: PretrainedConfig, *, density: float = DENSITY) -> LoadedModel:
    """A random model whose every head opens about this share of its edges."""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim > 1 and ("attn" in name or "attention" in name):
                parameter.mul_(4)
    model = gate(
        finish(hf, name="random", source="a benchmark", tokenizer=None, device="cpu"), GateConfig("logit", 0.0)
    )
    ids_BT = random_ids(256)
    with torch.no_grad(), tape(model.hf, record=("scores",)) as t:
        model.hf(ids_BT)
    lower = torch.ones(256, 256, dtype=torch.bool).tril()
    for layer, part in enumerate(gates_of(model.hf)):
        scores_HP = t["scores", layer][0][:, lower]
        part.offset_H.data = -torch.quantile(scores_HP, 1 - density, dim=1)
    return model


def random_ids(length: int, prompts: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (prompts, length), generator=torch.Generator().manual_seed(1))


def gpt2(n_positions: int) -> GPT2Config:
    return GPT2Config(vocab_size=VOCABULARY, n_positions=n_positions, bos_token_id=0, eos_token_id=0)


def stored() -> None:
    model = random_gated(gpt2(1024))
    captured = capture(model, random_ids(1024))
    rng = np.random.default_rng(0)
    scattered = np.tril(rng.random((LAYERS, HEADS, 1024, 1024), dtype=np.float32))
    scattered *= rng.random(scattered.shape, dtype=np.float32) < DENSITY
    scattered = scattered / np.maximum(scattered.sum(-1, keepdims=True), 1)
    random = from_matrices([scattered], ids=random_ids(1024).tolist(), gated=True)
    for name, maps in (("captured from a random model", captured), ("edges at random places", random)):
        with tempfile.TemporaryDirectory() as folder:
            path = maps.save(Path(folder) / "maps")
            edges, rows = ((path / file).stat().st_size for file in ("edges.parquet", "rows.parquet"))
        n = maps.n_edges
        print(
            f"stored, {name}: {n:,} edges ({maps.density():.2%} open), {edges / n:.2f} bytes an edge (target 6);"
            f" summaries of rows beside them {rows / 1e6:.2f} MB, all together {(edges + rows) / n:.2f} bytes an edge"
        )


def capturing() -> None:
    model, ids_BT = random_gated(gpt2(1024)), random_ids(1024, 2)

    @torch.no_grad()
    def forward() -> None:
        model.hf.base_model(ids_BT, use_cache=False)

    def watched() -> AttentionMaps:
        return capture(model, ids_BT)

    plain, seen, named = alternately(forward, watched, model.provenance, rounds=7)
    share = watched().density()
    print(
        f"capture, 2 x 1,024 tokens, {share:.2%} open: forward {plain:.2f} s, captured {seen - named:.2f} s,"
        f" {(seen - named) / plain - 1:+.1%} (target 30 %); besides, the hash of the weights that names the model,"
        f" once a capture whatever its length, {named:.2f} s"
    )


def alternately(*actions: Callable[[], object], rounds: int) -> list[float]:
    """Median seconds of the process for each of some actions that take turns; the first round does not count."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, seconds in zip(actions, times, strict=True):
            start = time.process_time()
            action()
            seconds.append(time.process_time() - start)
    return [statistics.median(seconds[1:]) for seconds in times]


def long() -> None:
    config = GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=2048,
    )
    model = random_gated(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    maps = capture(model, random_ids(2048))
    took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dense = LAYERS * HEADS * 2048**2 * 4
    print(
        f"long, 2,048 tokens x {len(maps.heads)} heads: {maps.n_edges:,} edges ({maps.density():.2%} open)"
        f" in {took:.1f} s; {held(maps) / 1e6:.0f} MB in memory (as matrices {dense / 1e6:,.0f} MB),"
        f" peak of the process {peak / 1e6:.2f} GB, {max(0, peak - before) / 1e6:.2f} GB above the model"
    )


def held(maps: AttentionMaps) -> int:
    rows = (maps.rows.entropy, maps.rows.first, maps.rows.below, maps.rows.n_below)
    return sum(part.nbytes for part in (maps.offsets, maps.query, maps.key, maps.weight, *rows))


def taxonomy() -> None:
    found: Counter[tuple[str, str]] = Counter()
    for number, lengths in enumerate(([48], [64, 40], [96], [160, 128], [384])):
        for gated in (False, True):
            made = construct(list(KINDS) * 12, lengths=lengths, seed=3000 + 2 * number + gated, gated=gated)
            labels = classify(made.maps).labels[0]
            found += Counter((truth.kind, label) for truth, label in zip(made.truth, labels, strict=True))
    shares = {kind: found[kind, kind] / sum(n for (one, _), n in found.items() if one == kind) for kind in KINDS}
    for kind, share in shares.items():
        print(f"taxonomy, {kind}: recall {share:.1%} (target 90 %)")
    right = sum(found[kind, kind] for kind in KINDS)
    print(f"taxonomy, all: {right} of {found.total()} constructed heads, {right / found.total():.1%} (target 97 %)")


def drawing() -> None:
    rng = np.random.default_rng(0)
    panels = []
    for share in (1.0, 0.01):
        weights = np.tril(rng.gamma(0.5, size=(LAYERS, HEADS, 128, 128)))
        weights /= weights.sum(-1, keepdims=True)
        weights *= rng.random(weights.shape) < share
        panels.append(from_matrices([weights.astype(np.float32)], ids=random_ids(128).tolist(), gated=share < 1))
    for suffix in (".svg", ".pdf"):
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            path = save_figure(head_grid(panels), Path(folder) / f"grid{suffix}")
            took = time.perf_counter() - start
            size = path.stat().st_size / 1e6
        print(f"head-grid, 144 + 144 heads as {suffix}: {took:.1f} s (target 15 s), {size:.2f} MB (target 5 MB)")


PARTS = {"stored": stored, "capture": capturing, "long": long, "taxonomy": taxonomy, "head-grid": drawing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    for name in parser.parse_args().only:
        PARTS[name]()


if __name__ == "__main__":
    main()
