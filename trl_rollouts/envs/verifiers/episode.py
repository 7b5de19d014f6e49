"""verifiers' episode, and the model that it takes us for: all of it runs in verifiers' thread.

An episode is asked for (`begin`), answered turn by turn (`answer`), cut where a limit of ours ends it (`cut`), and in
any case ended. What its agent asks of its model waits in a queue until the rollout's model has answered.

Not here: from one thread to the other.
"""

import asyncio
import copy
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ...env import StepResult
from ...errors import EnvError
from ...trajectory import Message
from .parts import MODEL, agents_of, message_from, part, response_of, take_over, task_of


@dataclass(eq=False, slots=True)
class _Request:
    """A turn that verifiers asks of its model."""

    turn: Any
    reply: "asyncio.Future[Any]"

    @property
    def tools(self) -> list[Any]:
        return [part("clients.train").tool_to_wire(tool) for tool in self.turn.tools]


class Episode:
    """verifiers' episode, and the model that it takes us for: all of it in verifiers' thread."""

    def __init__(self, shared: "Shared") -> None:
        self._shared = shared
        self._playing: asyncio.Task[Any] | None = None
        self._asked: asyncio.Queue[_Request | Exception | None] = asyncio.Queue()
        """What the episode asks of its model; None at its end."""
        self._request: _Request | None = None
        """The one that waits for an answer."""
        self._traces: list[Any] = []
        self._interception: Any = None
        """The environment's own."""
        self._num_seen = 0
        """Messages that the model has seen, its own included."""
        self._is_over = False

    async def begin(self, row: Any) -> tuple[list[Message], list[Any]]:
        """The opening messages, and the tools."""
        task = task_of(row, self._shared.env)
        if self._is_over:
            raise EnvError("the episode was closed before it began.")
        self._playing = asyncio.create_task(self._play(task))
        self._playing.add_done_callback(lambda _: self._asked.put_nowait(None))
        if (request := await self._next()) is None:
            raise EnvError(f"the episode ended before it asked its model anything: {self._ended_by()}")
        self._num_seen = len(request.turn.prompt)
        return [message_from(message) for message in request.turn.prompt], request.tools

    async def answer(self, action: Message) -> StepResult:
        """Hand over the model's turn, and wait for what follows it."""
        if self._request is None or self._is_over:
            raise EnvError("the episode is over.")
        last, self._request = self._request, None
        if not last.reply.done():  # else a time limit of its own has passed meanwhile
            last.reply.set_result(response_of(action))
        request = await self._next()
        if request is None:
            self._is_over = True
            trace, reward = self._scored()
            is_cut = bool(trace.is_truncated or trace.is_timeout)
            return StepResult(reward=reward, terminated=not is_cut, truncated=is_cut, info=_info(trace))
        return StepResult(self._new_messages(request, last))

    async def cut(self) -> float:
        """The reward of an episode that does not go on; 0.0 of one that has given it."""
        if self._is_over:
            return 0.0
        self._is_over = True
        for trace in self._traces:
            trace.stop("max_turns")
        while self._request is not None or await self._next() is not None:
            self._refuse()
        return self._scored()[1]

    def end(self) -> None:
        """Stop it, wherever it is."""
        self._is_over = True
        if self._playing is not None:
            self._playing.cancel()

    async def ended(self) -> None:
        """Wait until it holds nothing."""
        if self._playing is not None:
            await asyncio.wait({self._playing})
            if not self._playing.cancelled():
                self._playing.exception()  # has been told, where anybody asked

    # What verifiers calls

    async def get_response(self, dialect: Any, body: Any, sampling: Any, *, turn: Any, **options: Any) -> Any:
        """As of a `Client`."""
        if not isinstance(dialect, part("dialects.chat").ChatDialect):
            error = EnvError(f"its harness speaks {type(dialect).__name__}, and is answered in chat completions only.")
            self._asked.put_nowait(error)
            raise error
        request = _Request(turn, asyncio.get_running_loop().create_future())
        self._asked.put_nowait(request)
        response = await request.reply
        response.raw = part("clients.train").serialize_completion(response, MODEL)
        return response

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        """As of an `Interception`: the environment's own, with us for the model."""
        async with self._interception.acquire(session) as slot:
            session.client = self
            yield slot

    async def _play(self, task: Any) -> Any:
        vf = part()
        client = vf.TrainClientConfig(base_url="http://127.0.0.1", api_key_var="NONE")  # of which nothing is asked
        async with self._shared.served() as served:
            env = copy.copy(served)
            env.setup = functools.partial(self._set_up, env.setup)
            return await env.run_episode(task, vf.ModelContext(MODEL, client), on_trace=self._note)

    async def _set_up(self, own: Any, agents: Any) -> None:
        """The environment's own hook, and then ours."""
        await own(agents)
        policy = getattr(agents, self._shared.policy)
        self._interception, policy.interception = policy.interception, self
        for name in agents_of(self._shared.env.config):
            take_over(getattr(agents, name))

    def _note(self, trace: Any) -> None:
        if trace.agent.name == self._shared.policy:
            self._traces.append(trace)

    # What we make of it

    async def _next(self) -> _Request | None:
        """The next request, or None at the end."""
        asked = await self._asked.get()
        if isinstance(asked, Exception):
            raise asked
        self._request = asked
        return asked

    def _new_messages(self, request: _Request, last: _Request) -> list[Message]:
        """What stands behind the conversation so far, which is the only place where anything new may stand."""
        if request.tools != last.tools:
            raise EnvError("the model's tools change on the way, and its prompt already shows them.")
        prompt, tail = request.turn.prompt, request.turn.tail
        num_known, num_seen = len(prompt) - len(tail), self._num_seen + 1
        if num_known != num_seen or any(message.role == "assistant" for message in tail):
            raise EnvError(
                f"the conversation does not go on from its {num_seen} messages: of the next {len(prompt)} the first "
                f"{num_known} are known. One that is rewritten or begun anew cannot be one trajectory."
            )
        self._check_words()
        self._num_seen = len(prompt)
        return [message_from(message) for message in tail]

    def _refuse(self) -> None:
        """As verifiers refuses a turn beyond a limit."""
        assert self._request is not None
        if not self._request.reply.done():
            error = part("errors").ProviderError("no further turn is sampled", status_code=400)
            self._request.reply.set_exception(error)
        self._request = None

    def _check_words(self) -> None:
        if any(trace.response_rewrites for trace in self._traces):
            raise EnvError("the task rewrites what the model wrote (@vf.intercept), which then was not sampled.")

    def _scored(self) -> tuple[Any, float]:
        """The trace and its reward."""
        self._check_words()
        if not self._outcome().ok or len(self._traces) != 1:
            raise EnvError(f"the episode cannot be scored: {self._ended_by()}")
        trace = self._traces[0]
        if not trace.rewards or None in trace.rewards.values():
            raise EnvError(f"the episode, ended by {trace.stop_condition}, has no reward: {trace.rewards!r:.200}")
        return trace, float(trace.reward)

    def _ended_by(self) -> str:
        records = [*self._traces, self._outcome()]
        if errors := [error for record in records for error in record.errors]:
            return f"{errors[-1].type}: {errors[-1].message}"
        ends = [trace.stop_condition for trace in self._traces]
        return f"its agent {self._shared.policy!r} has played {len(ends)} times rather than once, ended by {ends}"

    def _outcome(self) -> Any:
        """verifiers' record of the whole episode."""
        assert self._playing is not None
        try:
            return self._playing.result()
        except (SystemExit, KeyboardInterrupt) as cause:
            raise EnvError(f"the environment's code exits: {type(cause).__name__}: {cause}") from cause


class Shared:
    """An environment for all its episodes, and its servers, which are up while one of them plays."""

    def __init__(self, env: Any, policy: str) -> None:
        self.env, self.policy = env, policy
        self._num_users = 0
        self._serving: Any = None
        self._up: Any = None
        self._unused = asyncio.Event()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Any]:
        if not self._num_users:
            self._up, self._unused = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._serving = asyncio.create_task(_serve(copy.copy(self.env), self._up, self._unused))
        self._num_users += 1
        try:
            yield await asyncio.shield(self._up)
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._unused.set()
                await asyncio.wait({self._serving})


async def _serve(env: Any, up: "asyncio.Future[Any]", unused: asyncio.Event) -> None:
    """In a task of its own, since what a task enters it also has to leave."""
    try:
        async with env.serving():
            up.set_result(env)
            await unused.wait()
    except BaseException as error:
        if up.done():
            raise
        up.set_exception(EnvError(f"its servers did not come up: {type(error).__name__}: {error}"))


def _info(trace: Any) -> dict[str, Any]:
    """What verifiers says about it."""
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    said = {"rewards": rewards, "metrics": dict(trace.metrics), "stop_condition": trace.stop_condition}
    return {"verifiers": said}
