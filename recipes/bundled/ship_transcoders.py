"""Put trained transcoders into the package, in int8 with a scale a row; measure them as shipped, note hash and log.

python recipes/bundled/ship_transcoders.py runs/transcoders/dense dense
python recipes/bundled/ship_transcoders.py runs/transcoders/sparse sparse
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import gossamer
from gossamer.corpus import language
from gossamer.files import read_json, sha256, write_json
from gossamer.tasks.split import Split
from gossamer.transcoders.door import BUNDLED_FOLDER, load
from gossamer.transcoders.evaluate import evaluate
from gossamer.transcoders.storage import TENSORS

HASHES = Path(__file__).with_name("hashes.json")
LOGS = Path(__file__).with_name("logs")


def main(run: str, member: str) -> None:
    if member not in ("dense", "sparse"):
        sys.exit(f"The pair's members are dense and sparse, not {member!r}.")
    model = gossamer.load(f"bundled/{member}")
    transcoders = load(Path(run) / "transcoders", model=model)
    folder = transcoders.save(BUNDLED_FOLDER / member, dtype="int8")
    held_out = language.sequences(model.tokenizer, 256, length=128, seed=99, split=Split.HELD_OUT)
    report = evaluate(model, load(f"bundled/{member}", model=model), held_out)
    report.save(folder / "report.json")
    shutil.copy(Path(run) / "metrics.jsonl", LOGS / f"transcoders-{member}.jsonl")
    hashes = read_json(HASHES) if HASHES.exists() else {}
    hashes[f"transcoders/{member}"] = sha256(folder / TENSORS)
    write_json(HASHES, hashes)
    size = (folder / TENSORS).stat().st_size / 1e6
    print(f"{folder}: {size:.1f} MB, unexplained {report.mean_unexplained:.3f} at L0 {report.mean_l0:.1f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
