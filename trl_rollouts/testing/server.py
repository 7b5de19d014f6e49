"""A server on loopback that answers as vLLM's or TRL's would, over scripted completions, and fails on demand.

    with FakeServer(["<tool_call>...</tool_call>", "The answer is 51."]) as server:
        tool_rollout([multiply], base_url=server.base_url)(prompts, fake_trainer(byte_tokenizer()))
    assert len(server.prompts) == 2

It is a real HTTP server in a thread of its own, so that clients, retries, time limits and dropped connections are
exercised as they are in a run; only the model is missing. Prompts that come as text get the likeliest token and use
neither the script nor a listed fault: that is how clients prove a server before they send it a trajectory.

Everything is bounded: stopping drops what is open, whoever waits for it.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Literal, Self

from aiohttp import web

from . import sending
from .dialect import Answer, Bricked, Dialect, Refusal, Route
from .faults import Fault, Restart
from .model import FakeModel, Replies
from .trl_dialect import TRLDialect
from .vllm_dialect import VLLMDialect

_STOP_S = 10.0

Faults = Callable[[Any], Fault | None] | Iterable[Fault | None]
"""A function of a generate request's body, or one entry a request in order of arrival; None, and what follows the last
entry, is no fault."""


class FakeServer:
    """A context manager; also `start`, `stop` and `restart` by hand.

    Args:
        replies: the script, see `Reply`. A function is called in the server's thread and must not block.
        tokenizer: encodes replies and says the vocabulary; a `byte_tokenizer()` if None.
        protocol: "vllm" for `vllm serve`, "trl" for the server of TRL <= 1.10, which serves one request at a time and
            hangs for ever after an over-long prompt.
        model: the name under which it serves.
        max_model_len: tokens of prompt and completion together.
        logprobs_mode: before or after temperature; vLLM's own default is raw.
        dev_mode: whether vLLM's development endpoints exist (weights, prefix cache, server information).
        faults: what goes wrong, see `trl_rollouts.testing.faults`.
    """

    def __init__(
        self,
        replies: Replies,
        *,
        tokenizer: Any = None,
        protocol: Literal["vllm", "trl"] = "vllm",
        model: str = "fake",
        max_model_len: int = 4096,
        logprobs_mode: Literal["processed_logprobs", "raw_logprobs"] = "processed_logprobs",
        dev_mode: bool = True,
        faults: Faults = (),
    ) -> None:
        self._model = FakeModel(replies, tokenizer, raw_logprobs=logprobs_mode == "raw_logprobs")
        self._dialect: Dialect
        if protocol == "vllm":
            self._dialect = VLLMDialect(
                self._model, name=model, max_model_len=max_model_len, logprobs_mode=logprobs_mode, dev_mode=dev_mode
            )
        elif protocol == "trl":
            self._dialect = TRLDialect(self._model, max_model_len=max_model_len)
        else:
            raise ValueError(f"protocol is {protocol!r}; it is 'vllm' or 'trl'.")
        self._faults = faults if callable(faults) else iter(faults)
        self.requests: list[tuple[str, Any]] = []
        """Path and decoded body (None without one) of every request, in order of arrival."""
        self.errors: list[Exception] = []
        """What the script or a fault raised, answered with 400. Leaving the `with` block raises the first."""
        self.max_in_flight = 0
        """Most generate requests that had arrived and not been answered at one moment."""
        self.served_at_once = 0
        """Most generate requests that were worked on at one moment: never above 1 with "trl"."""
        self._in_flight = self._port = 0
        self._thread: threading.Thread | None = None
        self._restarter: threading.Thread | None = None
        """Of the last `Restart`: a server cannot stop and start itself from its own thread."""
        self._stays_down = threading.Event()

    @property
    def base_url(self) -> str:
        """The address, the same after a restart."""
        if not self._port:
            raise RuntimeError("The server has no address before its first start: use `with FakeServer(...)`.")
        return f"http://127.0.0.1:{self._port}"

    @property
    def prompts(self) -> list[list[int]]:
        """The prompts that came as token ids, in order of arrival."""
        return [ids for body in self.bodies(self._dialect.generate_path) for ids in self._dialect.prompts(body)]

    def bodies(self, path: str) -> list[Any]:
        """The bodies that were sent to `path`, in order of arrival."""
        return [body for requested, body in self.requests if requested == path]

    def logprob(self, token_id: int, temperature: float = 1.0) -> float:
        """The logprob that the server reports for `token_id`, whatever the context."""
        return self._model.logprob(token_id, temperature)

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError(f"The server runs already, at {self.base_url}.")
        self._dialect.num_starts += 1
        started: Future[int] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="FakeServer", daemon=True
        )
        self._thread.start()
        try:
            self._port = started.result(_STOP_S)
        except BaseException:
            self._thread = None
            raise

    def stop(self) -> None:
        """Drop every connection and end, as a killed server does. The script and the records stay."""
        if self._restarter is not None:
            self._stays_down.set()
            self._restarter.join(3 * _STOP_S)
            self._stays_down.clear()
        self._stop()

    def _stop(self) -> None:
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise RuntimeError(f"The server did not stop within {_STOP_S:g} s: its script blocks in a reply.")
        self._thread = None

    def restart(self) -> None:
        """Stop, and listen at the same address again."""
        self.stop()
        self.start()

    def _begin_restart(self, down_s: float) -> None:
        """Stop, and start again after a while. Of several at a time the first one counts."""

        def restart() -> None:
            self._stop()
            if not self._stays_down.wait(down_s):
                self.start()

        if self._restarter is None or not self._restarter.is_alive():
            self._restarter = threading.Thread(target=restart, name="FakeServer:restart", daemon=True)
            self._restarter.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if error is None and self.errors:
            raise self.errors[0]

    async def _serve(self, started: "Future[int]") -> None:
        # What belongs to a loop is made here, anew for each start.
        self._loop, self._stopping, self._turn = asyncio.get_running_loop(), asyncio.Event(), asyncio.Lock()
        self._in_flight = self._dialect.num_running = 0
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.01,  # 0 would mean without a limit
            handler_cancellation=not self._dialect.is_serial,  # vLLM aborts a request whose client has gone
        )
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", self._port, reuse_address=True)
            await site.start()
            started.set_result(runner.addresses[0][1])
            await self._stopping.wait()
            await site.stop()
            assert runner.server is not None
            for connection in runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
        except OSError as error:
            started.set_exception(error)
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        try:
            body = json.loads(text) if text else None
        except ValueError:
            body = text
        self.requests.append((request.path, body))
        try:
            route = self._route(request)
            if isinstance(route, web.Response):
                return route
            if request.method == "POST" and isinstance(body, str):
                raise self._dialect.not_json()
            if request.path == self._dialect.generate_path:
                return await self._generate(request, body)
            async with self._its_turn():
                return sending.whole(route(body or {}, request.query))
        except Refusal as refusal:
            return web.json_response(refusal.body, status=refusal.status)
        except Exception as error:  # the script's, a fault's, or a body like no client's
            self.errors.append(error)
            message = f"FakeServer: {type(error).__name__}: {error}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)

    def _route(self, request: web.Request) -> Route | web.Response:
        """Who answers, or the web framework's own answer."""
        routes, path = self._dialect.routes, request.path
        if (request.method, path) in routes:
            return routes[request.method, path]
        paths = {known: method for method, known in routes}
        if path in paths:
            return web.json_response({"detail": "Method Not Allowed"}, status=405, headers={"Allow": paths[path]})
        other = path.rstrip("/") if path.endswith("/") else path + "/"
        if other in paths:
            return web.Response(status=307, headers={"Location": str(request.url.with_path(other))})
        return web.json_response({"detail": "Not Found"}, status=404)

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        try:
            fault = self._fault(body or {})
            async with self._its_turn():
                self._dialect.num_running += 1
                self.served_at_once = max(self.served_at_once, self._dialect.num_running)
                try:
                    return await self._answer(request, body or {}, fault)
                finally:
                    self._dialect.num_running -= 1
        finally:
            self._in_flight -= 1

    def _fault(self, body: Any) -> Fault | None:
        if callable(self._faults):
            return self._faults(body)
        return next(self._faults, None) if self._dialect.prompts(body) else None

    async def _answer(self, request: web.Request, body: Any, fault: Fault | None) -> web.StreamResponse:
        if isinstance(fault, Restart):
            self._begin_restart(fault.down_s)
        if isinstance(fault, sending.Instead):
            return await sending.instead(fault, request)
        answer = await self._sampled(request, body)
        if isinstance(fault, sending.OnTheWire):
            return await sending.spoiled(fault, answer, request)
        if fault is not None:
            fault.spoil(answer.body)
        return sending.whole(answer)

    async def _sampled(self, request: web.Request, body: Any) -> Answer:
        try:
            answer = self._dialect.routes["POST", self._dialect.generate_path](body, request.query)
        except Bricked:
            await sending.for_ever()
        await asyncio.sleep(answer.delay_s)
        return answer

    @contextlib.asynccontextmanager
    async def _its_turn(self) -> AsyncIterator[None]:
        async with self._turn if self._dialect.is_serial else contextlib.nullcontext():
            yield
