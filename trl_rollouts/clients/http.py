"""JSON over HTTP to one server: a bounded number of attempts, and failures in this package's types.

Retried, with a jittered back-off: connection errors and 429, 502, 503, 504, which say nothing of the request; a 500
once. Never: 4xx, and a request that ran into its time limit, which would only run into it again.
"""

import asyncio
import time
from typing import Any

import aiohttp
import tenacity

from ..errors import RequestError, ServerGoneError

MAX_ATTEMPTS = 4
GET_TIMEOUT_S = 10.0
_PASSING = frozenset({429, 502, 503, 504})


class Http:
    """Requests to `base_url`. Close it from the event loop that used it.

    Args:
        base_url: such as `http://localhost:8000`, without a slash at its end.
        timeout_s: seconds that one attempt may take.
    """

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        self.base_url = base_url
        self._timeout_s = timeout_s
        # Concurrency is the rollout's to limit; a limit here would count waiting for a connection as server time.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0),
        )

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and decoded body (text where it is no JSON), in one attempt.

        Raises:
            aiohttp.ClientError, TimeoutError: no answer.
        """
        limit = aiohttp.ClientTimeout(total=min(GET_TIMEOUT_S, self._timeout_s))
        async with self._session.get(self.base_url + path, timeout=limit) as response:
            return response.status, await _body(response)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The decoded answer to a POST.

        Raises:
            RequestError: refused (4xx), failed in the server (500), or not answered within `timeout_s`.
            ServerGoneError: the server cannot be reached.
        """
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(MAX_ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=8.0),
            retry=tenacity.retry_if_exception(_is_passing),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._attempt(path, body, attempt.retry_state.attempt_number)
        except aiohttp.ClientError as cause:
            raise ServerGoneError(
                f"The server at {self.base_url} cannot be reached ({type(cause).__name__}: {cause}) after "
                f"{MAX_ATTEMPTS} attempts at {path}. Check that it is running; its log says why if it died."
            ) from cause
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _attempt(self, path: str, body: dict[str, Any], number: int) -> Any:
        started = time.monotonic()
        try:
            async with self._session.post(self.base_url + path, json=body) as response:
                answer = await _body(response)
        except aiohttp.ConnectionTimeoutError:  # a TimeoutError too, but of a host that is not there
            raise
        except TimeoutError as cause:
            raise RequestError(
                f"{self.base_url}{path} did not answer within {time.monotonic() - started:.1f} s "
                f"(request_timeout_s={self._timeout_s:g}). Raise request_timeout_s if generations take "
                "that long; the server's log says if it hangs."
            ) from cause
        broken = response.status == 200 and isinstance(answer, str)
        if response.status == 200 and not broken:
            return answer
        what = "a broken body" if broken else str(response.status)
        error = RequestError(f"{self.base_url}{path} answered {what}: {_message(answer)}")
        error.status = response.status
        passing = broken or response.status in _PASSING or (response.status == 500 and number == 1)
        raise _Passing(error) if passing and number < MAX_ATTEMPTS else error

    async def close(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # lets the transports close


class _Passing(Exception):
    """An answer that another attempt may change."""


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, _Passing | aiohttp.ClientError)


async def _body(response: aiohttp.ClientResponse) -> Any:
    try:
        return await response.json(content_type=None)
    except ValueError:
        return await response.text(errors="replace")


def _message(answer: Any) -> str:
    """The server's own words."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        answer = error.get("message", error) if isinstance(error, dict) else error
    return str(answer)[:1000]
