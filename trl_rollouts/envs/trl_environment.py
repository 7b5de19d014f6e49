"""A class as TRL's `environment_factory` takes it, unmodified: its public methods are what the model calls.

As in TRL, `reset` gets the row and may return text that is appended to the prompt's last message; the reward is
`get_reward()`, or else the attribute `reward`, read once at the end; and an instance is made once and reset often, as
many of them serve as there are trajectories at a time. Rewards reach reward functions by `env_reward`.

TRL's dict of several factories is `env_rollout({"a": trl_environment(A), "b": trl_environment(B)})`, with its rows
routed by the same column. Not here: functions beside the methods, images, and the argument `environments` of reward
functions.
"""

import asyncio
import copy
import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from types import MethodType
from typing import Any

from ..env import EnvFactory, StepResult
from ..errors import EnvError, SetupError, boundary
from ..options import check_positive
from ..tools import Tool, ToolEnv
from ..trajectory import Message
from ..worker import Worker

logger = logging.getLogger(__name__)


def trl_environment(environment_factory: Callable[[], Any], *, tool_timeout_s: float = 60.0) -> EnvFactory:
    """What `env_rollout` takes, of what `GRPOTrainer(environment_factory=...)` takes.

    Args:
        environment_factory: the class, or a function that makes an instance; such a function is called once at once,
            to see what it makes.
        tool_timeout_s: time limit of one call, in seconds, the wait for the calls before it included. The model is
            told of one that overruns; the reward has the same limit, and without it the trajectory fails.

    `reset` gets the `prompt` and the columns of `with_task(dataset, [...])`.

    Raises:
        SetupError: it cannot be called, or makes what has no `reset`, no public method, or one without type hints or
            a docstring.

    Example:
        >>> env_rollout(trl_environment(WordleEnv), max_turns=8)  # doctest: +SKIP
    """
    check_positive("tool_timeout_s", tool_timeout_s)
    if not callable(environment_factory):
        raise SetupError(
            "trl_environment takes a class, or a function without arguments that makes an environment, not "
            f"{environment_factory!r:.200}."
        )
    pool = _Pool(environment_factory, _tools_of(_kind(environment_factory)))
    factory = functools.partial(TRLEnv, pool, timeout_s=tool_timeout_s)
    factory.max_concurrency = getattr(environment_factory, "max_concurrency", None)  # type: ignore[attr-defined]
    return factory


class TRLEnv:
    """One episode of an instance, which it borrows. It ends when the model answers without a call.

    Sync methods run one after the other, in the instance's own thread: TRL calls them so, and they need not be
    thread-safe. The async ones of a turn run at the same time. What is wrong with a call is told to the model, as
    with `ToolEnv`.
    """

    def __init__(self, pool: "_Pool", *, timeout_s: float) -> None:
        self.tools = [tool.schema for tool in pool.tools.values()]
        self._pool = pool
        self._timeout_s = timeout_s
        self._instance: _Instance | None = None
        self._is_sound = False

    async def reset(self, prompt: list[Message]) -> list[Message]:
        self._instance = await self._pool.take()
        last = prompt[-1]
        is_rendered = last.get("is_rendered", False)
        plain = last["content"] if is_rendered else [*prompt[:-1], {k: v for k, v in last.items() if k != "task"}]
        task = last.get("task")
        observation = await self._instance.reset({"prompt": plain} | (task if isinstance(task, dict) else {}))
        self._is_sound = True
        if observation is None:
            return prompt
        if is_rendered:
            raise SetupError(
                f"{self._instance.name}.reset returned an observation, and the prompt is a string. Use prompts that "
                "are lists of messages."
            )
        return _with_observation(prompt, observation)

    async def step(self, action: Message) -> StepResult:
        assert self._instance is not None, "the loop resets first"
        was_sound, self._is_sound = self._is_sound, False
        result = await ToolEnv(self._instance.tools, timeout_s=self._timeout_s).step(action)
        self._is_sound = was_sound and all(report["error"] != "timeout" for report in result.info["tool_calls"])
        return result

    async def final_reward(self) -> float:
        assert self._instance is not None, "the loop resets first"
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._instance.reward()
        except TimeoutError as cause:
            raise EnvError(
                f"the reward of {self._instance.name} could not be read within tool_timeout_s={self._timeout_s:g}, "
                "the wait for calls that have not returned included."
            ) from cause

    async def close(self) -> None:
        instance, self._instance = self._instance, None  # a second close must not give it back twice
        if instance is not None:
            self._pool.give_back(instance, is_sound=self._is_sound)


