"""A session's process: takes snippets, runs them one after the other in one module, and says what came of them.

Model-written code shares this process, so it can change anything in here. That harms its own session only: the host
takes whatever is sent as hostile, and trusts only what the kernel says (time, death).

Not here: confinement, which is in force before the first snippet (`confinement`), and limits of time (the host's).
"""

import ast
import io
import linecache
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .wire import MAX_CALL_BYTES, Decoder, encode

MAX_OUTPUT_BYTES = 32 << 10
"""Of each of stdout, stderr, value and error: a longer one is sent without its middle."""
MAX_TRACEBACK_FRAMES = 10


class Interrupted(BaseException):
    """The host's time limit. No `except Exception` catches it."""


class _Sink(io.RawIOBase):
    """Keeps the beginning and the end of what is written."""

    def __init__(self) -> None:
        self._head, self._tail, self._num_left_out = bytearray(), bytearray(), 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        data = bytes(piece)
        room = MAX_OUTPUT_BYTES // 2 - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if (over := len(self._tail) - MAX_OUTPUT_BYTES // 2) > 0:
            del self._tail[:over]
            self._num_left_out += over
        return len(data)

    def take(self) -> str:
        """What was written, and begin anew."""
        head, tail = self._head.decode(errors="replace"), self._tail.decode(errors="replace")
        mark = f"\n[... {self._num_left_out} bytes left out ...]\n" if self._num_left_out else ""
        self._head, self._tail, self._num_left_out = bytearray(), bytearray(), 0
        return head + mark + tail


