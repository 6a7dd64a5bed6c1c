"""Which two models can be compared, and in which order."""

from __future__ import annotations

from gossamer.errors import GossamerError
from gossamer.models import LoadedModel
from gossamer.models.loaded import require_same_tokenizer


def require_pair(dense: LoadedModel, sparse: LoadedModel) -> None:
    """Refuse models that do not share their tokens, and a gated model in the place of the dense one."""
    require_same_tokenizer(dense, sparse)
    if dense.is_sparse:
        raise GossamerError(f"{dense.name} is gated; give the dense model first and the sparse one second.")
