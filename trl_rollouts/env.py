"""What an environment is, for the one loop that drives all of them.

An environment speaks messages and never sees a token id. One instance lives for one trajectory: `reset` once, `step`
after every completion, `close` once, whatever happened. Methods may be plain functions or coroutines; plain ones run
in a thread, so a slow one delays its own trajectory only.
"""

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import EnvError
from .trajectory import Message


@dataclass(slots=True)
class StepResult:
    """What follows an action.

    Attributes:
        messages: the observation, shown to the model before its next turn. Never role "assistant".
        reward: of this step.
        terminated: the episode is over, by its own rules (Gymnasium's word).
        truncated: the episode is cut short by a limit outside its rules (Gymnasium's word).
        info: anything worth keeping. `info["tool_calls"]`, a list of dicts, is collected into the reward functions'
            `tool_calls`; `info["refused_action"]` says why the model's turn was no action, and is counted.
        inline: in place of messages: text put right behind what the model wrote, within its own turn; with "" it just
            writes on. Where the model has ended that turn, the episode is over.

    Raises:
        ValueError: `messages` are not messages, or one claims to be the model's.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    inline: str | None = None

    def __post_init__(self) -> None:
        self.check_messages()

    def check_messages(self) -> None:
        if self.inline is not None and (not isinstance(self.inline, str) or self.messages):
            raise ValueError(f"StepResult.inline is a text, without messages beside it, not {self.inline!r:.200}.")
        if not _are_messages(self.messages):
            raise ValueError(
                "StepResult.messages must be messages (dicts with a role, and a text as content), not "
                f"{self.messages!r:.200}."
            )
        if any(message["role"] == "assistant" for message in self.messages):
            raise ValueError('StepResult.messages has a message with role "assistant"; only the model speaks as that.')


class Env(Protocol):
    """One episode. Each method sync or async.

    An environment may also have attributes, read after `reset`: `tools`, JSON schemas of functions that the chat
    template shows to the model; and `answer_role`, the role of its observations, for which the template is then
    proved before anything is sampled ("tool" where it has tools; None: not at all).

    And it may have one more method: `final_reward`, called once when the trajectory has ended in any way but by
    failing, a limit included, before `close`. The number it returns is added to the last step's reward. Where a call
    still hangs then, it cannot be read, and the trajectory fails.
    """

    def reset(self, prompt: list[Message]) -> Any:
        """Begin. `prompt` is the dataset's, a copy; its last message may carry the row's data as `"task"`.

        A prompt that is a string comes as one message with `"is_rendered": True`, and must be returned unchanged.

        Returns:
            list[Message]: the opening messages, which the model sees.
        """

    def step(self, action: Message) -> Any:
        """Take the model's turn, an assistant message with `content`, and `tool_calls` where it made any.

        Returns:
            StepResult: what follows.
        """

    def close(self) -> Any:
        """Release what the episode holds. Where a sync `step` hangs, it is called when that returns."""


EnvFactory = Callable[[], Env]
"""Makes the environment of one trajectory. With an attribute `max_concurrency`, an int, no more than that many
trajectories of a rollout have one at a time, in this process, however many wait."""


def checked_step(result: Any) -> StepResult:
    """The step's result, or `EnvError` with what is wrong with it."""
    if not isinstance(result, StepResult):
        raise EnvError(
            f"env.step returned {type(result).__name__}, {result!r:.200}; it must return a trl_rollouts.StepResult."
        )
    result.check_messages()
    reward = checked_reward(result.reward, "env.step")
    for name in ("terminated", "truncated"):
        if (flag := getattr(result, name)) not in (False, True):  # NumPy's as well
            raise EnvError(f"env.step returned {name}={flag!r:.100}; it must be True or False.")
    calls = result.info.get("tool_calls", []) if isinstance(result.info, dict) else None
    if not isinstance(calls, list) or not all(isinstance(item, dict) for item in calls):
        raise EnvError(f'env.step returned info={result.info!r:.200}; it must be a dict, and its "tool_calls" dicts.')
    result.reward = reward
    return result


def checked_reward(reward: Any, who: str) -> float:
    """A reward as a float, or `EnvError` with what is wrong with it."""
    kind = f"{type(reward).__module__}.{type(reward).__qualname__}".removeprefix("builtins.")
    if not isinstance(reward, numbers.Real):
        raise EnvError(f"{who} returned the reward {reward!r:.100} of type {kind}; it must be a number: float(...).")
    if not math.isfinite(reward):
        raise EnvError(f"{who} returned reward {reward}; it must be finite.")
    return float(reward)


def checked_action(message: Any) -> Message:
    """What a parser returned, or `EnvError` with what is wrong with it."""
    is_message = isinstance(message, dict) and message.get("role") == "assistant"
    calls = (message.get("tool_calls") or []) if is_message else []
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    if (
        not is_message
        or not isinstance(message.get("content"), str)
        or not all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions)
    ):
        raise EnvError(
            f"The parser returned {message!r:.300}; it must return a message such as "
            '{"role": "assistant", "content": "...", "tool_calls": [{"type": "function", "function": {"name": "f", '
            '"arguments": {}}}]}, tool_calls left out where there is none.'
        )
    return dict(message)


def checked_opening(messages: Any) -> list[Message]:
    """What `env.reset` returned, or `EnvError` with what is wrong with it."""
    if not messages or not _are_messages(messages):
        raise EnvError(
            "env.reset must return the opening messages (dicts with a role, and a text as content), not "
            f"{messages!r:.200}."
        )
    return list(messages)


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(item, dict) and "role" in item and isinstance(item.get("content"), str | list | None)
        for item in messages
    )


def with_task(dataset: Any, columns: Sequence[str]) -> Any:
    """Put a row's columns where its environment finds them: `"task"` in the prompt's last message.

    TRL hands a rollout its prompts and nothing else of the row. Two rows with the same text and different answers each
    get their own this way. The chat template never sees `"task"`.

    Args:
        dataset: a `datasets.Dataset` whose `prompt` column holds lists of messages.
        columns: names of the columns to hand over, beside what a task holds already; they also stay in the dataset,
            for reward functions.

    Raises:
        ValueError: a column is missing, or prompts are strings.
    """
    if isinstance(columns, str):
        raise ValueError(f"with_task: columns is a list of names, such as [{columns!r}], not a text.")
    if not hasattr(dataset, "column_names"):
        raise ValueError(f"with_task takes a datasets.Dataset, not {type(dataset).__name__}: Dataset.from_list(rows).")
    if missing := [name for name in ("prompt", *columns) if name not in dataset.column_names]:
        raise ValueError(f"with_task: the dataset has no column {missing}; it has {dataset.column_names}.")

    def place(row: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(row["prompt"], list) or not row["prompt"]:
            raise ValueError(f"with_task needs prompts that are lists of messages, not {row['prompt']!r:.100}.")
        *others, last = row["prompt"]
        task = {**(last.get("task") or {}), **{name: row[name] for name in columns}}
        return {"prompt": [*others, {**last, "task": task}]}

    return dataset.map(place)
