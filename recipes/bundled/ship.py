"""Put a trained model into the package, in bfloat16 (gates stay float32), and note its hash.

    python recipes/bundled/ship.py runs/bundled/dense/model bundled/dense
    python recipes/bundled/ship.py runs/bundled/sparse-1/model bundled/sparse
    python recipes/bundled/ship.py runs/bundled/sparse-2/model sparse-2    # beside the recipe, not in the package
    python recipes/bundled/ship.py runs/bundled/control/model control

Plain transformers cannot open the sparse one, and that is meant.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gossamer
from gossamer.files import read_json, sha256, write_json
from gossamer.models.load import BUNDLED_FOLDER

HASHES = Path(__file__).with_name("hashes.json")
BESIDE = Path(__file__).with_name("models")
PLACES = {
    "bundled/dense": BUNDLED_FOLDER / "dense",
    "bundled/sparse": BUNDLED_FOLDER / "sparse",
    "sparse-2": BESIDE / "sparse-2",
    "control": BESIDE / "control",
}


def main(source: str, name: str) -> None:
    if name not in PLACES:
        sys.exit(f"What ships is one of {', '.join(PLACES)}, not {name!r}.")
    model = gossamer.load(source)
    model.hf.config.pad_token_id = None  # BOS pads too, and transformers would take every text for a padded one
    folder = model.save(PLACES[name], dtype=torch.bfloat16)
    hashes = read_json(HASHES) if HASHES.exists() else {}
    hashes[name] = sha256(folder / "model.safetensors")
    write_json(HASHES, hashes)
    print(f"{folder}: {hashes[name]}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
