"""Which environment a row gets, and how many of a kind there may be at a time."""

import difflib
from collections.abc import Mapping
from typing import Any

from .env import EnvFactory
from .errors import SetupError
from .trajectory import Message


class EnvKinds:
    """One environment for all rows, or several, of which a row's task names one as `"environment"`.

    Args:
        env_factory: makes an environment, or several by name.

    Raises:
        SetupError: it is neither.
    """

    def __init__(self, env_factory: EnvFactory | Mapping[str, EnvFactory]) -> None:
        self._are_named = isinstance(env_factory, Mapping)
        self._factories: dict[str, EnvFactory] = (
            dict(env_factory) if isinstance(env_factory, Mapping) else {"": env_factory}
        )
        if not self._factories:
            raise SetupError("env_factory names no environment.")
        for name, factory in self._factories.items():
            which = f"env_factory[{name!r}]" if self._are_named else "env_factory"
            if not callable(factory):
                raise SetupError(f"{which} must be callable without arguments, such as a class, not {factory!r}.")
            _check_capacity(which, getattr(factory, "max_concurrency", None))

    def of(self, prompt: str | list[Message]) -> EnvFactory:
        """The factory of a row's environment.

        Raises:
            SetupError: the row names none, or one that there is not.
        """
        if not self._are_named:
            return self._factories[""]
        last = prompt[-1] if prompt and not isinstance(prompt, str) else None
        task = last.get("task") if isinstance(last, dict) else None
        name = task.get("environment") if isinstance(task, dict) else None
        if isinstance(name, str) and name in self._factories:
            return self._factories[name]
        known = ", ".join(self._factories)
        if name is None:
            raise SetupError(
                f"A row names no environment of {known}. Put the names into a column and hand it over: "
                'with_task(dataset, ["environment"]), for prompts that are lists of messages.'
            )
        nearest = difflib.get_close_matches(str(name), self._factories, n=1)
        guess = f" Did you mean {nearest[0]}?" if nearest else ""
        raise SetupError(f"A row's environment is {name!r}, which is none of {known}.{guess}")


def capacity_of(env_factory: EnvFactory) -> int | None:
    """Environments of this kind that there may be at a time in a rollout; None: as many as trajectories."""
    capacity: int | None = getattr(env_factory, "max_concurrency", None)
    return capacity


def _check_capacity(which: str, capacity: Any) -> None:
    if capacity is not None and (type(capacity) is not int or capacity < 1):
        raise SetupError(f"{which}.max_concurrency must be a number of environments, or None, not {capacity!r}.")
