"""Train cross-layer transcoders of a bundled model on the synthetic language, on any device.

    python recipes/bundled/train_transcoders.py --member dense --out runs/transcoders/dense --device cuda
    python recipes/bundled/train_transcoders.py --member sparse --out runs/transcoders/sparse --device cuda --minutes 3

Stopping it at any time is safe: run the same command again and it goes on from its last checkpoint. `--minutes` is
turned into a number of steps when the run begins.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gossamer
from gossamer.corpus import language, tokenizer
from gossamer.corpus.sequences import Sequences
from gossamer.files import read_json
from gossamer.tasks.split import Split
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.door import load
from gossamer.transcoders.pace import steps_within
from gossamer.transcoders.run import train
from gossamer.transcoders.trainer import StepRecord

LENGTH = 128
STARTED = {"sparsity_share": 0.0}  # what begins sparse need not become so
CHUNK = 1024  # sequences that a process makes at a time
TEXT_SEED, HELD_OUT_SEED = 11, 99
SETTINGS: dict[str, Any] = {
    "kind": "cross-layer",
    "activation": "jumprelu",
    "n_features": 1024,
    "target_l0": 24,
    "steps": 6_000,
    "batch": 64,
    "learning_rate": 1e-3,
    "checkpoint_every": 250,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--member", choices=("dense", "sparse"), required=True)
    parser.add_argument("--model", help="a folder in the place of the bundled member")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=65_536, help="sequences of training text")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that make the training text")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--n-features", type=int)
    parser.add_argument("--target-l0", type=int)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--activation", choices=("jumprelu", "topk"))
    parser.add_argument("--precision", choices=("float32", "bfloat16"))
    parser.add_argument("--start", help="transcoders to begin with, such as bundled/dense for the sparse member")
    return parser.parse_args()


def some_sequences(start: int, n: int) -> Any:
    return language.sequences(tokenizer.load(), n, length=LENGTH, seed=TEXT_SEED, start=start).ids_NT


def training_text(path: Path, n: int, workers: int) -> Sequences:
    """The training text, kept beside the run so that going on need not make it again."""
    if not path.exists():
        starts = range(0, n, CHUNK)
        sizes = [min(CHUNK, n - start) for start in starts]
        with ProcessPoolExecutor(workers) as pool:
            Sequences(np.concatenate(list(pool.map(some_sequences, starts, sizes)))).save(path)
    return Sequences.load(path)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    text = training_text(options.out / "text.safetensors", options.sequences, options.workers)
    model = gossamer.load(options.model or f"bundled/{options.member}", device=options.device, dtype="float32")
    held_out = language.sequences(
        model.tokenizer, options.held_out, length=LENGTH, seed=HELD_OUT_SEED, split=Split.HELD_OUT
    )
    names = ("steps", "batch", "n_features", "target_l0", "learning_rate", "activation", "precision")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    start = load(options.start) if options.start else None
    config = TranscoderConfig.from_dict(SETTINGS | given | (STARTED if start else {}))
    begun = options.out / "begin.json"
    if begun.exists():
        config = TranscoderConfig.from_dict(read_json(begun)["config"])
    elif options.minutes:
        config = config.replace(steps=steps_within(options.minutes, model, text, config))
    print(f"{model.describe()}\n{config.steps} steps of {config.batch} sequences, {len(text)} in all", flush=True)
    started = time.monotonic()

    def tell(record: StepRecord) -> None:
        numbers = {name: round(value, 4) for name, value in record.to_dict().items()}
        print(f"{time.monotonic() - started:.0f} s", numbers, flush=True)

    result = train(model, text, held_out, config, options.out, start=start, tell=tell)
    print(result.report.to_dict())


if __name__ == "__main__":
    main()
