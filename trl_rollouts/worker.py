"""Users' functions, sync or async, called so that none of them holds up or ends the event loop."""

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it only makes a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class Worker:
    """A thread for the sync functions of one owner, one after the other: objects that belong to the thread that made
    them (SQLite connections, browsers) stay in theirs.

    A daemon thread of its own rather than a place in a pool: Python cannot stop a thread, so a function that hangs
    would take its place in the pool for good and keep the interpreter from exiting.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._has_ended = False
        self.num_unfinished = 0
        """Calls that have not returned; one whose caller gave up still counts."""

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a user's function, sync or async, without holding up the event loop."""
        if is_async(function):
            with exits_as_errors():
                return await function(*args, **kwargs)
        result = await self._submit(function, args, kwargs)
        if inspect.isawaitable(result):  # a sync wrapper around an async function
            with exits_as_errors():
                result = await result
        return result

    def end(self) -> None:
        """Let the thread go once what is submitted has returned."""
        self._has_ended = True
        self._jobs.put(None)

    def _submit(self, function: Callable[..., Any], args: Any, kwargs: Any) -> "asyncio.Future[Any]":
        assert not self._has_ended, "nobody would do the job"
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(result: Any, error: Exception | None) -> None:
            self.num_unfinished -= 1
            if future.done():  # the caller's time limit has passed
                return
            future.set_exception(error) if error is not None else future.set_result(result)

        def job() -> None:
            result, error = None, None
            try:
                with exits_as_errors():
                    result = context.run(function, *args, **kwargs)
            except Exception as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, result, error)

        self.num_unfinished += 1
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="trl_rollouts:worker", daemon=True)
            self._thread.start()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


async def call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a user's function, sync or async, in a thread of its own if it is sync."""
    worker = Worker()
    try:
        return await worker.call(function, *args, **kwargs)
    finally:
        worker.end()


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """A user's code that exits (`sys.exit()`), or is cancelled from within, has failed; the event loop goes on.

    A cancellation from outside, by a time limit or the end of the run, passes through.
    """
    try:
        yield
    except StopIteration as cause:  # a future refuses it, and so does a context manager as a cause
        raise RuntimeError(f"StopIteration: {cause}") from None
    except Exception:
        raise
    except BaseException as cause:
        if isinstance(cause, asyncio.CancelledError) and _is_cancelled_from_outside():
            raise
        raise RuntimeError(f"{type(cause).__name__}: {cause}") from cause


def _is_cancelled_from_outside() -> bool:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # in a thread of a user's function
        return False
    return task is not None and task.cancelling() > 0
