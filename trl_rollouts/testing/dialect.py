"""What a server says, apart from sockets and time: a dialect turns a request's body into an `Answer`, or refuses."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Answer:
    """A status-200 answer. A body of None is an empty one, a text is sent as it is."""

    body: Any
    delay_s: float = 0.0


class Refusal(Exception):
    """An HTTP error with a JSON body."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Bricked(Exception):
    """The request killed the server's worker: neither this request nor any later one gets an answer."""


Route = Callable[[Any, Mapping[str, str]], Answer]
"""From a request's decoded body and its query to the answer."""


class Dialect(Protocol):
    routes: dict[tuple[str, str], Route]
    """By method and path."""
    generate_path: str
    is_serial: bool
    """One request at a time, health checks included."""
    num_starts: int
    """Of the server's process: what tells one from the next."""
    num_running: int
    """Generate requests that are worked on."""

    def prompts(self, body: Any) -> list[list[int]]:
        """The prompts of a generate request that are token ids."""

    def not_json(self) -> Refusal: ...


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)
