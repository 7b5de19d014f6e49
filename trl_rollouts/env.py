"""What an environment is, for the one loop that drives all of them.

An environment speaks messages and never sees a token id. One instance lives for one trajectory: `reset` once, `step`
after every completion, `close` once, whatever happened. Methods may be plain functions or coroutines; plain ones run
in a thread, so a slow one delays its own trajectory only.
"""

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import EnvError
from .trajectory import Message


@dataclass(slots=True)
class StepResult:
    """What follows an action.

    Raises:
        ValueError: `messages` are not messages, or one claims to be the model's.
    """

    messages: list[Message] = field(default_factory=list)
    """The observation, shown to the model before its next turn. Never role "assistant"."""
    reward: float = 0.0
    terminated: bool = False
    """The episode is over, by its own rules (Gymnasium's word)."""
    truncated: bool = False
    """The episode is cut short by a limit outside its rules (Gymnasium's word)."""
    info: dict[str, Any] = field(default_factory=dict)
    """Anything worth keeping. `info["tool_calls"]`, a list, is collected into the reward functions' `tool_calls`."""

    def __post_init__(self) -> None:
        if not _are_messages(self.messages):
            raise ValueError(f"StepResult.messages must be messages (dicts with a role), not {self.messages!r:.200}.")
        if any(message["role"] == "assistant" for message in self.messages):
            raise ValueError('StepResult.messages has a message with role "assistant"; only the model speaks as that.')


class Env(Protocol):
    """One episode. Each method sync or async.

    An environment may also have an attribute `tools`, read after `reset`: JSON schemas of functions that the chat
    template shows to the model.
    """

    def reset(self, prompt: list[Message]) -> Any:
        """Begin. `prompt` is the dataset's, a copy; its last message may carry the row's data as `"task"`.

        Returns:
            list[Message]: the opening messages, which the model sees.
        """

    def step(self, action: Message) -> Any:
        """Take the model's turn, an assistant message with `content`, and `tool_calls` where it made any.

        Returns:
            StepResult: what follows.
        """

    def close(self) -> Any:
        """Release what the episode holds."""


EnvFactory = Callable[[], Env]


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a user's function, sync or async, without holding up the event loop.

    A sync function gets a daemon thread of its own rather than a place in a pool: Python cannot stop a thread, so one
    that hangs would take its place in the pool for good and keep the interpreter from exiting.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        with _exits_as_errors():
            return await function(*args, **kwargs)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # the caller's time limit has passed
            return
        future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            with _exits_as_errors():
                result = context.run(function, *args, **kwargs)
        except Exception as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=f"trl_rollouts:{getattr(function, '__name__', 'env')}", daemon=True).start()
    result = await future
    return await result if inspect.isawaitable(result) else result


@contextmanager
def _exits_as_errors() -> Iterator[None]:
    """`sys.exit()` in a user's function ends that function, not the event loop; a future refuses StopIteration."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt, StopIteration) as cause:
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause


def checked_step(result: Any) -> StepResult:
    """The step's result, or `EnvError` with what is wrong with it."""
    if not isinstance(result, StepResult):
        raise EnvError(f"env.step returned {type(result).__name__}; it must return a trl_rollouts.StepResult.")
    try:
        reward = float(result.reward)
    except (TypeError, ValueError) as cause:
        raise EnvError(f"env.step returned reward {result.reward!r}; it must be a number.") from cause
    if reward != reward or abs(reward) == float("inf"):
        raise EnvError(f"env.step returned reward {reward}; it must be finite.")
    result.reward = reward
    return result


def checked_opening(messages: Any) -> list[Message]:
    """What `env.reset` returned, or `EnvError` with what is wrong with it."""
    if not messages or not _are_messages(messages):
        raise EnvError(f"env.reset must return the opening messages (dicts with a role), not {messages!r:.200}.")
    return list(messages)


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(isinstance(item, dict) and "role" in item for item in messages)


def with_task(dataset: Any, columns: Sequence[str]) -> Any:
    """Put a row's columns where its environment finds them: `"task"` in the prompt's last message.

    TRL hands a rollout its prompts and nothing else of the row. Two rows with the same text and different answers each
    get their own this way. The chat template never sees `"task"`.

    Args:
        dataset: a `datasets.Dataset` whose `prompt` column holds lists of messages.
        columns: names of the columns to hand over; they also stay in the dataset, for reward functions.

    Raises:
        ValueError: a column is missing, or prompts are strings.
    """
    if missing := [name for name in ("prompt", *columns) if name not in dataset.column_names]:
        raise ValueError(f"with_task: the dataset has no column {missing}; it has {dataset.column_names}.")

    def place(row: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(row["prompt"], list) or not row["prompt"]:
            raise ValueError(f"with_task needs prompts that are lists of messages, not {row['prompt']!r:.100}.")
        task = {name: row[name] for name in columns}
        return {"prompt": [*row["prompt"][:-1], {**row["prompt"][-1], "task": task}]}

    return dataset.map(place)
