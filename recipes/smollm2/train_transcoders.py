"""Train per-layer transcoders of SmolLM2-135M on text of your own, on a CPU if need be.

    python recipes/smollm2/train_transcoders.py --text my-texts --out runs/smollm2-transcoders
    python recipes/smollm2/train_transcoders.py --text my-texts --out runs/smollm2-transcoders --minutes 600

Stopping it at any time is safe: run the same command again and it goes on from its last checkpoint. One step of the
default settings reads 1,016 tokens; activations are recomputed, which costs a fifth of a step and no disk.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import gossamer
from gossamer.corpus import from_text
from gossamer.corpus.order import split_held_out
from gossamer.corpus.sequences import Sequences
from gossamer.files import read_json
from gossamer.transcoders.config import TranscoderConfig
from gossamer.transcoders.pace import steps_within
from gossamer.transcoders.run import train
from gossamer.transcoders.trainer import StepRecord

LENGTH, HELD_OUT = 128, 32
SETTINGS: dict[str, Any] = {
    "kind": "per-layer",
    "activation": "jumprelu",
    "n_features": 2304,
    "target_l0": 48,
    "steps": 20_000,
    "batch": 8,
    "learning_rate": 7e-4,
    "checkpoint_every": 200,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a text file, or a folder of them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int, default=65_536, help="sequences of training text, at most")
    parser.add_argument("--threads", type=int, default=2)
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int)
    length.add_argument("--minutes", type=float)
    return parser.parse_args()


def texts(options: argparse.Namespace, tokenizer: Any) -> tuple[Sequences, Sequences]:
    """Text to train and to measure on, kept beside the run so that it cannot change underneath it."""
    path = options.out / "text.safetensors"
    if not path.exists():
        from_text(options.text, tokenizer, length=LENGTH, limit=options.sequences).save(path)
    return split_held_out(Sequences.load(path), HELD_OUT)


def settings_of(options: argparse.Namespace, model: gossamer.LoadedModel, text: Sequences) -> TranscoderConfig:
    begun = options.out / "begin.json"
    if begun.exists():
        return TranscoderConfig.from_dict(read_json(begun)["config"])
    config = TranscoderConfig.from_dict(SETTINGS | ({"steps": options.steps} if options.steps else {}))
    return config.replace(steps=steps_within(options.minutes, model, text, config)) if options.minutes else config


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    torch.set_float32_matmul_precision("high")
    model = gossamer.load(options.model, device=options.device)
    text, held_out = texts(options, model.tokenizer)
    config = settings_of(options, model, text)
    print(f"{model.describe()}\n{config.steps} steps of {config.batch} sequences, {len(text)} in all", flush=True)
    started = time.monotonic()

    def tell(record: StepRecord) -> None:
        numbers = {name: round(value, 4) for name, value in record.to_dict().items()}
        print(f"{time.monotonic() - started:.0f} s", numbers, flush=True)

    print(train(model, text, held_out, config, options.out, tell=tell).report.to_dict())


if __name__ == "__main__":
    main()
