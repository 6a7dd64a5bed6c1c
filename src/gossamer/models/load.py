"""One door for every model: bundled names, `smollm2`, folders, GGUF files, foreign state dicts, the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from gossamer.errors import GossamerError, nearest
from gossamer.models import hub
from gossamer.models.checkpoint import LoadSettings, load_folder, read_tokenizer
from gossamer.models.foreign import ForeignOptions, load_foreign
from gossamer.models.gguf import load_gguf, smollm2_file
from gossamer.models.loaded import LoadedModel
from gossamer.models.weights import PICKLE_SUFFIXES

BUNDLED_FOLDER = Path(__file__).parent / "bundled"
BUNDLED = ("bundled/dense", "bundled/sparse")
# For comparison: a second seed of the sparse twin and the dense control, in a checkout only.
BESIDE_THE_RECIPE = ("bundled/sparse-2", "bundled/control")
RECIPE_FOLDER = Path(__file__).parents[3] / "recipes" / "bundled" / "models"
SMOLLM2 = "smollm2"
NAMES = (*BUNDLED, SMOLLM2)
_FILE_SUFFIXES = (".gguf", ".safetensors", *PICKLE_SUFFIXES)


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: str | torch.device = "cpu",
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    foreign: ForeignOptions | None = None,
) -> LoadedModel:
    """Load any causal LM that gossamer can read, on the gossamer attention function.

    `name`: `bundled/dense`, `bundled/sparse` (in a checkout also `bundled/sparse-2`, another seed, and
    `bundled/control`, the dense model trained on without gates), `smollm2`, a folder, a `.gguf` file, a state-dict
    file (.safetensors, .pt, .pth, .bin) in nanoGPT's, TransformerLens' or transformers' layout, or a hub id. `dtype`
    None means float32 on a CPU and the stored precision elsewhere. `tokenizer` (or a folder that has one) replaces the
    model's own. `foreign` says what a state dict alone does not.
    """
    if not str(name).strip():
        raise GossamerError(f"A model needs a name; known ones are {', '.join(NAMES)}.")
    settings = LoadSettings(name=str(name), dtype=dtype, device=device, tokenizer=_given_tokenizer(tokenizer))
    path = Path(name).expanduser()
    if str(name) == SMOLLM2:
        return load_gguf(smollm2_file(), **settings)
    if str(name) in (*BUNDLED, *BESIDE_THE_RECIPE):
        return load_folder(_bundled_folder(str(name)), **settings)
    if path.is_dir():
        return load_folder(path, **settings)
    if path.is_file():
        if path.suffix == ".gguf":
            return load_gguf(path, **settings)
        return load_foreign(path, foreign or ForeignOptions(), **settings)
    return load_folder(_hub_folder(str(name)), **settings)


def is_at_hand(name: str) -> bool:
    """Whether a bundled name can be loaded from this installation."""
    return (_place_of(name) / "config.json").is_file()


def _place_of(name: str) -> Path:
    return (RECIPE_FOLDER if name in BESIDE_THE_RECIPE else BUNDLED_FOLDER) / name.removeprefix("bundled/")


def _bundled_folder(name: str) -> Path:
    folder = _place_of(name)
    if not is_at_hand(name) and name in BESIDE_THE_RECIPE:
        raise GossamerError(f"{name} is kept beside the recipe, outside the package: use a checkout of gossamer.")
    if not is_at_hand(name):
        raise GossamerError(f"{name} is missing from this installation; reinstall gossamer from a release wheel.")
    return folder


def _hub_folder(name: str) -> Path:
    if name.startswith("bundled/") or name.endswith(_FILE_SUFFIXES) or not hub.is_hub_id(name):
        raise GossamerError(f"{name!r} is no known model, folder or file.{_hint(name)}")
    return hub.hub_folder(name, _hint(name))


def _hint(name: str) -> str:
    beside = Path(name).expanduser().parent
    folders = [str(child) for child in beside.glob("*") if (child / "config.json").is_file()] if beside.is_dir() else []
    return nearest(name, [*NAMES, *BESIDE_THE_RECIPE, *folders]) or f" Known names are {', '.join(NAMES)}."


def _given_tokenizer(tokenizer: PreTrainedTokenizerBase | str | Path | None) -> PreTrainedTokenizerBase | None:
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    found = read_tokenizer(Path(tokenizer))
    if found is None:
        raise GossamerError(f"{tokenizer} holds no tokenizer; give a folder with tokenizer.json.")
    return found


def catalogue() -> dict[str, str]:
    """The names that need no path, each with what it is or what is missing to use it."""
    return {name: _state(name) for name in NAMES}


def _state(name: str) -> str:
    try:
        smollm2_file() if name == SMOLLM2 else _bundled_folder(name)
    except GossamerError as error:
        return str(error)
    return "ready"