class _Capture:
    """One of sys.stdout and sys.stderr, whatever a snippet does to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._open()

    def _open(self) -> None:
        self._sink = _Sink()
        self._stream = io.TextIOWrapper(
            io.BufferedWriter(self._sink, 1 << 16), encoding="utf-8", errors="backslashreplace", newline="\n"
        )

    def install(self) -> None:
        setattr(sys, self._name, self._stream)

    def take(self) -> str:
        """What was written since the last time."""
        sink = self._sink
        try:
            self._stream.flush()
        except Exception:  # closed or detached by a snippet
            self._open()
        return sink.take()


class Runner:
    """Runs what `channel` asks for until it closes.

    Args:
        channel: the socket to the host.
        functions: names of the host's functions that snippets may call.
    """

    def __init__(self, channel: socket.socket, functions: Sequence[str]) -> None:
        self._channel = channel
        self._decoder = Decoder(max_bytes=1 << 30)  # the host's frames
        self._using_channel = threading.Lock()
        """Held but while a snippet runs, so that no thread of an earlier one can speak between two."""
        self._is_interruptible = self._was_interrupted = False
        self._num_snippets = 0
        self._stdout, self._stderr = _Capture("stdout"), _Capture("stderr")
        module = types.ModuleType("__main__")  # a real one: pickle and doctest look classes up in it
        sys.modules["__main__"] = module
        self._namespace = module.__dict__
        for name in functions:
            self._namespace[name] = self._stub(name)

    def serve(self) -> NoReturn:
        answer: dict[str, Any] = {"ready": True}
        while True:
            with self._using_channel:
                self._channel.sendall(encode(answer))
                request = self._receive()
            answer = {**self._run(str(request["code"])), "number": request["number"]}

    def _run(self, code: str) -> dict[str, Any]:
        self._num_snippets += 1
        self._stdout.install()
        self._stderr.install()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGINT, self._on_interrupt)
        self._was_interrupted = False
        try:
            try:
                self._is_interruptible = True
                outcome = self._outcome(code, f"<snippet {self._num_snippets}>")
            finally:
                self._is_interruptible = False
        except Interrupted:
            outcome = {"status": "timeout", "value": None, "error": None}
        outcome["stdout"], outcome["stderr"] = self._stdout.take(), self._stderr.take()
        return outcome

    def _on_interrupt(self, signum: int, frame: Any) -> None:
        self._was_interrupted = True
        if self._is_interruptible:
            raise Interrupted

    def _outcome(self, code: str, filename: str) -> dict[str, Any]:
        try:
            value = self._execute(code, filename)
            return {"status": "ok", "value": None if value is None else cut(_repr(value)), "error": None}
        except Interrupted:
            raise
        except SystemExit as exit_:
            return {"status": "exit", "value": None, "error": f"SystemExit: {_safe_repr(exit_.code):.200}"}
        except BaseException as error:
            try:
                described = cut(_describe(error))
            except Exception:  # no memory left, or code of the exception's own
                described = type(error).__name__
            return {"status": "error", "value": None, "error": described}

    def _execute(self, code: str, filename: str) -> Any:
        """The value of the last expression, None where the last statement is none."""
        lines = f"{code}\n".splitlines(keepends=True)  # without its end, a line's ^^^^ are one place off
        linecache.cache[filename] = (len(code), None, lines, filename)
        tree = ast.parse(code, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, filename, "exec", dont_inherit=True), self._namespace)
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), self._namespace)

    def _stub(self, name: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            return self._call_host(name, args, kwargs)

        function.__name__ = function.__qualname__ = name
        return function

    def _call_host(self, name: str, args: Any, kwargs: Any) -> Any:
        try:
            frame = encode({"call": name, "args": args, "kwargs": kwargs}, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"{name} takes plain data (numbers, texts, lists, dicts): {error}") from None
        if len(frame) > MAX_CALL_BYTES:
            raise ValueError(f"the arguments of {name} have {len(frame)} bytes; {MAX_CALL_BYTES} can be sent")
        is_main = threading.current_thread() is threading.main_thread()
        with self._using_channel:
            if is_main:  # half a frame would be garbage
                self._is_interruptible = False
            self._channel.sendall(frame)
            answer = self._receive()
        if is_main:
            self._is_interruptible = True
            if self._was_interrupted:
                raise Interrupted
        if answer.get("error") is not None:
            raise RuntimeError(answer["error"])
        return answer.get("result")

    def _receive(self) -> dict[str, Any]:
        while (frame := self._decoder.next()) is None:
            piece = self._channel.recv(1 << 16)
            if not piece:
                os._exit(0)
            self._decoder.feed(piece)
        return frame


def prepare(folder: str) -> None:
    """Point what a process knows of its surroundings to its own folder, and make its randomness its own.

    What was drawn before the fork is the same in every session.
    """
    os.environ["HOME"] = os.environ["TMPDIR"] = folder
    tempfile.tempdir = folder
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int.from_bytes(os.urandom(4), "little"))  # a quarter of the time of seed()


def _plain(value: Any) -> Any:
    """What is nearly plain data, as such: numpy's numbers and arrays, sets, ranges."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, set | frozenset | range):
        return list(value)
    raise TypeError(f"{type(value).__name__} is none")


def _repr(value: Any) -> str:
    text = repr(value)
    return text if isinstance(text, str) else object.__repr__(value)


def _safe_repr(value: Any) -> str:
    try:
        return _repr(value)
    except Exception:
        return object.__repr__(value)


def cut(text: str, max_chars: int = MAX_OUTPUT_BYTES) -> str:
    """The text, without its middle where it is too long."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _describe(error: BaseException) -> str:
    """The traceback from the snippet's first line on. What is this module's would teach nothing."""
    described = traceback.TracebackException.from_exception(error, compact=True)
    inner: traceback.TracebackException | None = described
    while inner is not None:
        frames = list(inner.stack)
        first = next((index for index, frame in enumerate(frames) if frame.filename.startswith("<snippet ")), None)
        kept = [frame for frame in frames[first:] if frame.filename != __file__] if first is not None else []
        if len(kept) > 2 * MAX_TRACEBACK_FRAMES and kept[0].lineno != kept[-1].lineno:
            kept = kept[:MAX_TRACEBACK_FRAMES] + kept[-MAX_TRACEBACK_FRAMES:]
        inner.stack = traceback.StackSummary.from_list(kept)
        inner = inner.__cause__ or inner.__context__
    return "".join(described.format()).rstrip()
