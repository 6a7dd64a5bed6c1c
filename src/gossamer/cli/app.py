"""The `gossamer` command: its sub-commands, and what happens when one of them fails.

A user's mistake is one sentence on standard error and exit code 2; a traceback is shown only with `--debug`.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer
from rich.markup import escape

from gossamer import __version__
from gossamer.cli.console import INTERRUPTED, err, say
from gossamer.errors import GossamerError

BUG, USER_MISTAKE = 1, 2

# In the order of `gossamer --help`; each is a module of this room with a function `command` and an `EXAMPLE`.
COMMANDS = (
    "demo",
    "models",
    "tasks",
    "sparsify",
    "evaluate",
    "patterns",
    "circuits",
    "compare",
    "figure",
    "transcoders",
    "attribute",
    "generate",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"gossamer {__version__}")
        raise typer.Exit


def _gossamer(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
) -> None:
    """Which attention edges does a language model need, and what do they do?"""


def build() -> typer.Typer:
    """The application with all its commands; their modules are light, they import torch when they run."""
    application = typer.Typer(
        no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
    )
    application.callback(epilog="Begin with: gossamer demo")(_gossamer)
    for name in COMMANDS:
        module = import_module(f"gossamer.cli.{name}")
        application.command(name, epilog=f"Example: {escape(module.EXAMPLE)}")(module.command)
    return application


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every failure has been explained on standard error."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    debug, rest = _take_debug(arguments)
    try:
        build()(args=rest, prog_name="gossamer")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 0
    except KeyboardInterrupt:
        err.print("Stopped.")
        return INTERRUPTED
    except Exception as error:  # the one place where any failure ends: explained, never swallowed
        if debug:
            traceback.print_exc()
        sentence, code = explain(error)
        err.print(f"[bold red]error:[/] {escape(sentence)}", soft_wrap=True)
        return code
    return 0


def explain(error: Exception) -> tuple[str, int]:
    """What to tell the user about a failure, and the exit code it deserves."""
    if isinstance(error, GossamerError):
        return str(error), USER_MISTAKE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where = f" while writing {error.filename}" if error.filename else ""
        return f"The disk is full{where}; nothing half-written was left: free some space and go on.", USER_MISTAKE
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}.", USER_MISTAKE
    sentence = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
    return f"{sentence}. This looks like a fault in gossamer; run it again with --debug to see where.", BUG


def _take_debug(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """`--debug` may stand anywhere before a `--`."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    before = list(arguments[:end])
    return "--debug" in before, [word for word in before if word != "--debug"] + list(arguments[end:])
