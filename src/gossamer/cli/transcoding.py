"""Finding the transcoders of a pair of models: the bundled ones by themselves, others by the folders given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.attribution.pair import TranscoderPair
    from gossamer.models import LoadedModel
    from gossamer.transcoders import TranscoderSet


def find_transcoders(dense: LoadedModel, sparse: LoadedModel, names: Sequence[str]) -> TranscoderPair:
    """The transcoders named, each for the model it was made for, or the bundled ones of bundled models."""
    from gossamer.attribution.pair import TranscoderPair

    if not names:
        return TranscoderPair.bundled(dense, sparse)
    models, found = {"dense": dense, "sparse": sparse}, {}
    for name in names:
        role, transcoders = _fitting({role: model for role, model in models.items() if role not in found}, name)
        found[role] = transcoders.to(models[role].device, models[role].dtype)
    return TranscoderPair(**found)


def _fitting(models: dict[str, LoadedModel], name: str) -> tuple[str, TranscoderSet]:
    """The first model that these transcoders were made for, or why none was."""
    from gossamer.transcoders import load

    if not models:
        raise GossamerError(f"Both models have transcoders already; leave out {name}.")
    transcoders, why = load(name), None
    for role, model in models.items():
        try:
            transcoders.require_model(model)
        except GossamerError as unfit:
            why = unfit
        else:
            return role, transcoders
    assert why is not None
    raise why
