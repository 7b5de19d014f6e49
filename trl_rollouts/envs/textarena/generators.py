"""A random generator of its own for each game, though TextArena's games draw from the process's `random`.

In their modules the name `random` is exchanged, once, for a module that asks which game is being played.
"""

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

_GENERATOR: ContextVar[random.Random | None] = ContextVar("generator", default=None)


class _OwnGenerator(ModuleType):
    """Python's `random`, as a game sees it: while an episode runs, its functions are those of its own generator.

    A lock around every call and a swap of the process's state would not do: another thread could draw meanwhile, and a
    game that waits for a server would hold up all others.
    """

    def __getattr__(self, name: str) -> Any:
        ours = getattr(random, name)
        if not hasattr(random.Random, name):
            return ours

        def drawn(*args: Any, **kwargs: Any) -> Any:  # a game may keep the function, so it asks for the generator late
            generator = _GENERATOR.get()
            return (ours if generator is None else getattr(generator, name))(*args, **kwargs)

        return drawn


_RANDOM = _OwnGenerator("random")


@contextmanager
def drawing_from(generator: random.Random) -> Iterator[None]:
    token = _GENERATOR.set(generator)
    try:
        yield
    finally:
        _GENERATOR.reset(token)


def give_own_generators(entry_point: Any) -> None:
    """In TextArena's modules, and in those that a game registered by the user comes with, `random` means `_RANDOM`."""
    name = entry_point.partition(":")[0] if isinstance(entry_point, str) else entry_point.__module__
    importlib.import_module(name)
    packages = {"textarena", name.partition(".")[0]}
    for module in [module for name, module in list(sys.modules.items()) if name.partition(".")[0] in packages]:
        if getattr(module, "random", None) is random:
            vars(module)["random"] = _RANDOM
