"""The host's end of one sandboxed process: sends a snippet, keeps its time, answers its calls, ends it.

What the process sends is hostile input (`wire`). What the host knows for certain is the kernel's word: whether the
process lives, and how long it ran. A process is stopped (SIGSTOP) whenever it has nothing to do, so that threads left
behind by a snippet burn no processor and write no file between two.

A snippet's time is its own: waiting for a processor, which grows with what else the machine does, and the host's
functions do not count.
"""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from typing import Any

from ..errors import SessionError
from . import ExecResult, ExecStatus, HostCall
from .answers import clean, result_of
from .clock import Clock
from .confinement import MAX_THREADS
from .folders import remove, usage
from .wire import MAX_CALL_BYTES, Decoder, WireError, encode

GRACE_S = 0.5
"""Between the interrupt and the end."""
MAX_FOLDER_BYTES = 100 << 20
MAX_FOLDER_ENTRIES = 5000
OPEN_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
MAX_FREE_CALLS = 1000
"""Calls of one snippet whose time does not count as its own. Those after them do: each costs the host something."""
MIN_FREE_BYTES = 1 << 30
"""On the disk, or a twentieth of it: files that are deleted and still mapped are in no folder to count."""
_FEW_ENTRIES = 256
_CLOCK_TICK_NS = 20_000_000
_ENDED = "The process ended: a crash in native code, os._exit, or no memory left."


