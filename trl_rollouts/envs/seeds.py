"""The seed that an episode begins with: one for all members of a group, in every process."""

import logging
import threading
import zlib

from ..errors import SetupError
from ..messages import message_text
from ..trajectory import Message

logger = logging.getLogger(__name__)


def reset_seed(prompt: list[Message], name: str) -> int:
    """The row's "seed", handed over by `with_task(dataset, ["seed"])`, or one computed from the prompt's text.

    A group's trajectories have one prompt, wherever they run, so they begin alike either way.

    Args:
        prompt: what `Env.reset` is given.
        name: the environment's, for a warning, once, where rows have no seed.

    Raises:
        SetupError: the seed is no whole number, 0 or above.
    """
    task = prompt[-1].get("task")
    seed = task.get("seed") if isinstance(task, dict) else None
    if seed is None:
        _warn_no_seed(name)
        return zlib.crc32("\n".join(message_text(message) for message in prompt).encode())
    if type(seed) is not int or seed < 0:
        raise SetupError(f"A row's task has seed={seed!r:.100}; it must be an integer, 0 or above.")
    return seed


_WARNED: set[str] = set()
_LOCK = threading.Lock()


def _warn_no_seed(name: str) -> None:
    """Once an environment, though many trajectories begin at the same time."""
    with _LOCK:
        is_first = name not in _WARNED
        _WARNED.add(name)
    if is_first:
        logger.warning(
            "Rows for %s have no seed, so it is computed from the prompt's text: rows with the same text begin the "
            'same. For others, add a column "seed" and use with_task(dataset, ["seed"]).',
            name,
        )
