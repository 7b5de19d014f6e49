"""An asyncio event loop on a thread of its own.

So a rollout works inside a running loop (Jupyter), keeps its connections from call to call, and blocks only its
caller.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
Cleanup = Callable[[], Coroutine[Any, Any, None]]

STOP_TIMEOUT_S = 10.0
WATCH_S = 5.0


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
        """The coroutine's result. An interruption of the caller (Ctrl-C) cancels it, so open requests are aborted."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not future.done():
                wait([future], timeout=WATCH_S)
                assert self._thread.is_alive(), "the event loop's thread has ended"
            return future.result()
        except BaseException:
            future.cancel()
            raise


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