class LocalSession:
    """One sandboxed process, once `wait_ready` has returned. Belongs to the event loop that opened it."""

    def __init__(
        self,
        channel: socket.socket,
        folder: str,
        functions: Collection[str],
        call: HostCall | None,
        on_close: Callable[[], None],
    ) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._folder = folder
        self._functions = frozenset(functions)
        self._call = call
        self._on_close = on_close
        self._decoder = Decoder()
        self._loop = asyncio.get_running_loop()
        self._pidfd = -1
        self._num_snippets = self._num_entries = self._changed_at = 0
        self._is_running = self._is_stopped = self._is_closed = False
        self.is_alive = True

    async def wait_ready(self) -> None:
        """Wait until the process is confined.

        Raises:
            SessionError: it could not be started, or not be confined.
        """
        deadline = self._loop.time() + OPEN_TIMEOUT_S
        is_ready = False
        while not is_ready or self._pidfd < 0:
            if not await self._until_readable(deadline - self._loop.time()):
                raise SessionError(f"A sandboxed process was not ready within {OPEN_TIMEOUT_S:g} s.")
            try:
                data, fds, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
            except ConnectionError:  # the fork server was killed with the request unread
                data, fds = b"", []
            if fds:
                self._pidfd = fds[0]
            if not data:
                raise SessionError("A sandboxed process ended before it was ready.")
            self._decoder.feed(data)
            while (frame := self._decoder.next()) is not None:
                if "failed" in frame:
                    raise SessionError(f"A sandboxed process could not be started: {frame['failed']}")
                is_ready = is_ready or "ready" in frame

    async def run(self, code: str, timeout_s: float) -> ExecResult:
        """Run a snippet; see `Session`."""
        if not self.is_alive:
            return ExecResult(ExecStatus.DIED, error="The session had ended.")
        if self._is_running:
            raise RuntimeError("A session runs one snippet at a time, and has not ended the one before.")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ValueError(f"timeout_s must be a positive number, not {timeout_s!r}.")
        self._is_running = True
        clock = Clock(self._pidfd, timeout_s)
        try:
            return await self._run(code, clock)
        except _OverrunError as reason:
            self._kill()
            return ExecResult(ExecStatus.KILLED, error=str(reason), duration_s=clock.elapsed_s())
        except WireError as error:
            self._kill()
            return ExecResult(ExecStatus.PROTOCOL, error=f"The process sent {error}, and was ended.")
        except (ConnectionError, EOFError):
            self._kill()
            return ExecResult(ExecStatus.DIED, error=_ENDED)
        except BaseException:
            self._kill()
            raise
        finally:
            self._is_running = False
            self._stop()

    async def close(self) -> None:
        """End the process and remove its folder."""
        if self._is_closed:
            return
        self._is_closed = True
        self._kill()
        try:
            if self._pidfd >= 0 and not await self._until_readable(CLOSE_TIMEOUT_S, fd=self._pidfd):
                raise SessionError(f"A sandboxed process did not end within {CLOSE_TIMEOUT_S:g} s of being killed.")
        finally:
            self._channel.close()
            pidfd, self._pidfd = self._pidfd, -1  # its number will be another's
            if pidfd >= 0:
                os.close(pidfd)
            try:
                os.rmdir(self._folder)
            except OSError:
                await asyncio.to_thread(remove, self._folder)
            self._on_close()

    async def _run(self, code: str, clock: Clock) -> ExecResult:
        self._refuse_leftovers()
        self._num_snippets += 1
        self._resume()
        await self._send({"code": code, "number": self._num_snippets}, clock)
        num_calls = 0
        while True:
            frame = await self._receive(clock)
            self._stop()
            if not self._decoder.is_empty:
                raise WireError("something unasked")
            if "call" in frame:
                if self._decoder.num_bytes > MAX_CALL_BYTES:
                    raise WireError(f"a call of {self._decoder.num_bytes} bytes")
                await self._look(clock)  # calls may follow one another too closely for `_receive` to do it
                num_calls += 1
                answer = await self._answer(frame, clock if num_calls <= MAX_FREE_CALLS else None)
                if self._is_closed:
                    raise EOFError
                self._resume()
                await self._send(answer, clock)
            else:
                result = result_of(frame, self._num_snippets, clock)
                if problem := await self._folder_problem():
                    self._kill()
                    return ExecResult(
                        ExecStatus.KILLED, result.stdout, result.stderr, None, problem, result.duration_s
                    )
                return result

    async def _look(self, clock: Clock) -> None:
        """Where it is time to: look at the clock and the folder. Interrupt the snippet once its time is over.

        Raises:
            _OverrunError: the session must end.
        """
        if clock.next_look_s() > 0.0:
            return
        clock.looked()
        if clock.interrupted_at_s is not None:
            if clock.elapsed_s() < clock.interrupted_at_s + GRACE_S:
                return
            raise _OverrunError(
                f"The time limit of {clock.timeout_s:g} s passed, and an interrupt did not stop the code."
            )
        if problem := await self._folder_problem():
            raise _OverrunError(problem)
        if (num_threads := clock.num_threads()) > MAX_THREADS + 1:
            raise _OverrunError(f"The code started {num_threads} threads; {MAX_THREADS} are allowed.")
        if clock.is_over():
            clock.interrupted_at_s = clock.elapsed_s()
            self._signal(signal.SIGINT)

    async def _folder_problem(self) -> str | None:
        limit = MAX_FOLDER_ENTRIES
        try:
            changed_at = os.stat(self._folder, follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:  # where no Landlock holds it
            return "The code removed its folder."
        if self._num_entries == 0 and changed_at == self._changed_at:
            return None
        # Within a tick of the kernel's clock a folder may change and look the same.
        self._changed_at = changed_at if time.time_ns() - changed_at > _CLOCK_TICK_NS else 0
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < min(MIN_FREE_BYTES, disk.f_blocks * disk.f_frsize // 20):
            return "The disk is nearly full."
        self._num_entries, num_bytes = usage(self._folder, max_entries=_FEW_ENTRIES)
        if self._num_entries >= _FEW_ENTRIES:  # too slow for the event loop
            self._num_entries, num_bytes = await asyncio.to_thread(usage, self._folder, max_entries=limit)
        if self._num_entries < limit and num_bytes <= MAX_FOLDER_BYTES:
            return None
        return (
            f"The code wrote too much: {self._num_entries} files and {num_bytes >> 20} MB; {limit} files and "
            f"{MAX_FOLDER_BYTES >> 20} MB may be kept."
        )

    async def _answer(self, frame: dict[str, Any], clock: Clock | None) -> dict[str, Any]:
        """Only the function itself is time of the host's; a clock stands still for it."""
        name, args, kwargs = frame["call"], frame.get("args"), frame.get("kwargs")
        if not isinstance(name, str) or not isinstance(args, list) or not isinstance(kwargs, dict):
            raise WireError("a call that is none")
        if self._call is None or name not in self._functions:
            raise WireError("a call of a function that it was not given")
        try:
            name, args, kwargs = clean([name, args, kwargs])
            with clock.paused() if clock is not None else nullcontext():
                result = await self._call(name, args, kwargs)
            encode({"result": result})
        except Exception as error:
            return {"error": str(error) or type(error).__name__}
        return {"result": result}

    def _refuse_leftovers(self) -> None:
        try:
            unasked = self._channel.recv(1)
        except BlockingIOError:
            unasked = None
        if unasked == b"":
            raise EOFError
        if unasked is not None or not self._decoder.is_empty:
            raise WireError("something unasked")

    async def _send(self, message: dict[str, Any], clock: Clock) -> None:
        rest = memoryview(encode(message))
        while rest:
            try:
                rest = rest[self._channel.send(rest) :]
            except BlockingIOError:  # it reads slowly, or never
                await self._look(clock)
                await asyncio.sleep(0.001)

    async def _receive(self, clock: Clock) -> dict[str, Any]:
        while (frame := self._decoder.next()) is None:
            await self._look(clock)
            if await self._until_readable(clock.next_look_s()):
                try:
                    piece = self._channel.recv(1 << 16)
                except BlockingIOError as cause:  # as out-of-band data makes it look
                    raise WireError("what is no frame") from cause
                if not piece:
                    raise EOFError
                self._decoder.feed(piece)
        return frame

    async def _until_readable(self, timeout_s: float, fd: int | None = None) -> bool:
        """Whether there is something to read within `timeout_s`."""
        fd = self._channel.fileno() if fd is None else fd
        readable: asyncio.Future[bool] = self._loop.create_future()

        def settle(value: bool) -> None:
            if not readable.done():
                readable.set_result(value)

        self._loop.add_reader(fd, settle, True)
        timer = self._loop.call_later(timeout_s, settle, False)
        try:
            return await readable
        finally:
            timer.cancel()
            self._loop.remove_reader(fd)

    def _stop(self) -> None:
        if self.is_alive and not self._is_stopped:
            self._is_stopped = True
            self._signal(signal.SIGSTOP)

    def _resume(self) -> None:
        if self._is_stopped:
            self._is_stopped = False
            self._signal(signal.SIGCONT)

    def _kill(self) -> None:
        self.is_alive = False
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


class _OverrunError(Exception):
    """The session must end: its snippet is beyond a limit."""
