"""An asyncio event loop on a thread of its own.

So a rollout works inside a running loop (Jupyter), keeps its connections from call to call, and blocks only its
caller.
"""

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Cleanup = Callable[[], Coroutine[Any, Any, None]]

STOP_TIMEOUT_S = 10.0
WATCH_S = 5.0
TICK_S = 0.5
MAX_LAG_S = 1.0
"""For which nothing else on the loop moves."""

logger = logging.getLogger(__name__)


class Engine:
    """Runs coroutines for callers in other threads. Ends with its owner, or with the interpreter."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="trl_rollouts", daemon=True)
        self._thread.start()
        self.cleanups: list[Cleanup] = []
        """Coroutine functions to run on the loop before it stops."""
        self.close = weakref.finalize(self, _stop, self.pid, self._loop, self._thread, self.cleanups)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. An interruption of the caller (Ctrl-C) cancels it, so open requests are aborted.

        It is then waited for, so that what it holds is closed, for a while, or until the next interruption.
        """
        ended = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_watched(coroutine, ended), self._loop)
        try:
            while not future.done():
                wait([future], timeout=WATCH_S)
                assert self._thread.is_alive(), "the event loop's thread has ended"
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                ended.wait(STOP_TIMEOUT_S)
            raise


async def _watched(coroutine: Coroutine[Any, Any, T], ended: threading.Event) -> T:
    """The coroutine's result; meanwhile a warning, once, where something keeps the loop from everybody else."""

    async def watch() -> None:
        while True:
            started = time.monotonic()
            await asyncio.sleep(TICK_S)
            if (late_s := time.monotonic() - started - TICK_S) > MAX_LAG_S:
                logger.warning(
                    "An async function of an environment, tool or parser held up all trajectories for %.1f s, and no "
                    "time limit could end it. Await what it waits for, or make it a plain def, which gets a thread.",
                    late_s,
                )
                return

    watching = asyncio.create_task(watch())
    try:
        return await coroutine
    finally:
        watching.cancel()
        ended.set()


def _stop(
    pid: int,
    loop: asyncio.AbstractEventLoop,
    thread: threading.Thread,
    cleanups: list[Cleanup],
) -> None:
    async def wind_down() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_TIMEOUT_S / 2)
        for cleanup in cleanups:
            with suppress(Exception):
                await cleanup()
        loop.stop()

    if os.getpid() != pid:  # a forked child has the objects, and neither the thread nor a right to its connections
        return
    if thread.is_alive():
        asyncio.run_coroutine_threadsafe(wind_down(), loop)
        thread.join(STOP_TIMEOUT_S)
    if not thread.is_alive():
        loop.close()
