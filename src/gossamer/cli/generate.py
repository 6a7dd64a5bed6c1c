"""`gossamer generate`: one prompt, continued by one or several models next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer
from rich.columns import Columns
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from gossamer.cli.console import out, say_json
from gossamer.cli.loading import AUTO, DEVICE_HELP, load_all

if TYPE_CHECKING:
    from gossamer.models import LoadedModel

EXAMPLE = 'gossamer generate bundled/dense bundled/sparse --prompt "When Anna and Tom went to the"'


def command(
    models: Annotated[list[str], typer.Argument(help="Models to let write, one or several.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to write, at most.")] = 60,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="For temperatures above 0; every model draws with the same one.")] = 0,
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = AUTO,
    json: Annotated[bool, typer.Option("--json", help="Print JSON when done, instead of streaming.")] = False,
) -> None:
    """Continue a prompt, with the models' texts growing next to each other."""
    loaded = load_all(models, device=device)
    streams = [stream(model, prompt, tokens=tokens, temperature=temperature, seed=seed) for model in loaded]
    if json:
        texts = {model.name: "".join(pieces) for model, pieces in zip(loaded, streams, strict=True)}
        say_json({"prompt": prompt, "continuations": texts})
    elif out.is_terminal:
        _side_by_side(prompt, [model.name for model in loaded], streams)
    else:
        for model, pieces in zip(loaded, streams, strict=True):
            _into_a_pipe(f"{model.name}:\n{prompt}", pieces)


def stream(model: LoadedModel, prompt: str, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> Iterator[str]:
    """The model's continuation, piece by piece."""
    return model.generate(prompt, max_tokens=tokens, temperature=temperature, seed=seed)


def _into_a_pipe(beginning: str, pieces: Iterator[str]) -> None:
    """Each piece as soon as it is made, as it is: nothing wraps or colours it."""
    for piece in chain([beginning], pieces, ["\n\n"]):
        out.file.write(piece)
        out.file.flush()


def _side_by_side(prompt: str, names: Sequence[str], streams: Sequence[Iterator[str]]) -> None:
    """Take one piece of each stream in turn until all have ended."""
    texts = ["" for _ in streams]
    running = set(range(len(streams)))
    with Live(console=out, refresh_per_second=20) as live:
        while running:
            for index in sorted(running):
                piece = next(streams[index], None)
                if piece is None:
                    running.discard(index)
                else:
                    texts[index] += piece
            live.update(_panels(prompt, names, texts))


def _panels(prompt: str, names: Sequence[str], texts: Sequence[str]) -> Columns:
    width = max(24, out.width // len(names) - 1)
    panels = [
        Panel(Text.assemble((prompt, "dim"), text), title=escape(name), title_align="left", width=width)
        for name, text in zip(names, texts, strict=True)
    ]
    return Columns(panels, padding=(0, 1))
