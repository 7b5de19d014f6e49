"""Where model-written code runs: an `Executor` opens sessions, and a session keeps its state from snippet to snippet.

    LocalExecutor     processes on this machine, confined by its kernel (`local`)
    RayExecutor       the same on every node of a Ray cluster (`ray`)
    HttpExecutor      any executor that another machine serves (`http`)

What comes back from a session is the session's word. A reward that matters is computed outside of it.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol


class ExecStatus(StrEnum):
    """How a snippet ended."""

    OK = "ok"
    ERROR = "error"
    """It raised, or is no Python."""
    EXIT = "exit"
    """It called `sys.exit`. The session goes on."""
    TIMEOUT = "timeout"
    """It was interrupted at its time limit. The session goes on, with what it had by then."""
    KILLED = "killed"
    """The session was ended: an interrupt did not stop the snippet, or its files became too many."""
    DIED = "died"
    """The session's process ended by itself: a crash in native code, `os._exit`, no memory."""
    PROTOCOL = "protocol"
    """The session sent what no session sends, and was ended."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What a snippet did. Texts are valid Unicode and of bounded length, long ones without their middle."""

    status: ExecStatus
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    """`repr` of the last expression; None if the last statement is none, or its value is None."""
    error: str | None = None
    """The traceback, from the snippet's first line on, or a sentence."""
    duration_s: float = 0.0
    """Of the snippet, by the wall clock; functions of the host's do not count."""


HostCall = Callable[[str, list[Any], dict[str, Any]], Awaitable[Any]]
"""Answers a call of one of the host's functions: name, positional and keyword arguments, as JSON has them. What it
returns becomes JSON; what it raises is raised in the snippet, as a RuntimeError with its text. It runs in the event
loop in which the snippet was asked for."""


class Session(Protocol):
    """Runs snippets, one at a time; variables and files stay from one to the next."""

    @property
    def is_alive(self) -> bool:
        """Whether a further snippet would find the state of the earlier ones."""

    async def run(self, code: str, timeout_s: float) -> ExecResult:
        """Run a snippet. On a session that is not alive: `DIED`. Cancelled, it ends the session.

        Raises:
            SessionError: the session was lost with the machine it ran on.
        """

    async def close(self) -> None:
        """End the session, and remove its files."""


class Executor(Protocol):
    """Opens sessions, for any number of event loops and callers at a time."""

    async def open(self, functions: Sequence[str] = (), call: HostCall | None = None) -> Session:
        """A new session.

        Args:
            functions: names that its snippets may call as functions.
            call: answers such a call.

        Raises:
            SandboxError: sessions cannot be confined here as they must be.
            SessionError: this one could not be opened.
        """

    async def close(self) -> None:
        """End all sessions, and what serves them."""
