"""Train the bundled dense model on the synthetic language.

    python recipes/bundled/train_dense.py --out runs/bundled/dense

Stopping it at any time is safe: run the same command again and it goes on from its last checkpoint. The schedule is a
warm-up, a plateau and a linear decay, so `--steps` may be changed as long as the decay has not begun.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

from gossamer.corpus import language, tokenizer
from gossamer.files import atomic_file
from gossamer.tasks.split import Split

LENGTH = 128
WIDTH = 168


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=7_000)
    parser.add_argument("--decay", type=int, default=2_000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--matrix-rate", type=float, default=5e-3)
    parser.add_argument("--vector-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def new_model(n_vocabulary: int, seed: int) -> GPT2LMHeadModel:
    """GPT-2 small's anatomy, narrow; positions start as sines, which lets previous-token heads form early."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=n_vocabulary,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=12,
        n_head=12,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    position = torch.arange(LENGTH)[:, None] * torch.exp(-math.log(1_000) * torch.arange(0, WIDTH, 2) / WIDTH)
    with torch.no_grad():
        model.transformer.wte.weight.normal_(std=0.05)
        model.transformer.wpe.weight.copy_(0.05 * torch.cat((position.sin(), position.cos()), 1))
    return model


def optimizers(model: GPT2LMHeadModel, options: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for embeddings, biases and norms."""
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=options.matrix_rate, weight_decay=0.02, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(others, lr=options.vector_rate, betas=(0.9, 0.98), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def rate(step: int, options: argparse.Namespace) -> float:
    return min(1.0, (step + 1) / 100, (options.steps - step) / options.decay)


class Data:
    """Batches by step number; a chunk of documents is made at a time."""

    def __init__(self, tok, options: argparse.Namespace) -> None:
        self.tok, self.batch, self.seed = tok, options.batch, options.seed
        self.chunk_steps, self.chunk, self.number = 256, np.empty(0), -1

    def __call__(self, step: int) -> torch.Tensor:
        number, offset = divmod(step, self.chunk_steps)
        if number != self.number:
            n = self.batch * self.chunk_steps
            self.chunk = language.sequences(self.tok, n, length=LENGTH, seed=self.seed, start=number * n).ids_NT
            self.number = number
        return torch.from_numpy(self.chunk[offset * self.batch : (offset + 1) * self.batch])


def loss_of(model: GPT2LMHeadModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, use_cache=False).logits
    return cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def save(path: Path, step: int, model: GPT2LMHeadModel, optims: list[torch.optim.Optimizer]) -> None:
    with atomic_file(path) as temporary:
        torch.save({"step": step, "model": model.state_dict(), "optims": [o.state_dict() for o in optims]}, temporary)


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    tok = tokenizer.build()
    model = new_model(len(tok), options.seed)
    optims = optimizers(model, options)
    data, step = Data(tok, options), 0
    held_out = torch.from_numpy(language.sequences(tok, 64, length=LENGTH, seed=99, split=Split.HELD_OUT).ids_NT)
    checkpoint = options.out / "state.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optims, state["optims"], strict=True):
            optimizer.load_state_dict(saved)
        step = state["step"]
    model.train()
    running, started = [], time.time()
    while step < options.steps:
        for optimizer in optims:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate(step, options)
        loss = loss_of(model, data(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optims:
            optimizer.step()
            optimizer.zero_grad()
        running.append(loss.item())
        step += 1
        if step % 50 == 0:
            record = {"step": step, "tokens": step * options.batch * LENGTH, "loss": round(float(np.mean(running)), 4)}
            record["seconds_a_step"] = round((time.time() - started) / len(running), 3)
            if step % 250 == 0:
                with torch.no_grad():
                    record["held_out"] = round(loss_of(model, held_out).item(), 4)
                save(checkpoint, step, model, optims)
            with open(options.out / "log.jsonl", "a") as log:
                log.write(json.dumps(record) + "\n")
            print(record, flush=True)
            running, started = [], time.time()
    save(checkpoint, step, model, optims)
    model.to(torch.bfloat16).save_pretrained(options.out / "model")
    tok.save_pretrained(options.out / "model")


if __name__ == "__main__":
    main()
