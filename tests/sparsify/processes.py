"""Run by test_distributed, alone or as one of two processes: a short run on the tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import gossamer.sparsify.receipt as receipt
from gossamer.models import load
from gossamer.sparsify import Sequences, SparsifyConfig, train


def main(model: str, text: str, out: str, settings: str) -> None:
    torch.set_num_threads(1)
    receipt.write_picture = lambda out: None
    ids_NT = Sequences.load(text).ids_NT
    train(load(model), ids_NT, None, SparsifyConfig.from_dict(json.loads(settings)), Path(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
