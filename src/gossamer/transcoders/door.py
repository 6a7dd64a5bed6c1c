"""One door for every set of transcoders: bundled names and folders, whatever their layout."""

from __future__ import annotations

from pathlib import Path

from gossamer.errors import GossamerError, nearest
from gossamer.models import LoadedModel
from gossamer.transcoders import storage
from gossamer.transcoders.circuit_tracer import is_circuit_tracer, read_circuit_tracer
from gossamer.transcoders.clt_forge import is_clt_forge, read_clt_forge
from gossamer.transcoders.module import TranscoderSet

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
RESULT = "transcoders"  # where a training run leaves them
BUNDLED = ("bundled/dense", "bundled/sparse")


def load(name: str | Path, *, model: LoadedModel | None = None) -> TranscoderSet:
    """Load transcoders: `bundled/dense`, `bundled/sparse`, a folder in gossamer's, circuit-tracer's or CLT-Forge's
    layout, or the folder of a training run that is done.

    With `model`, transcoders that belong to another model are refused.
    """
    transcoders = _load(name)
    if model is not None:
        transcoders.require_model(model)
    return transcoders


def _load(name: str | Path) -> TranscoderSet:
    if str(name) in BUNDLED:
        folder = BUNDLED_FOLDER / str(name).removeprefix("bundled/")
        if not (folder / storage.DESCRIPTION).is_file():
            raise GossamerError(f"The transcoders of {name} are missing from this installation; reinstall gossamer.")
        return storage.load_folder(folder)
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise GossamerError(f"There are no transcoders at {folder}.{nearest(str(name), BUNDLED)}")
    if (folder / storage.DESCRIPTION).is_file():
        return storage.load_folder(folder)
    for belongs, read in ((is_circuit_tracer, read_circuit_tracer), (is_clt_forge, read_clt_forge)):
        if belongs(folder):
            return read(folder)
    if (folder / RESULT / storage.DESCRIPTION).is_file():
        return storage.load_folder(folder / RESULT)
    raise GossamerError(
        f"{folder} holds no transcoders: neither gossamer's {storage.DESCRIPTION}, nor the config.yaml of "
        "circuit-tracer, nor the clt_cfg.json of CLT-Forge."
    )
