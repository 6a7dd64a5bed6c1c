"""Models: one door to load them, a table of their parts, and a way to save them that keeps the gates."""

from gossamer.models.anatomy import FAMILIES, Anatomy, Family, anatomy, family_of
from gossamer.models.checkpoint import load_folder, save_model
from gossamer.models.doctor import check_seam
from gossamer.models.foreign import ENGLISH, ForeignOptions, ImportProof, load_foreign, prove_import
from gossamer.models.gguf import load_gguf
from gossamer.models.load import NAMES, catalogue, load
from gossamer.models.loaded import LoadedModel, gate, require_same_tokenizer, same_tokenizer, ungate
from gossamer.models.micro import micro

__all__ = [
    "ENGLISH",
    "FAMILIES",
    "NAMES",
    "Anatomy",
    "Family",
    "ForeignOptions",
    "ImportProof",
    "LoadedModel",
    "anatomy",
    "catalogue",
    "check_seam",
    "family_of",
    "gate",
    "load",
    "load_folder",
    "load_foreign",
    "load_gguf",
    "micro",
    "prove_import",
    "require_same_tokenizer",
    "same_tokenizer",
    "save_model",
    "ungate",
]
