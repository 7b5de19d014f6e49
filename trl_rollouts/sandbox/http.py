"""An executor on another machine, by HTTP: for code that must not run on the trainer's kernel, where there is no Ray.

    there    async with serve_executor(LocalExecutor(), host="0.0.0.0", port=8700, token=token):
                 await asyncio.Event().wait()
    here     HttpExecutor("http://sandbox:8700", token=token)

One route, `POST /sessions/{id}/{what}`, takes and gives the JSON that `exchange` lists, with the header
`Authorization: Bearer <token>`; the id is the host's to make up. Any server that speaks this may stand there.
Functions of the host's run here, not there.

Who has the token may run code there, and HTTP shows it to the network: keep both within a private one, or put a proxy
with TLS in front. Nothing is sent twice: a request that fails has lost its session.
"""

import asyncio
import hmac
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from ..errors import SandboxError, SessionError, SetupError
from . import Executor, HostCall, Session
from .exchange import Desk, DistantSession

MAX_REQUEST_BYTES = 64 << 20
CONNECT_TIMEOUT_S = 10.0
SHORT_TIMEOUT_S = 120.0
"""For opening a session, with the start of what serves it, and for closing one."""
_WHAT = ("open", "run", "answer", "close")


class HttpExecutor:
    """Runs model-written Python where `serve_executor` serves an executor. May be shared by rollouts.

    Args:
        base_url: such as `http://sandbox:8700`.
        token: what the server was given.
    """

    def __init__(self, base_url: str, *, token: str) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise SetupError(f"base_url must begin with http:// or https://, not {base_url!r}.")
        self._base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"}
        self._open: set[DistantSession] = set()

    async def open(self, functions: Sequence[str] = (), call: HostCall | None = None) -> Session:
        """A new session over there. See `Executor`."""
        session = DistantSession(_Line(self._base_url, self._headers).carry, call, lambda: self._open.discard(session))
        self._open.add(session)
        await session.open(functions)
        return session

    async def close(self) -> None:
        """End all sessions that were opened here, in this event loop. The server goes on."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(session.close() for session in list(self._open) if session.loop is loop))


class _Line:
    """The connections of one session, for the event loop that opened it."""

    def __init__(self, base_url: str, headers: dict[str, str]) -> None:
        self._base_url = base_url
        self._http = aiohttp.ClientSession(headers=headers)

    async def carry(self, id_: str, what: str, request: str) -> str:
        """A request to the server; see `exchange.Carry`."""
        url = f"{self._base_url}/sessions/{id_}/{what}"
        # What runs takes as long as it takes; the rest does not.
        timeout = aiohttp.ClientTimeout(
            total=SHORT_TIMEOUT_S if what in ("open", "close") else None, sock_connect=CONNECT_TIMEOUT_S
        )
        try:
            async with self._http.post(
                url, data=request, headers={"Content-Type": "application/json"}, timeout=timeout
            ) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # RuntimeError: closed meanwhile
            is_absent = what == "open" and isinstance(error, aiohttp.ClientConnectorError)
            failure = SandboxError if is_absent else SessionError
            raise failure(
                f"The sandbox at {self._base_url} cannot be reached ({type(error).__name__}: {error}). Check that it "
                "is served there; a session that was open is lost."
            ) from error
        finally:
            if what == "close":
                await self.close()
        if response.status != 200:
            is_refused = what == "open" and response.status in (401, 403, 404)
            failure = SandboxError if is_refused else SessionError
            raise failure(f"{url} answered {response.status}: {text:.500}")
        return text

    async def close(self) -> None:
        await self._http.close()


@asynccontextmanager
async def serve_executor(
    executor: Executor, *, token: str, host: str = "127.0.0.1", port: int = 0, idle_timeout_s: float = 3600.0
) -> AsyncIterator[str]:
    """Serve `executor` as long as the block runs, and close it then.

    Args:
        executor: any.
        token: what a host must send. Who has it may run code here.
        host: the address to listen at; all of the machine's are "0.0.0.0".
        port: 0 for a free one.
        idle_timeout_s: after which a session that nobody asks anything is closed.

    Yields:
        The base URL.
    """
    if not token:
        raise SetupError("token must not be empty: whoever reaches the server could run code.")
    server = _Server(Desk(executor), token, idle_timeout_s)
    app = web.Application(client_max_size=MAX_REQUEST_BYTES)
    app.router.add_post("/sessions/{id}/{what}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    closing_idle = asyncio.create_task(server.close_idle())
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        reached_at = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        yield f"http://{f'[{reached_at}]' if ':' in reached_at else reached_at}:{runner.addresses[0][1]}"
    finally:
        closing_idle.cancel()
        await server.desk.close()  # ends what handlers wait for
        await runner.cleanup()


class _Server:
    def __init__(self, desk: Desk, token: str, idle_timeout_s: float) -> None:
        self.desk = desk
        self._expected = f"Bearer {token}".encode()
        self._idle_timeout_s = idle_timeout_s
        self._in_flight: dict[str, int] = {}
        self._touched_at: dict[str, float] = {}

    async def handle(self, request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(errors="replace"), self._expected):
            raise web.HTTPUnauthorized(text="the token is missing or wrong")
        id_, what = request.match_info["id"], request.match_info["what"]
        if what not in _WHAT:
            raise web.HTTPNotFound(text=f"{what!r} is none of {', '.join(_WHAT)}")
        self._in_flight[id_] = self._in_flight.get(id_, 0) + 1
        try:
            answer = await self.desk.ask(id_, what, (await request.read()).decode(errors="replace"))
        finally:
            if what == "close":
                self._forget(id_)
            elif id_ in self._in_flight:
                self._in_flight[id_] -= 1
                self._touched_at[id_] = asyncio.get_running_loop().time()
        return web.Response(text=answer, content_type="application/json")

    async def close_idle(self) -> None:
        """Close what its host has left, for ever."""
        while True:
            await asyncio.sleep(self._idle_timeout_s / 10)
            limit = asyncio.get_running_loop().time() - self._idle_timeout_s
            for id_ in [id_ for id_, at in self._touched_at.items() if at < limit and not self._in_flight[id_]]:
                self._forget(id_)
                await self.desk.ask(id_, "close", "{}")

    def _forget(self, id_: str) -> None:
        self._in_flight.pop(id_, None)
        self._touched_at.pop(id_, None)
