"""Tasks: clean and corrupt prompts from one source of templates and words, shared with the synthetic language."""

from gossamer.tasks.accuracy import accuracy, correct
from gossamer.tasks.forms import Pair
from gossamer.tasks.from_file import task_from_file
from gossamer.tasks.library import NAMES, copying, docstring, get, greater_than, ioi, opposites, require_known
from gossamer.tasks.split import Split
from gossamer.tasks.task import Task, TokenBatch

__all__ = [
    "NAMES",
    "Pair",
    "Split",
    "Task",
    "TokenBatch",
    "accuracy",
    "copying",
    "correct",
    "docstring",
    "get",
    "greater_than",
    "ioi",
    "opposites",
    "require_known",
    "task_from_file",
]