class _Instance:
    """A user's object, with a thread of its own for all that is sync about it."""

    def __init__(self, environment: Any, worker: Worker, tools: dict[str, Tool]) -> None:
        self.name = type(environment).__name__
        self.worker = worker
        self.tools = [_bound(tool, getattr(environment, name), worker) for name, tool in tools.items()]
        self._environment = environment
        self._reads_method = callable(getattr(type(environment), "get_reward", None))
        self._is_reward_called = "reward" in tools

    async def reset(self, row: dict[str, Any]) -> Any:
        function = self._environment.reset
        try:
            inspect.signature(function).bind(**row)
        except TypeError as cause:
            raise SetupError(
                f"{self.name}.reset{inspect.signature(function)} cannot be called with the row's {', '.join(row)}: "
                f"{cause}. with_task(dataset, [...]) hands a row's columns over; what reset has no use for, it takes "
                "as **kwargs."
            ) from cause
        with boundary(EnvError, f"{self.name}.reset failed"):
            return await self.worker.call(function, **row)

    async def reward(self) -> float:
        if not self._has_reward:
            _warn_no_reward(self.name)
            return 0.0
        environment = self._environment
        with boundary(EnvError, f"the reward of {self.name} cannot be read"):
            read = environment.get_reward if self._reads_method else lambda: environment.reward
            reward = await self.worker.call(read)
            if reward is None:
                raise EnvError(f"{self.name} gave no reward (None), so the row cannot be compared with its group's.")
            return float(reward)

    @property
    def _has_reward(self) -> bool:
        missing = object()
        has_attribute = inspect.getattr_static(self._environment, "reward", missing) is not missing
        return self._reads_method or (has_attribute and not self._is_reward_called)


class _Pool:
    """Instances between episodes. TRL's contract: they may hold a connection for good, and `reset` clears the rest."""

    def __init__(self, environment_factory: Callable[[], Any], tools: dict[str, Tool]) -> None:
        self.tools = tools
        self._factory = environment_factory
        self._free: list[_Instance] = []

    async def take(self) -> _Instance:
        with suppress(IndexError):
            return self._free.pop()
        worker = Worker()
        try:
            with boundary(EnvError, "environment_factory failed"):
                return _Instance(await worker.call(self._factory), worker, self.tools)
        except BaseException:
            worker.end()
            raise

    def give_back(self, instance: _Instance, *, is_sound: bool) -> None:
        """One that is not sound, because a call of it may still go on or its reset failed, is not used again."""
        if is_sound and not instance.worker.num_unfinished:
            self._free.append(instance)
        else:
            instance.worker.end()

    def __del__(self) -> None:
        for instance in self._free:
            instance.worker.end()


def _kind(environment_factory: Callable[[], Any]) -> type:
    if isinstance(environment_factory, type):
        return environment_factory
    with boundary(SetupError, "environment_factory failed"):
        return type(environment_factory())


def _tools_of(kind: type) -> dict[str, Tool]:
    """By name, in TRL's order."""
    if not callable(getattr(kind, "reset", None)):
        raise SetupError(f"{kind.__name__} has no method reset, which begins an episode with the row's columns.")
    members = inspect.getmembers(kind, inspect.isfunction)
    names = [name for name, _ in members if name not in ("reset", "get_reward") and not name.startswith("_")]
    if not names:
        raise SetupError(f"{kind.__name__} has no public method beside reset and get_reward: nothing for the model.")
    try:
        return {name: Tool(_as_method(kind, name)) for name in names}
    except SetupError as error:
        raise SetupError(f"{kind.__name__}: {error} The name of a method that is no tool begins with _.") from error


def _as_method(kind: type, name: str) -> Callable[..., Any]:
    """The method as an instance has it, without an instance."""
    function: Callable[..., Any] = getattr(kind, name)
    is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
    return function if is_static else MethodType(function, kind)


def _bound(tool: Tool, method: Callable[..., Any], worker: Worker) -> Tool:
    """The tool of this instance."""

    async def in_turn(**arguments: Any) -> Any:
        is_wanted = True
        try:
            return await worker.call(lambda: method(**arguments) if is_wanted else None)
        finally:
            is_wanted = False  # given up while it waited: the model is told so, and then it must not run either

    bound = copy.copy(tool)
    bound.function = method if inspect.iscoroutinefunction(method) else in_turn
    return bound


def _with_observation(prompt: list[Message], observation: Any) -> list[Message]:
    """The prompt, its last message followed by the observation: exactly TRL's, with no word between."""
    content = prompt[-1].get("content") or ""
    if isinstance(observation, list) and isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if isinstance(observation, str) and isinstance(content, list):
        observation = [{"type": "text", "text": observation}]
    if type(content) is not type(observation):
        raise EnvError(f"reset returned {observation!r:.200}; it must return a text, or None.")
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]


@functools.cache
def _warn_no_reward(name: str) -> None:
    """Once a class."""
    logger.warning("%s has neither get_reward() nor an attribute reward: its env_reward is 0.", name)
