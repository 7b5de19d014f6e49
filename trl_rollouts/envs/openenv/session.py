"""A session of an OpenEnv server: one WebSocket, from the server's first place that is free to the end.

A server without one is asked again, with back-off, and so is one whose connection is lost before the session has
begun. After that nothing is sent twice, as the session is gone with its connection. One whose reply is given up is
cut, so no late reply meets a later question.

The protocol is JSON, a reply to each message. What actions and observations mean is not known here. It is spoken with
websockets, which answers a server's pings also while nobody reads, as when the model writes; aiohttp does not.
"""

import functools
import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests
import tenacity

from ...errors import EnvError, ServerError

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
MAX_CONNECTS = 4
HANG_UP_TIMEOUT_S = 5.0
MAX_REPLY_BYTES = 100 << 20


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where sessions are had, and how."""

    base_url: str
    headers: dict[str, str]
    max_concurrency: int
    """Sessions of this process at a time, which somebody else sees to."""
    capacity_timeout_s: float
    keepalive_s: float | None

    def schema(self) -> dict[str, Any]:
        """What the server says of its actions and observations.

        Raises:
            ServerError: it says nothing.
        """
        try:
            with requests.Session() as http:
                http.trust_env = False
                response = http.get(f"{self.base_url}/schema", headers=self.headers, timeout=CONNECT_TIMEOUT_S)
        except requests.RequestException as cause:
            raise ServerError(
                f"No environment server answers at {self.base_url} ({type(cause).__name__}). Start it first, in the "
                "environment's folder: python -m server.app --host 127.0.0.1 --port "
                f"{urlsplit(self.base_url).port or 80}."
            ) from cause
        schema = None
        with suppress(requests.JSONDecodeError):
            schema = response.json()
        if not isinstance(schema, dict) or not {"action", "observation"} <= schema.keys():
            raise ServerError(
                f"{self.base_url}/schema answered {response.status_code} {response.text!r:.100}, as no OpenEnv server "
                "does. base_url is the environment's server, not the model's."
            )
        return schema

    async def connect(self) -> "ClientConnection":
        from websockets.asyncio.client import connect

        return await connect(
            self.base_url.replace("http", "ws", 1) + "/ws",
            additional_headers=self.headers,
            proxy=None,
            open_timeout=CONNECT_TIMEOUT_S,
            close_timeout=HANG_UP_TIMEOUT_S,
            ping_interval=self.keepalive_s,
            ping_timeout=None,  # a server that steps on its event loop answers late; hung ones meet step_timeout_s
            max_size=MAX_REPLY_BYTES,
        )


class Session:
    """`begin`, `step` as often as needed, and `close` in any case. Used in one event loop."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket: ClientConnection | None = None
        self._num_steps = 0

    async def begin(self, data: dict[str, Any]) -> dict[str, Any]:
        """The reply to a reset, as soon as the server has a place.

        Raises:
            EnvError: it had none in time, cannot be reached, or its environment failed.
        """
        from websockets.exceptions import WebSocketException

        server = self._server
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_is_passing),
            stop=_Patience(server.capacity_timeout_s),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=8.0),
            reraise=True,
        )
        try:
            return await retrying(self._attempt, data)
        except RefusedError as refused:
            raise EnvError(f"{server.base_url} failed to reset: {refused}") from refused
        except _FullError as full:
            raise EnvError(
                f"{server.base_url} had no place for capacity_timeout_s={server.capacity_timeout_s:g} ({full}). Lower "
                "max_concurrency to the server's max_concurrent_envs over the number of training processes, or raise "
                "that. A step that hangs in the server keeps its place."
            ) from full
        except (OSError, WebSocketException) as cause:
            raise EnvError(
                f"{server.base_url}: no session could be begun, the last attempt ended with {type(cause).__name__}: "
                f"{cause}. Check that the server runs; its log says why if it died."
            ) from cause

    async def step(self, payload: dict[str, Any]) -> dict[str, Any]:
        """The reply to an action.

        Raises:
            RefusedError: the server answered with an error. The session goes on if it was not its own end.
            EnvError: the session is gone.
        """
        from websockets.exceptions import ConnectionClosed

        try:
            reply = await self._ask("step", payload)
        except ConnectionClosed as cause:
            raise EnvError(
                f"The connection to {self._server.base_url} was lost after {self._num_steps} steps ({cause}), and the "
                "episode with it."
            ) from cause
        self._num_steps += 1
        return reply

    async def close(self) -> None:
        """Hang up, which ends the session. A server that is in a step ends it behind that."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            await socket.close()
        finally:
            socket.transport.abort()  # also where this is cancelled; nothing where it has closed

    async def _attempt(self, data: dict[str, Any]) -> dict[str, Any]:
        await self.close()  # of an attempt before
        self._socket = await self._server.connect()
        try:
            return await self._ask("reset", data)
        except _FullError as full:
            if full.num_places < self._server.max_concurrency:
                _warn_full(self._server.base_url, full.num_places, self._server.max_concurrency)
            raise

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        assert self._socket is not None, "begin comes first"
        message = json.dumps({"type": kind, "data": data})
        try:
            with suppress(ConnectionClosed):  # who refuses says why and hangs up: that is read first
                await self._socket.send(message)
            reply = json.loads(await self._socket.recv())
        except BaseException:
            self._socket.transport.abort()  # of all later replies too: none may meet another question
            raise
        answered: dict[str, Any] = reply["data"]
        if reply["type"] == "observation":
            return answered
        raise _FullError(answered) if answered.get("code") == "CAPACITY_REACHED" else RefusedError(answered)


class RefusedError(Exception):
    """The server's error in place of an observation."""

    def __init__(self, answered: dict[str, Any]) -> None:
        self._invalid: list[Any] = answered.get("errors", []) if answered.get("code") == "VALIDATION_ERROR" else []
        super().__init__(complaint(self._invalid) or f"{answered.get('message')} ({answered.get('code')})")

    def is_about(self, fields: frozenset[str]) -> bool:
        """Whether it is the action that is invalid. An environment may also fail to make its observation."""
        return bool(self._invalid) and all(not one["loc"] or one["loc"][0] in fields for one in self._invalid)


