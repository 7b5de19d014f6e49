"""What the checks of an executor stand on: sessions, snippets and comparisons."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ..sandbox import ExecResult, ExecStatus, Executor, Session


class Bench:
    """Opens the sessions of one check and runs snippets in them."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._sessions: list[Session] = []

    async def open(self, functions: Mapping[str, Callable[..., Awaitable[Any]]] | None = None) -> Session:
        """A session whose snippets may call these functions."""

        async def call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
            return await (functions or {})[name](*args, **kwargs)

        session = await self.executor.open(list(functions or {}), call if functions else None)
        self._sessions.append(session)
        return session

    async def run(self, session: Session, code: str, *, timeout_s: float = 60.0, **expected: Any) -> ExecResult:
        """Run a snippet whose result has these fields; its status is OK unless another one is given."""
        result = await session.run(code, timeout_s)
        for name, value in ({"status": ExecStatus.OK} | expected).items():
            if (seen := getattr(result, name)) != value:
                said = f". It said: {result.error or result.stderr}"[:500] if name == "status" else ""
                raise AssertionError(
                    f"expected: {_field(name, value)} after {code!r:.200}; seen: {_field(name, seen)}{said}"
                )
        return result

    def expect(self, is_so: bool, what: str, seen: object) -> None:
        if not is_so:
            raise AssertionError(f"expected: {what}; seen: {seen!r:.500}")

    async def expect_dead(self, session: Session) -> None:
        self.expect(not session.is_alive, "a session that is not alive", session.is_alive)
        await self.run(session, "1", status=ExecStatus.DIED, value=None)

    async def close(self) -> None:
        """Close the sessions, in no order."""
        await asyncio.gather(*(session.close() for session in self._sessions))


def _field(name: str, value: object) -> str:
    return f"{name}={value if name == 'status' else repr(value):.500}"
