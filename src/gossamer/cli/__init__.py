"""The command line: one thin module a command. Importing it loads neither torch nor transformers."""

from gossamer.cli.app import main

__all__ = ["main"]
