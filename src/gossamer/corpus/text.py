"""Token sequences from text: files and folders, datasets, and the model's own samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from gossamer.corpus.sequences import Sequences, pack
from gossamer.errors import GossamerError, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEXT_FILES = (".txt", ".md", ".jsonl", ".text")
SELF, LANGUAGE = MADE = ("self", "language")  # texts that are made rather than read
HUB_TIMEOUT_SECONDS = 5.0


def read_documents(path: str | Path) -> Iterator[str]:
    """The documents of a text file or, in the order of their names, of a folder's text files.

    A text file is one document; a `.jsonl` file has one a line, in the field `text`.
    """
    source = Path(path)
    if not source.exists():
        raise GossamerError(f"There is no text at {source}; give a file, a folder of text files, or 'self'.")
    files = [source]
    if source.is_dir():
        files = sorted(file for file in source.rglob("*") if file.suffix in TEXT_FILES and file.is_file())
        if not files:
            raise GossamerError(f"The folder {source} holds no text files ({', '.join(TEXT_FILES)}).")
    for file in files:
        yield from _documents_of_file(file)


def _documents_of_file(file: Path) -> Iterator[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise GossamerError(f"{file} is not readable UTF-8 text ({error}); convert it or leave it out.") from error
    if file.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.splitlines(), 1):
        try:
            yield json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise GossamerError(f"Line {number} of {file} is not a JSON object with a field 'text'.") from error


def tokenize(
    documents: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int | None = None
) -> Sequences:
    """Documents as packed sequences of `length` tokens; a text that does not fill one sequence is refused."""
    texts = (text for text in documents if text.strip())
    ids = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
    sequences = pack(ids, length, bos=tokenizer.bos_token_id, limit=limit)
    if len(sequences) == 0:
        raise GossamerError(
            f"The text is empty or shorter than one sequence of {length} tokens; give more text or a shorter length."
        )
    return sequences


def from_text(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, *, length: int, limit: int | None = None
) -> Sequences:
    """Packed sequences of a text file or a folder of text files."""
    return tokenize(read_documents(path), tokenizer, length=length, limit=limit)


def from_dataset(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    limit: int,
    split: str = "train",
    field: str = "text",
) -> Sequences:
    """Packed sequences of a dataset: a hub id (streamed, so only what is used is fetched) or a saved folder."""
    rows = _open_dataset(name, split)

    def texts() -> Iterator[str]:
        for row in rows:
            if field not in row:
                raise GossamerError(f"The dataset {name} has no field {field!r}, only {', '.join(row)}.")
            yield row[field]

    return tokenize(texts(), tokenizer, length=length, limit=limit)


def _open_dataset(name: str, split: str) -> Iterable[dict[str, str]]:
    try:
        import datasets
    except ImportError as error:
        raise GossamerError("Reading a dataset needs one more package: pip install 'gossamer[datasets]'.") from error
    if not Path(name).is_dir():
        _require_on_the_hub(name)
    try:
        if Path(name).is_dir():
            loaded = datasets.load_from_disk(name)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(name, split=split, streaming=True)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetNotFoundError) as error:
        reason = str(error).splitlines()[0]
        raise GossamerError(f"The dataset {name} (split {split}) could not be opened: {reason}") from error


def _require_on_the_hub(name: str) -> None:
    """One short question; the library itself would ask again and again for half a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=HUB_TIMEOUT_SECONDS)
    except Exception as error:  # the network layer's own exceptions, which change between versions
        raise GossamerError(
            f"{name!r} is no text file or folder here, and no dataset of that name was found on the hub "
            f"({type(error).__name__}); give a file, a folder, a dataset, 'language' or 'self'.{nearest(name, MADE)}"
        ) from error


@torch.no_grad()
def from_model(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    length: int,
    n: int,
    seed: int = 0,
    batch: int = 128,
) -> Sequences:
    """`n` sequences sampled from the model itself at temperature one, each behind a BOS token."""
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise GossamerError(
            "Text cannot be sampled from this model: its tokenizer has no BOS or EOS token to start from; give a text."
        )
    rows: list[np.ndarray] = []
    with _evaluating(hf), torch.random.fork_rng(devices=[]):
        for first in range(0, n, batch):
            torch.manual_seed(hash((seed, first)) % 2**31)
            ids_BT = torch.full((min(batch, n - first), 1), start, device=hf.device)
            sampled = hf.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=length - 1,
                min_new_tokens=length - 1,
                pad_token_id=start,
            )
            rows.append(sampled.cpu().numpy())
    return Sequences(np.concatenate(rows))


@contextmanager
def _evaluating(hf: PreTrainedModel) -> Iterator[None]:
    was_training = hf.training
    hf.eval()
    try:
        yield
    finally:
        hf.train(was_training)
