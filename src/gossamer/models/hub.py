"""Models of the Hugging Face hub: the local cache first, then one short question to the hub, never a long wait."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from gossamer.errors import GossamerError
from gossamer.models.weights import weight_files

_SIDE_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
_TIMEOUT_SECONDS = 5.0


def is_hub_id(name: str) -> bool:
    """Whether `name` could be a model of the hub: `name` or `owner/name`."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not name.startswith((".", "~"))


def hub_folder(name: str, hint: str = "") -> Path:
    """A local folder with the hub's model `name`, downloaded if it is not in the cache; `hint` ends an error."""
    cached = _cached(name)
    if cached is not None:
        return cached
    if constants.HF_HUB_OFFLINE:
        raise GossamerError(
            f"{name!r} is no known model, folder or file and is not in the Hugging Face cache, and"
            f" HF_HUB_OFFLINE is set.{hint}"
        )
    return _download(name, hint)


def _cached(name: str) -> Path | None:
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
        weight_files(folder)
    except (LocalEntryNotFoundError, GossamerError):
        return None
    return folder


def _download(name: str, hint: str) -> Path:
    try:
        info = HfApi().model_info(name, timeout=_TIMEOUT_SECONDS)
        files = [sibling.rfilename for sibling in info.siblings or []]
        weights = ["*.safetensors"] if any(file.endswith(".safetensors") for file in files) else ["*.bin"]
        folder = snapshot_download(
            name, revision=info.sha, allow_patterns=_SIDE_FILES + weights, ignore_patterns=["*/*"]
        )
    except GatedRepoError as error:
        raise GossamerError(f"{name!r} asks for an agreement on the hub; accept it there and log in.") from error
    except RepositoryNotFoundError as error:
        raise GossamerError(f"{name!r} is no known model, folder or file, nor on the hub.{hint}") from error
    except Exception as error:  # the network layer's own exceptions, which change between versions
        raise GossamerError(
            f"{name!r} is no known model, folder or file and is not in the Hugging Face cache, and the hub could"
            f" not be reached ({type(error).__name__}).{hint}"
        ) from error
    return Path(folder)
