"""Reading weights without running anything: safetensors, and pickles that let in tensors and plain data alone."""

from __future__ import annotations

import logging
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from gossamer.attention import ATTENTION_NAME
from gossamer.errors import GossamerError, nearest
from gossamer.files import read_json

PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_HARMLESS_MODULES = ("torch", "collections")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a transformers folder's weights, safetensors if there are both; all of them must exist."""
    for whole, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        if (folder / whole).is_file():
            return [folder / whole]
        if (folder / index).is_file():
            return _shards(folder, index)
    raise GossamerError(
        f"{folder} holds no weights (no model.safetensors, no pytorch_model.bin); give one that save_pretrained wrote."
    )


def _shards(folder: Path, index: str) -> list[Path]:
    written = read_json(folder / index)
    try:
        names = sorted(set(written["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise GossamerError(f"{folder / index} lists no weight files; copy the folder again.") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise GossamerError(f"{folder / index} names {name!r}, which is not in the folder; copy the folder again.")
    return [folder / name for name in names]


def tensor_names(path: Path) -> list[str]:
    """The names in a safetensors file, which also checks that the file is whole."""
    with _open_safetensors(path) as file:
        return list(file.keys())


def read_safetensors(path: Path, names: list[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a safetensors file, all or some."""
    with _open_safetensors(path) as file:
        return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise GossamerError(f"{path} is not a whole safetensors file ({error}); copy or download it again.") from error


def read_pickle(path: Path) -> Any:
    """What `torch.save` wrote, as long as it is tensors and plain data; anything that could run code is refused."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # it is read, or refused below
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError, IndexError) as error:
        if foreign := _called_by(path):
            raise GossamerError(
                f"{path} is a pickle that holds more than tensors ({foreign}), and loading it could run code; have its"
                " author save the state dict alone, best as safetensors."
            ) from error
        raise _corrupt(path) from error


def _called_by(path: Path) -> str | None:
    """The first thing outside torch that a pickle would import, read off its opcodes without running any."""
    texts: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(_pickle_bytes(path)):
            if isinstance(argument, str):
                texts.append(argument)
            if opcode.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
            elif opcode.name == "STACK_GLOBAL" and len(texts) > 1:
                module, name = texts[-2:]
            else:
                continue
            if module.split(".")[0] not in _HARMLESS_MODULES:
                return f"{module}.{name}"
    except (ValueError, OSError, KeyError, IndexError, zipfile.BadZipFile):
        return None  # damaged, which the caller says
    return None


def _pickle_bytes(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(next((name for name in archive.namelist() if name.endswith("data.pkl")), ""))


def _corrupt(path: Path) -> GossamerError:
    return GossamerError(f"{path} is not a file that torch.save wrote, or is damaged; copy it again.")


def read_state(path: Path) -> dict[str, Any]:
    """A state dict, or a checkpoint that contains one, from a safetensors file or a tensors-only pickle."""
    if path.suffix == ".safetensors":
        return dict(read_safetensors(path))
    loaded = read_pickle(path)
    if not isinstance(loaded, Mapping):
        raise GossamerError(f"{path} holds a {type(loaded).__name__}, not a state dict; save model.state_dict().")
    return dict(loaded)


def build_model(
    config: PretrainedConfig, source: Path | dict[str, Tensor], dtype: torch.dtype | str, *, ignore: str | None = None
) -> PreTrainedModel:
    """A causal LM of this config on the gossamer attention, from a folder or a state dict, with every weight in place.

    Weights whose name contains `ignore` are left to the caller; other weights that the model has no place for are
    refused, since leaving them out would make another model.
    """
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    settings: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": ATTENTION_NAME}
    settings["ignore_mismatched_sizes"] = True  # they come back in the report, and are refused below by name
    where = source if isinstance(source, Path) else "the state dict"
    if isinstance(source, Path):
        settings |= {"local_files_only": True}
    else:
        settings |= {"state_dict": source}
    try:
        with quiet_transformers():
            model, report = model_class.from_pretrained(
                str(source) if isinstance(source, Path) else None, output_loading_info=True, **settings
            )
    except (OSError, ValueError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
        raise GossamerError(
            f"{where} could not be loaded as a {model_class.__name__} ({first_line(error)}); check that config and"
            " weights belong together."
        ) from error
    _require_complete(report, where, model, ignore)
    return model


def _require_complete(report: Mapping[str, Any], where: object, model: PreTrainedModel, ignore: str | None) -> None:
    for problem, sentence in (
        ("missing_keys", "lacks the weight"),
        ("mismatched_keys", "has another shape than its config says for the weight"),
        ("unexpected_keys", "has a weight that the model has no place for:"),
    ):
        entries = report.get(problem) or ()
        reported = (str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries)
        names = sorted(name for name in reported if not _is_harmless(name, ignore))
        if names:
            hint = nearest(names[0], model.state_dict()) if problem == "unexpected_keys" else ""
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise GossamerError(f"{where} {sentence} {names[0]!r}{more}; its parts must belong together.{hint}")


def _is_harmless(name: str, ignore: str | None) -> bool:
    """Whether a name is the caller's business, or a mask or frequency table that older versions wrote too."""
    return bool(ignore and ignore in name) or name.endswith((".attn.bias", ".masked_bias", ".rotary_emb.inv_freq"))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no load reports: what they would say is checked and raised instead."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def first_line(error: Exception) -> str:
    """The beginning of an error's message, for the parenthesis of a sentence."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
