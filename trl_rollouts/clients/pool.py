"""One or several servers of one model as one client: each request goes to the server with the fewest under way.

A server that is gone gets no more requests, and those that it had go on at another one. Meanwhile it is looked for.
Once it answers again it is proved as at the beginning, gets the trainer's weights, and takes its share. Where none is
left, requests wait for the first to come back: a trajectory loses nothing but time.

A call of the rollout begins with `roll_call` and ends with `rest`. Only between the two are weights restored, so that
this never meets the trainer's own sync. That a server was restarted shows in the start of its process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from ..errors import RolloutError, ServerGoneError
from ..sampling import Sampling
from ..trajectory import Completion
from . import ServerClient

logger = logging.getLogger(__name__)

Reach = Callable[[str], Awaitable[ServerClient]]

SEARCH_S = 1.0
"""Between two attempts to find a server that is gone, beside what `reach` itself waits."""


@dataclass(eq=False, slots=True)
class _Member:
    """One server."""

    base_url: str
    client: ServerClient | None = None
    """None while it is gone."""
    instance: str | None = None
    found: ServerClient | None = None
    """It is there again and proved, but its weights are not the trainer's."""
    loss: RolloutError | None = None
    """Why it is gone."""
    search: asyncio.Task[None] | None = None
    in_flight: int = 0


class PoolClient:
    """Clients of servers that serve the same weights.

    Args:
        reach: connects to an address, and proves what answers there; it waits for a server that is still starting.
        restore: brings the trainer's weights to an address; it may block. None: a server that is gone stays away.
        wait_s: how long a request waits for a server where none is left.
    """

    def __init__(self, reach: Reach, restore: Callable[[str], None] | None, *, wait_s: float) -> None:
        self._reach, self._restore, self._wait_s = reach, restore, wait_s
        self._members: list[_Member] = []
        self._left: list[ServerClient] = []
        """Clients of processes that are gone: requests may still be ending on them."""

    @property
    def max_model_len(self) -> int | None:
        """The smallest, of those that tell."""
        clients = [member.client or member.found for member in self._members]
        lengths = [client.max_model_len for client in clients if client is not None]
        return min((length for length in lengths if length is not None), default=None)

    async def add(self, base_url: str) -> None:
        """Raises what `reach` raises."""
        client = await self._reach(base_url)
        self._members.append(_Member(base_url, client))
        self._members[-1].instance = await _instance(client)

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        while True:
            member = await self._least_busy()
            client = member.client
            assert client is not None
            member.in_flight += 1
            try:
                return await client.generate(token_ids, sampling)
            except ServerGoneError as error:
                self._lose(member, client, error)
            finally:
                member.in_flight -= 1

    async def roll_call(self) -> None:
        """Begin a call of the rollout: at least one server is there.

        Raises:
            ServerError: none is, or nothing can bring weights to it.
        """
        for member in self._members:
            await self._look_at(member)
        if any(member.client or member.found for member in self._members):
            return
        if self._restore is None:
            raise self._none_is_left()
        searches = [asyncio.create_task(self._find(member)) for member in self._members]
        try:
            for search in asyncio.as_completed(searches):
                with suppress(ServerGoneError):
                    await search
                    return
            raise self._none_is_left()
        finally:
            await _cancelled(searches)

    async def rest(self) -> list[str]:
        """End a call of the rollout: the addresses of servers that were restarted within it, without being missed."""
        await _cancelled([member.search for member in self._members if member.search is not None])
        restarted = []
        for member in self._members:
            member.search = None
            with suppress(ServerGoneError):
                if await self._was_restarted(member):
                    restarted.append(member.base_url)
        for client in self._left:
            await client.close()
        self._left.clear()
        return restarted

    async def close(self) -> None:
        for member in self._members:
            if member.search is not None:
                member.search.cancel()
        for client in [*self._left, *(client for member in self._members for client in (member.client, member.found))]:
            if client is not None:
                await client.close()

    async def _least_busy(self) -> _Member:
        deadline = asyncio.get_running_loop().time() + self._wait_s
        while True:
            self._look_for_lost()
            if there := [member for member in self._members if member.client is not None]:
                return min(there, key=lambda member: member.in_flight)
            searches = [member.search for member in self._members if member.search and not member.search.done()]
            left_s = deadline - asyncio.get_running_loop().time()
            if not searches or left_s <= 0:
                raise self._none_is_left()
            await asyncio.wait(searches, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)

    def _lose(self, member: _Member, client: ServerClient, error: RolloutError) -> None:
        """Its other requests find out by themselves; the first to do so begins the search."""
        if member.client is client:
            logger.warning("%s", error)
            member.client, member.loss = None, error
            self._left.append(client)

    def _look_for_lost(self) -> None:
        for member in self._members:
            if self._restore is not None and member.client is None and member.search is None:
                member.search = asyncio.create_task(self._bring_back(member))

    async def _bring_back(self, member: _Member) -> None:
        """Until it is back with the trainer's weights, or what is there will not do."""
        try:
            while member.found is None:
                with suppress(ServerGoneError):
                    await self._find(member)
                    break
                await asyncio.sleep(SEARCH_S)
            await self._restored(member.base_url)
        except RolloutError as error:
            logger.error("The server at %s cannot be used any more: %s", member.base_url, error)
            member.loss = error
            return
        member.client, member.found, member.loss, member.search = member.found, None, None, None
        logger.warning("The server at %s is back, with the trainer's weights.", member.base_url)

    async def _find(self, member: _Member) -> None:
        client = await self._reach(member.base_url)
        try:
            member.instance = await _instance(client)
        except BaseException:
            await client.close()
            raise
        member.found = client

    async def _restored(self, base_url: str) -> None:
        assert self._restore is not None
        restoring = asyncio.ensure_future(asyncio.to_thread(self._restore, base_url))
        try:
            await asyncio.shield(restoring)
        except asyncio.CancelledError:
            await asyncio.wait([restoring])  # the trainer's sync must not meet it
            raise

    async def _look_at(self, member: _Member) -> None:
        """Whether it is still there, and the process that it was."""
        try:
            if await self._was_restarted(member):
                raise ServerGoneError(f"The server at {member.base_url} was restarted since the last call.")
        except ServerGoneError as error:
            assert member.client is not None
            self._left.append(member.client)
            member.client, member.loss = None, error

    async def _was_restarted(self, member: _Member) -> bool:
        instance = None if member.client is None else await _instance(member.client)
        return None not in (instance, member.instance) and instance != member.instance

    def _none_is_left(self) -> RolloutError:
        loss = next(member.loss for member in self._members if member.loss is not None)
        if not isinstance(loss, ServerGoneError):
            return type(loss)(str(loss))
        hint = (
            "Nothing here brings the trainer's weights to a server that is started anew: start the training again "
            "from its last checkpoint."
            if self._restore is None
            else f"It did not come back within {self._wait_s:g} s (GRPOConfig.vllm_server_timeout)."
        )
        error = ServerGoneError(f"{loss} {hint}")
        error.__cause__ = loss
        return error


async def _cancelled(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _instance(client: ServerClient) -> str | None:
    try:
        return await client.instance()
    except TimeoutError:  # busy, perhaps; requests have a limit of their own
        return None
    except aiohttp.ClientError as error:
        raise ServerGoneError(
            f"The server at {client.base_url} cannot be reached ({type(error).__name__}: {error})."
        ) from error
