"""Exact head patching against TransformerLens' own, and edge attribution against plain passes, in one run.

    pip install gossamer[bench]
    python benchmarks/patching.py                 # every head by Gossamer, one head of each layer by TransformerLens
    python benchmarks/patching.py --theirs 12     # every head by both
    python benchmarks/patching.py --layers 5,6    # quicker: two layers of average cost

The model is a random one of GPT-2 small's size, its matrices scaled so that heads matter. `copy` prompts differ from
the first word on, `ioi` prompts in one late token. Same model, same pairs, same precision, same threads.

Heads: TransformerLens runs its own `generic_activation_patch` on hook_z, one head a forward; every head costs it the
same, so its time for all is extrapolated from a sample, and printed as such. Gossamer restarts in the head's layer.
Preparation (recording both runs, the cache) is measured apart and counted once.

Edges: a step of the integrated gradients, the recording of both runs included, in units of one plain forward and
backward pass (to the embeddings) of the same prompts.

Seconds are also given as the process's own, which other work on the machine does not stretch.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from gossamer.circuits.edge_attribution import without_weight_gradients
from gossamer.circuits.edges import edge_scores
from gossamer.circuits.runs import PairedRuns
from gossamer.circuits.scenarios import Scenarios, measure
from gossamer.models import LoadedModel
from gossamer.models.checkpoint import finish
from gossamer.tasks import Pair, Task, TokenBatch

N_PAIRS, N_LAYERS, N_HEADS = 16, 12, 12
SCALE = 3.0
STEPS = 5
ROUNDS = 5


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    hf = GPT2LMHeadModel(GPT2Config(bos_token_id=50256, eos_token_id=50256)).eval()
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(10 * SCALE if "wte" in name else SCALE)
            if name.endswith("attn.c_proj.weight"):
                parameter.mul_(4)
    return hf


def make_task(name: str) -> Task:
    """Random tokens in the shape of the two tasks: what counts for time is where clean and corrupt differ."""
    generator = torch.Generator().manual_seed(1)
    length = {"copy": 25, "ioi": 15}[name]
    clean_BT = torch.randint(0, 50256, (N_PAIRS, length), generator=generator)
    corrupt_BT = clean_BT.clone()
    clean_BT[:, 0] = corrupt_BT[:, 0] = 50256
    changed = slice(1, None) if name == "copy" else slice(10, 11)
    corrupt_BT[:, changed] = torch.randint(0, 50256, corrupt_BT[:, changed].shape, generator=generator)
    answers_B2 = torch.randint(0, 50256, (N_PAIRS, 2), generator=generator)
    tokens = TokenBatch(tuple(range(N_PAIRS)), clean_BT, corrupt_BT, answers_B2[:, :1], answers_B2[:, 1:])
    pairs = tuple(Pair("", "", ("",), ("",), name) for _ in range(N_PAIRS))
    return Task(name, "random tokens", pairs, (tokens,), "wrong answers", "logit difference", 0.5, 0)


def timed(action: Callable[[], Any]) -> tuple[Any, np.ndarray]:
    """The result, and seconds on the wall and of the process."""
    before = np.array([time.perf_counter(), time.process_time()])
    result = action()
    return result, np.array([time.perf_counter(), time.process_time()]) - before


def ours(model: LoadedModel, task: Task, layers: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean metric [l, H] of the patched heads, the corrupt metric, and seconds to prepare and to patch."""
    runs, preparing = timed(lambda: PairedRuns(model, task))
    heads_RLH = np.eye(N_LAYERS * N_HEADS, dtype=bool).reshape(-1, N_LAYERS, N_HEADS)
    heads_RLH = np.concatenate([heads_RLH[layer * N_HEADS : (layer + 1) * N_HEADS] for layer in layers])
    scenarios = Scenarios(heads_RLH, np.zeros((len(heads_RLH), N_LAYERS), dtype=bool), "clean")
    metric_RN, patching = timed(lambda: measure(runs, scenarios, base="corrupt"))
    return metric_RN.mean(1).reshape(len(layers), N_HEADS), np.array(runs.baseline.corrupt), preparing, patching


