"""A session at a distance: what passes between the host and the machine on which the code runs.

    the host      `DistantSession`   a `Session`; answers calls of the host's functions
    over there    `Desk`             an executor and its open sessions

One request at a time goes to a session, named by an id that the host has made up; request and answer are JSON text:

    open     {"functions": [...], "can_call": true}   {}
    run      {"code": ..., "timeout_s": ...}          {"result": {...}, "is_alive": ...}
                                                      or {"call": [name, args, kwargs]}
    answer   {"result": ...} or {"error": ...}        the same: what the snippet did once its call was answered
    close    {}                                       {}

Any of them may be answered by {"failed": [type, text]}, an error of this package. Nothing is pickled. What carries the
texts is not here: see `ray` and `http`.
"""

import asyncio
import json
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from ..errors import RolloutError, SandboxError, SessionError, SetupError
from . import ExecResult, ExecStatus, Executor, HostCall, Session

_FAILURES = {type_.__name__: type_ for type_ in (SandboxError, SessionError, SetupError)}

Carry = Callable[[str, str, str], Awaitable[str]]
"""Takes a session's id, what is asked and the request to the desk, and brings the answer. A SessionError of its own
means that the session is lost."""


class DistantSession:
    """A session of an executor elsewhere, once `open` has returned. Belongs to the event loop that opened it."""

    def __init__(self, carry: Carry, call: HostCall | None, on_end: Callable[[], None] = lambda: None) -> None:
        self.id = uuid4().hex
        self._carry = carry
        self._call = call
        self._on_end = on_end
        self._closing: asyncio.Future[dict[str, Any]] | None = None
        self._lost: SessionError | None = None
        self._is_running = False
        self.loop = asyncio.get_running_loop()
        self.is_alive = False

    async def open(self, functions: Sequence[str]) -> None:
        """Open it over there.

        Raises:
            SandboxError, SessionError: as `Executor.open` there, or its way there, raised.
        """
        try:
            await self._ask("open", {"functions": list(functions), "can_call": self._call is not None})
        except BaseException:
            self._end()
            raise
        self.is_alive = True

    async def run(self, code: str, timeout_s: float) -> ExecResult:
        """Run a snippet; see `Session`. A cancelled one ends the session."""
        if self._lost is not None:
            raise SessionError(str(self._lost))
        if not self.is_alive:
            return ExecResult(ExecStatus.DIED, error="The session had ended.")
        assert not self._is_running, "a session runs one snippet at a time"
        self._is_running = True
        try:
            answer = await self._ask("run", {"code": code, "timeout_s": timeout_s})
            while "call" in answer:
                answer = await self._ask("answer", await self._answer(*answer["call"]))
        except BaseException:
            self._end()
            raise
        finally:
            self._is_running = False
        self.is_alive = bool(answer["is_alive"])
        return ExecResult(**answer["result"] | {"status": ExecStatus(answer["result"]["status"])})

    async def close(self) -> None:
        """End it. Of a session that was lost, what is left of it is no error."""
        closing = self._end()
        try:
            await asyncio.shield(closing)
        except SessionError:
            if self._lost is None:
                raise

    def _end(self) -> "asyncio.Future[dict[str, Any]]":
        """Ask for its end, without waiting."""
        self.is_alive = False
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._ask("close", {}))
            self._closing.add_done_callback(lambda closing: closing.cancelled() or closing.exception())
            self._on_end()
        return self._closing

    async def _ask(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            text = await self._carry(self.id, what, json.dumps(request))
        except SessionError as error:
            self._lost = self._lost or error
            raise
        answer: dict[str, Any] = json.loads(text)
        if "failed" in answer:
            name, described = answer["failed"]
            raise _FAILURES.get(name, SandboxError)(described)
        return answer

    async def _answer(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        assert self._call is not None, "the desk passes no call on that cannot be answered"
        try:
            result = await self._call(name, args, kwargs)
            json.dumps(result)
        except Exception as error:
            return {"error": str(error) or type(error).__name__}
        return {"result": result}


class Desk:
    """The other end: opens sessions of an executor for hosts elsewhere. Belongs to one event loop."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._conversations: dict[str, _Conversation] = {}
        self._opened: deque[str] = deque(maxlen=4096)
        self._abandoned: deque[str] = deque(maxlen=4096)
        """Ids whose end was asked for before they were open: what waited for them was cancelled."""

    async def ask(self, id_: str, what: str, request: str) -> str:
        """Answer one request, as the head of this module has them."""
        try:
            answer = await self._answer(id_, what, json.loads(request))
        except RolloutError as error:
            answer = {"failed": [type(error).__name__, str(error)]}
        except Exception as error:
            answer = {"failed": ["SessionError", f"{type(error).__name__}: {error}"]}
        return json.dumps(answer)

    async def close(self) -> None:
        """End all sessions and the executor."""
        for id_ in list(self._conversations):
            await self._close(id_)
        await self._executor.close()

    async def _answer(self, id_: str, what: str, request: dict[str, Any]) -> dict[str, Any]:
        if what == "open":
            return await self._open(id_, **request)
        if what == "close":
            return await self._close(id_)
        if id_ not in self._conversations:
            raise SessionError("The session is not open, or no longer.")
        conversation = self._conversations[id_]
        return await (conversation.run(**request) if what == "run" else conversation.answer(**request))

    async def _open(self, id_: str, functions: list[str], can_call: bool) -> dict[str, Any]:
        if id_ in self._opened:
            raise SessionError("A session with this id has been opened before.")
        self._opened.append(id_)
        conversation = _Conversation()
        session = await self._executor.open(functions, conversation.call if can_call else None)
        if id_ in self._abandoned:
            self._abandoned.remove(id_)
            await session.close()
            raise SessionError("The session was closed before it was open.")
        conversation.session = session
        self._conversations[id_] = conversation
        return {}

    async def _close(self, id_: str) -> dict[str, Any]:
        if (conversation := self._conversations.pop(id_, None)) is None:
            self._abandoned.append(id_)
        else:
            await conversation.close()
        return {}


class _Conversation:
    """An open session and what it waits for. A run is answered in pieces: at each call, and at its end."""

    session: Session

    def __init__(self) -> None:
        self._calls: asyncio.Queue[tuple[list[Any], asyncio.Future[Any]]] = asyncio.Queue()
        self._running: asyncio.Task[ExecResult] | None = None
        self._asked: asyncio.Future[Any] | None = None

    async def call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """The session's `HostCall`."""
        answer = asyncio.get_running_loop().create_future()
        self._calls.put_nowait(([name, args, kwargs], answer))
        return await answer

    async def run(self, code: str, timeout_s: float) -> dict[str, Any]:
        self._running = asyncio.create_task(self.session.run(code, timeout_s))
        return await self._next()

    async def answer(self, result: Any = None, error: str | None = None) -> dict[str, Any]:
        if self._asked is None or self._asked.done():
            raise SessionError("The session has asked nothing, or has ended.")
        if error is None:
            self._asked.set_result(result)
        else:
            self._asked.set_exception(RuntimeError(error))
        return await self._next()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        await self.session.close()

    async def _next(self) -> dict[str, Any]:
        assert self._running is not None
        calling = asyncio.create_task(self._calls.get())
        try:
            await asyncio.wait([calling, self._running], return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                request, self._asked = calling.result()
                return {"call": request}
        finally:
            calling.cancel()
        if self._running.cancelled():
            raise SessionError("The session was closed while it ran.")
        return {"result": asdict(self._running.result()), "is_alive": self.session.is_alive}
