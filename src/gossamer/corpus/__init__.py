"""Token sequences: text files, datasets, the model's own samples, and the synthetic language."""

from gossamer.corpus.sequences import Sequences, pack
from gossamer.corpus.text import from_dataset, from_model, from_text, read_documents, tokenize

__all__ = ["Sequences", "from_dataset", "from_model", "from_text", "pack", "read_documents", "tokenize"]
