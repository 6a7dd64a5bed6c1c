"""Let a room be called like the function it is named after.

`gossamer.sparsify` is a room (a sub-package) and, for the user, a verb: `gs.sparsify(model, ...)`. Python binds the
sub-package's name on its parent as soon as anything in it is imported, so a function of that name cannot live there;
a module whose class has `__call__` can be both.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    _verb: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[self._verb](*args, **kwargs)


def make_callable(module_name: str, verb: str) -> None:
    """Calling the module named `module_name` calls its function `verb`."""
    module = sys.modules[module_name]
    assert callable(module.__dict__[verb]), f"{module_name} has no function {verb}"
    module.__class__ = _CallableModule
    module._verb = verb  # type: ignore[attr-defined]
    module.__doc__, module.__wrapped__ = module.__dict__[verb].__doc__, module.__dict__[verb]  # type: ignore[attr-defined]