def theirs(bridge: Any, task: Task, heads: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean metric of the patched heads, and seconds to prepare and to patch, by TransformerLens."""
    import pandas
    from transformer_lens import patching

    (batch,) = task.tokens

    def metric(logits_BTV: torch.Tensor) -> torch.Tensor:
        return task.score(logits_BTV[:, -1], batch).mean()

    with torch.no_grad():
        (_, cache), preparing = timed(lambda: bridge.run_with_cache(batch.clean_BT))
        wanted = pandas.DataFrame(heads, columns=["layer", "head"])
        found, patched = timed(
            lambda: patching.generic_activation_patch(
                bridge,
                batch.corrupt_BT,
                cache,
                metric,
                patching.layer_head_vector_patch_setter,
                "z",
                index_df=wanted,
            )
        )
    return found.numpy(), preparing, patched


def one_pass(model: LoadedModel, task: Task) -> None:
    """A plain forward and backward pass to the embeddings."""
    (batch,) = task.tokens
    with without_weight_gradients(model.hf):
        embedded_BTD = model.hf.get_input_embeddings()(batch.clean_BT).requires_grad_()
        logits_BV = model.hf(inputs_embeds=embedded_BTD, use_cache=False, logits_to_keep=1).logits[:, -1]
        torch.autograd.grad(task.score(logits_BV, batch).sum(), embedded_BTD)


def passes_per_step(model: LoadedModel, task: Task) -> np.ndarray:
    """What a step of edge attribution costs in forward and backward passes: by the clock, and by the process's time."""
    one_pass(model, task)
    plain, edges = [], []
    for _ in range(ROUNDS):  # in turns, so that both meet the same machine
        plain.append(timed(lambda: one_pass(model, task))[1])
        edges.append(timed(lambda: edge_scores(model, task, steps=STEPS))[1] / STEPS)
    return np.median(edges, axis=0) / np.median(plain, axis=0)


def compare_heads(model: LoadedModel, bridge: Any, task: Task, layers: list[int], per_layer: int) -> str:
    """Both sides' time for all heads, and how far their values are apart, in words."""
    heads = [(layer, head) for layer in layers for head in range(per_layer)]
    metric_LH, corrupt, preparing, patching = ours(model, task, layers)
    reference, their_preparing, their_patching = theirs(bridge, task, heads)
    our_total = preparing + patching * (N_HEADS * N_LAYERS / metric_LH.size)
    their_total = their_preparing + their_patching * (N_HEADS * N_LAYERS / len(heads))
    effect = reference - float(corrupt)
    difference = np.abs(metric_LH[:, :per_layer].ravel() - reference).max() / effect.std()
    wall, process = their_total / our_total
    return (
        f"{wall:.1f}x faster by the clock, {process:.1f}x by the process's own time "
        f"(all heads: Gossamer {_seconds(our_total[0], metric_LH.size)}, TransformerLens "
        f"{_seconds(their_total[0], len(heads))}); effects have std {effect.std():.2f}, largest difference "
        f"{difference:.1e} of it, on {len(heads)} heads"
    )


def _seconds(total: float, timed_heads: int) -> str:
    """The time for all heads, and on how many of them it was measured."""
    every = N_LAYERS * N_HEADS
    return f"{total:.0f} s" + ("" if timed_heads == every else f" extrapolated from {timed_heads} of {every} heads")


def bridge_to(source: GPT2LMHeadModel) -> Any:
    """TransformerLens' view of a copy of the model."""
    from transformer_lens.model_bridge import TransformerBridge

    copy = GPT2LMHeadModel(source.config)
    copy.load_state_dict(source.state_dict())
    with tempfile.TemporaryDirectory() as folder:  # the bridge wants a name with a config and a tokenizer
        source.config.save_pretrained(folder)
        words = Tokenizer(WordLevel({"<s>": 0}, unk_token="<s>"))
        PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>").save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, hf_model=copy.eval(), dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", default="all", help="layers to patch, such as 5,6")
    parser.add_argument("--theirs", type=int, default=1, help="heads of each layer that TransformerLens is given")
    parser.add_argument("--tasks", default="copy,ioi")
    options = parser.parse_args()
    layers = list(range(N_LAYERS)) if options.layers == "all" else [int(layer) for layer in options.layers.split(",")]

    source = make_model()
    bridge = bridge_to(source)
    model = finish(source, name="random GPT-2 small", source="random", tokenizer=None, device="cpu")
    print(f"{N_LAYERS * N_HEADS} heads, {N_PAIRS} pairs, float32, {torch.get_num_threads()} thread(s)")
    for task in map(make_task, options.tasks.split(",")):
        print(f"{task.name}, heads: {compare_heads(model, bridge, task, layers, options.theirs)}")
        wall, process = passes_per_step(model, task)
        print(
            f"{task.name}, edges: a step of {STEPS} costs {wall:.2f} forward and backward passes by the clock,"
            f" {process:.2f} by the process's own time"
        )


if __name__ == "__main__":
    main()