class _FullError(Exception):
    """The server has no free place."""

    def __init__(self, answered: dict[str, Any]) -> None:
        super().__init__(answered.get("message", "no free place"))
        self.num_places = int(answered.get("max_sessions", 1 << 30))


class _Patience:
    """When to ask no more: longer for a place than for a server that does not answer."""

    def __init__(self, capacity_timeout_s: float) -> None:
        self._capacity_timeout_s = capacity_timeout_s
        self._num_lost = 0

    def __call__(self, state: tenacity.RetryCallState) -> bool:
        assert state.outcome is not None
        if isinstance(state.outcome.exception(), _FullError):
            return (state.seconds_since_start or 0.0) >= self._capacity_timeout_s
        self._num_lost += 1
        return self._num_lost >= MAX_CONNECTS


def complaint(errors: list[Any]) -> str:
    """Pydantic's list of errors in words."""
    return "; ".join(": ".join([*map(str, one["loc"]), one["msg"]]) for one in errors)


def _is_passing(error: BaseException) -> bool:
    """Whether another attempt may go better."""
    from websockets.exceptions import InvalidStatus, WebSocketException

    if isinstance(error, InvalidStatus):
        return error.response.status_code == 429 or error.response.status_code >= 500
    return isinstance(error, _FullError | OSError | WebSocketException)


@functools.cache
def _warn_full(base_url: str, num_places: int, max_concurrency: int) -> None:
    logger.warning(
        "%s takes %d sessions at a time, and max_concurrency is %d. Trajectories wait for one another within their "
        "time limits: lower it to that, divided by the number of training processes.",
        base_url,
        num_places,
        max_concurrency,
    )
