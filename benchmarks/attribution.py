"""Attribution on the bundled pair, measured: `python benchmarks/attribution.py`, or some of `--only NAMES`.

heads      heads for 80 % of the hop that carries the answer, over the prompts of every task, by all three measures
graph      seconds, nodes and edges of the graph of a 9-token prompt; in float64, what sources and bias leave of any
           target's value, and what the buckets of loadings leave of any edge
agreement  predicted against measured effect of ablating clusters of features, pooled over tasks
edges      contributions of single attention edges against exact ablation of the same edges
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import torch

import gossamer as gs
from gossamer.attribution import (
    TranscoderPair,
    ablate_clusters,
    attribute_task,
    attribution_graph,
    freeze,
    graph_loadings,
    next_token_target,
    read_prompt,
    replace_mlps,
    token_attribution,
)
from gossamer.attribution.agreement import PREDICTIONS
from gossamer.attribution.weights import REAL
from gossamer.circuits.effect import Estimate

PROMPT, TARGET = 'The opposite of "large" is "', "small"
ROLES = ("dense", "sparse")


def pair(dtype: str = "float32") -> tuple[gs.LoadedModel, gs.LoadedModel]:
    dense, sparse = (gs.load(f"bundled/{role}", dtype=dtype) for role in ROLES)
    return dense, sparse


def heads(options: argparse.Namespace) -> None:
    models = pair()
    print("| task | prompts | measure | dense | sparse | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for name in gs.tasks.NAMES:
        task = gs.tasks.get(name, models[0].tokenizer, options.n, seed=options.seed)
        found = attribute_task(*models, task)
        if options.out:
            found.save(options.out / f"heads-{name}.safetensors")
        for measure in found.measures:
            dense, sparse, ratio = found.medians(measure)
            row = f"| {name} | {len(found.rows)} | {measure} | {dense:g} | {sparse:g} | {ratio:.1f}× |"
            print(row, flush=True)


def graph(options: argparse.Namespace) -> None:
    print("| model | seconds | nodes | edges | errors' share | replacement | worst target | worst edge |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    doubles = TranscoderPair.bundled(*pair("float64"))
    for role, single, double in zip(ROLES, pair(), pair("float64"), strict=True):
        transcoders = gs.transcoders.load(f"bundled/{role}", model=single)
        prompt = read_prompt(single, PROMPT)
        begun = time.perf_counter()
        found = attribution_graph(replace_mlps(freeze(single, prompt.ids_T(single)), transcoders))
        seconds = time.perf_counter() - begun
        replacement = replace_mlps(freeze(double, prompt.ids_T(double)), getattr(doubles, role))
        exact = attribution_graph(replacement)
        target = np.abs(exact.remainder_T / exact.value_T).max()
        loadings = graph_loadings(replacement, exact.pruned())
        edge = np.abs(loadings.missing_E / loadings.edge_E).max()
        scores = f"{found.scores.error_share:.3f} | {found.scores.replacement:.3f}"
        sizes = f"{seconds:.1f} | {len(found.nodes):,} | {found.n_edges:,}"
        print(f"| {single.name} | {sizes} | {scores} | {target:.1e} | {edge:.1e} |", flush=True)


def agreement(options: argparse.Namespace) -> None:
    print("| model | predicted by | clusters | Spearman | same sign | of them | same sign, all |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in pair():
        tasks = [gs.tasks.get(name, model.tokenizer, options.prompts, seed=options.seed) for name in gs.tasks.NAMES]
        found = ablate_clusters(model, gs.transcoders.load(model.name, model=model), tasks)
        if options.out:
            found.save(options.out / f"agreement-{model.name.split('/')[-1]}.safetensors")
        parts = {"all tasks": found} | {task.name: found.of_task(task.name) for task in tasks}
        for (name, part), by in product(parts.items(), PREDICTIONS):
            rank, sign, every = part.spearman(by), part.same_sign(by), part.same_sign(by, 0.0)
            figures = f"{_interval(rank)} | {_interval(sign)} | {part.counted_N(by).sum()} | {_interval(every)}"
            print(f"| {model.name}, {name} | {by} | {len(part.rows)} | {figures} |", flush=True)


def _interval(one: Estimate) -> str:
    return f"{one.value:.2f} [{one.low:.2f}, {one.high:.2f}]"


def edges(options: argparse.Namespace) -> None:
    print("| model | edges | Pearson | Spearman | same sign, by effect |\n| --- | --- | --- | --- | --- |")
    for model in pair():
        prompt = read_prompt(model, PROMPT)
        found = token_attribution(model, prompt, next_token_target(model, prompt, TARGET), ablate=REAL).agreement()
        print(
            f"| {model.name} | {found.edges:,} | {found.pearson:.2f} | {found.spearman:.2f} | {found.same_sign:.2f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        part.__name__: part for part in (heads, graph, agreement, edges)
    }
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--n", type=int, default=24, help="prompts a task whose heads are counted")
    parser.add_argument("--prompts", type=int, default=10, help="prompts a task on which clusters are ablated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep the results in this folder")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only:
        print(f"\n{name}\n")
        begun = time.perf_counter()
        parts[name](options)
        print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
