"""Episodes of an environment, played as the loop plays them and written down for the checks of `check_env`.

They run in an event loop on a thread of their own, so an environment that blocks the loop, or a notebook that runs
one, does not hold up whoever asked.
"""

import asyncio
import copy
import inspect
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..env import EnvFactory
from ..trajectory import Message
from ..worker import Worker

METHODS = ("reset", "step", "close")
NOT_BACK = "it did not come back"
RENDERED = "A prompt that is a string."
TICK_S, GRACE_S = 0.01, 1.0
"""How often the event loop is asked whether it is free, and how late a cancelled call may come back."""


@dataclass
class Call:
    """One call of a method, and what came of it."""

    name: str
    given: Any = None
    result: Any = None
    error: str | None = NOT_BACK
    """What it raised, or that it did not come back; None once it has returned."""
    is_async: bool = False
    lag_s: float = 0.0
    """The longest time for which it kept the event loop from others, in seconds."""


@dataclass
class Play:
    """One instance, from its making to its close."""

    prompt: list[Message]
    env: Any = None
    failed_to_make: str | None = None
    missing: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    after_the_end: Call | None = None
    """The last action once more, after the end."""
    tools: Any = None

    def results(self, name: str) -> list[Any]:
        return [call.result for call in self.calls if call.name == name and call.error is None]

    @property
    def is_sound(self) -> bool:
        """Whether the environment is one, and all that was called came back."""
        return self.env is not None and not self.missing and all(call.error is None for call in self.calls)

    @property
    def has_ended(self) -> bool:
        steps = self.results("step")
        return bool(steps) and bool(getattr(steps[-1], "terminated", 0) or getattr(steps[-1], "truncated", 0))


class Plays:
    """All that is played.

    Args:
        env_factory: makes the environment.
        prompt: messages, a copy of which every episode begins with.
        actions: the model's turns, one after the other, until an episode ends.
        timeout_s: how long one call may take.
    """

    def __init__(
        self, env_factory: EnvFactory, prompt: list[Message], actions: Sequence[Message], timeout_s: float
    ) -> None:
        self._env_factory, self._prompt, self._actions, self._timeout_s = env_factory, prompt, actions, timeout_s
        self._pending: tuple[Call, float] | None = None
        rendered = [{"role": "user", "content": RENDERED, "is_rendered": True}]
        self.alone, self.again, self.one, self.other, self.unused = (Play(copy.deepcopy(prompt)) for _ in range(5))
        self.rendered = Play(rendered)
        self.hang: str | None = None
        """The call that did not come back; nothing is played after it."""

    def run(self) -> None:
        """Play all. It comes back, whatever the environment does."""
        finished, failures = threading.Event(), list[BaseException]()

        def play() -> None:
            try:
                asyncio.run(self._play())
            except BaseException as failure:
                failures.append(failure)
            finally:
                finished.set()

        threading.Thread(target=play, name="trl_rollouts:check_env", daemon=True).start()
        while not finished.wait(2 * TICK_S) and self.hang is None:
            if self._pending is not None and time.monotonic() > self._pending[1]:
                self.hang = f"{self._pending[0].name} blocks the event loop, or goes on when it is cancelled"
        if failures:
            raise failures[0]

    @property
    def all(self) -> list[Play]:
        return [self.alone, self.again, self.one, self.other, self.rendered, self.unused]

    async def _play(self) -> None:
        for play in (self.alone, self.again):
            await self._episodes([play])
        if getattr(self._env_factory, "max_concurrency", None) != 1:
            await self._episodes([self.one, self.other])
        await self._episodes([self.rendered], actions=[])
        await self._episodes([self.unused], is_reset=False)

    async def _episodes(
        self, plays: list[Play], actions: Sequence[Message] | None = None, is_reset: bool = True
    ) -> None:
        """Play these in turns: a call of the first, the same call of the second, and so on."""
        workers = [Worker() for _ in plays]
        pairs = list(zip(plays, workers, strict=True))
        for play, worker in pairs:
            await self._make(play, worker)
        for play, worker in pairs if is_reset else []:
            await self._call(play, worker, "reset", copy.deepcopy(play.prompt))
            play.tools = getattr(play.env, "tools", None)
        for action in self._actions if actions is None else actions:
            for play, worker in pairs if is_reset else []:
                if not play.has_ended:
                    await self._call(play, worker, "step", copy.deepcopy(action))
        for play, worker in pairs:
            if play.results("step") and hasattr(play.env, "final_reward"):
                await self._call(play, worker, "final_reward")
            if play is self.again and play.has_ended and play.is_sound:
                last = copy.deepcopy([call.given for call in play.calls if call.name == "step"][-1])
                await self._call(play, worker, "step", last)
                play.after_the_end = play.calls.pop()
            for _ in range(2 if play is self.alone else 1):
                await self._call(play, worker, "close")
            worker.end()

    async def _make(self, play: Play, worker: Worker) -> None:
        if self.hang is not None:
            return
        call = Call("env_factory")
        await self._timed(call, worker.call(self._env_factory))
        play.env, play.failed_to_make = call.result, call.error
        if call.error is None:
            play.missing = [name for name in METHODS if not callable(getattr(play.env, name, None))]

    async def _call(self, play: Play, worker: Worker, name: str, *args: Any) -> None:
        """Call a method, unless an earlier call forbids it; closing follows whatever happened."""
        if self.hang is not None or play.env is None or play.missing or not (play.is_sound or name == "close"):
            return
        method: Callable[..., Any] = getattr(play.env, name)
        given = copy.deepcopy(args[0]) if args else None
        call = Call(name, given, is_async=inspect.iscoroutinefunction(method))
        play.calls.append(call)
        await self._timed(call, worker.call(method, *args))
        if name == "reset" and call.error is None:
            call.given = copy.deepcopy(args[0])  # as the environment left it
        with suppress(Exception):  # what cannot be copied is looked at as it is
            call.result = copy.deepcopy(call.result)

    async def _timed(self, call: Call, running: Awaitable[Any]) -> None:
        ticked_at = time.monotonic()

        async def tick() -> None:
            nonlocal ticked_at
            while True:
                await asyncio.sleep(TICK_S)
                late_s, ticked_at = time.monotonic() - ticked_at - TICK_S, time.monotonic()
                call.lag_s = max(call.lag_s, late_s)

        ticking = asyncio.create_task(tick())
        self._pending = call, time.monotonic() + self._timeout_s + GRACE_S
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                call.result = await running
            call.error = None
        except Exception as error:
            if not limit.expired():
                call.error = f"{type(error).__name__}: {error}{_place(error)}"
            else:
                self.hang = f"{call.name} did not come back within timeout_s={self._timeout_s:g}"
        finally:
            self._pending = None
            ticking.cancel()
            call.lag_s = max(call.lag_s, time.monotonic() - ticked_at - TICK_S)


def _place(error: Exception) -> str:
    """Where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
