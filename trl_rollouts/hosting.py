"""An environment as the loop holds it: made, called and closed, so that it can hurt no trajectory but its own.

Sync calls run in a thread of its own, every call has a time limit, what comes back is checked, and what goes wrong is
an `EnvError` that names the call. It is closed once, whatever happened, and also where it was made too late.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .env import Env, EnvFactory, StepResult, checked_opening, checked_reward, checked_step
from .errors import EnvError, SetupError, boundary
from .trajectory import Message
from .worker import Worker, exits_as_errors, is_async

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvLimits:
    """Seconds that one call of an environment may take."""

    reset_timeout_s: float = math.inf
    """Of making it, and of its reset."""
    step_timeout_s: float = math.inf
    """Of a step, and of reading the final reward."""
    close_timeout_s: float = 10.0
    """One that takes longer is not waited for."""


class HostedEnv:
    """One environment, from its factory to its close. Its methods are called one after the other.

    Args:
        factory: makes the environment.
        limits: how long each call may take.
    """

    def __init__(self, factory: EnvFactory, limits: EnvLimits) -> None:
        self._factory, self._limits = factory, limits
        self._worker = Worker()
        self._env: Env | None = None
        self._making: asyncio.Future[Env] | None = None
        self._late: asyncio.Future[None] | None = None
        self.tools: Sequence[Any] = ()
        """Schemas for the chat template; known after reset."""
        self.answer_role: str | None = None
        """The role of observations, where the environment says it or has tools; known after reset."""
        self._final_reward: Callable[[], Any] | None = None
        self.is_closing = False
        """It is to be let finish."""

    async def make(self) -> None:
        """Raises `SetupError` where what was made is no environment."""
        limit_s = self._limits.reset_timeout_s
        self._making = asyncio.ensure_future(self._worker.call(self._factory))
        async with _limited("making the environment", "reset_timeout_s", limit_s):
            self._env = await asyncio.shield(self._making)
        if missing := [name for name in ("reset", "step", "close") if not callable(getattr(self._env, name, None))]:
            raise SetupError(
                f"The environment {type(self._env).__name__} has no method {', '.join(missing)}; see Env. A class "
                "made for TRL's environment_factory goes in as trl_environment(...)."
            )

    async def reset(self, prompt: list[Message]) -> list[Message]:
        """The opening messages."""
        assert self._env is not None
        try:
            async with _limited("env.reset", "reset_timeout_s", self._limits.reset_timeout_s):
                opening = checked_opening(await self._worker.call(self._env.reset, prompt))
                self._read_attributes()
                return opening
        except EnvError as error:
            if isinstance(error.__cause__, KeyError):
                raise EnvError(f"{error}. {_handed_over(prompt)}") from error.__cause__
            raise

    def _read_attributes(self) -> None:
        """What is optional in the protocol; a property of a user's may do anything."""
        with exits_as_errors():
            tools = getattr(self._env, "tools", None)
            if not isinstance(tools, list | tuple | None):
                raise EnvError(f"env.tools is {tools!r:.200}; it must be a list of schemas.")
            self.tools = tools or ()
            self.answer_role = getattr(self._env, "answer_role", "tool" if self.tools else None)
            self._final_reward = getattr(self._env, "final_reward", None)

    async def step(self, action: Message) -> StepResult:
        assert self._env is not None
        async with _limited("env.step", "step_timeout_s", self._limits.step_timeout_s):
            return checked_step(await self._worker.call(self._env.step, action))

    async def final_reward(self) -> float:
        """What is added once the trajectory has ended; 0.0 of an environment that has no such method.

        Behind a call that still hangs it cannot be known, and a reward without it would be taken for the whole.
        """
        method = self._final_reward
        if method is None:
            return 0.0
        if self._worker.num_unfinished and not is_async(method):
            raise EnvError("env.final_reward cannot be called: an earlier call of the environment has not returned.")
        async with _limited("env.final_reward", "step_timeout_s", self._limits.step_timeout_s):
            return checked_reward(await self._worker.call(method), "env.final_reward")

    async def close(self) -> None:
        """Close it; a failure to close is worth a line, not a row. One that hangs is not waited for.

        In the task of reset and step, since some libraries ask for that.
        """
        self.is_closing = True
        await self._end()

    async def _end(self) -> None:
        making = self._making
        if making is not None and not making.done():
            if is_async(self._factory):
                making.cancel()  # what it has begun, it ends itself
            making.add_done_callback(self._end_late)
            return
        if self._env is None and making is not None and not making.cancelled() and making.exception() is None:
            self._env = making.result()  # just then nobody waited any more
        try:
            if self._env is not None:
                await self._close(getattr(self._env, "close", None))
        finally:
            self._worker.end()

    async def _close(self, close: Any) -> None:
        if not callable(close):  # what was made is no environment, and that has been said
            return
        is_queued = self._worker.num_unfinished > 0 and not is_async(close)
        limit_s = 0.0 if is_queued else self._limits.close_timeout_s
        try:
            async with _limited("env.close", "close_timeout_s", limit_s):
                await self._worker.call(close)
        except Exception as error:
            if is_queued and isinstance(error.__cause__, TimeoutError):
                logger.info("env.close follows once an earlier call of the environment has returned.")
            else:
                logger.warning("%s", error)

    def _end_late(self, making: "asyncio.Future[Env]") -> None:
        """It was made after all, when nobody waited any more."""
        self._late = asyncio.ensure_future(self._end())


def _handed_over(prompt: list[Message]) -> str:
    task = prompt[-1].get("task") if prompt else None
    columns = f"the columns {', '.join(task)}" if isinstance(task, dict) and task else "no column"
    return f"The row hands over {columns}; with_task(dataset, [...]) puts them into the prompt's last message."


@asynccontextmanager
async def _limited(what: str, limit_name: str, limit_s: float) -> AsyncIterator[None]:
    """Attribute what fails within the block to the environment, and end it at its limit."""
    limit = asyncio.timeout(limit_s)
    late = EnvError(f"{what} did not come back within {limit_name}={limit_s:g}")
    try:
        async with limit:
            with boundary(EnvError, f"{what} failed"):
                yield
    except TimeoutError as cause:
        raise late from cause
    if limit.expired():  # it caught its cancellation
        raise late
