"""One server of a pool: there, or gone and looked for.

It is gone once a request finds it so, or another process answers at its address: the start of the process tells, where
the server tells that. A server that is found again is proved as at the beginning and gets the trainer's weights before
it counts as there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from ..errors import RequestError, RolloutError, ServerGoneError, WeightSyncError, boundary
from ..worker import call
from . import ServerClient

logger = logging.getLogger(__name__)

Reach = Callable[[str], Awaitable[ServerClient]]
Restore = Callable[[str], None]

SEARCH_S = 1.0
"""Between two attempts to find a server that is gone, beside what `reach` itself waits."""


class Member:
    """One server.

    Args:
        base_url: its address.
        reach: connects to an address, and proves what answers there; it waits for a server that is still starting.
        restore: brings the trainer's weights to an address; it may block. None: a server that is gone stays away.
    """

    def __init__(self, base_url: str, reach: Reach, restore: Restore | None) -> None:
        self.base_url, self._reach, self._restore = base_url, reach, restore
        self.client: ServerClient | None = None
        """None while it is gone."""
        self.max_model_len: int | None = None
        """Also while it is gone: the last that was told."""
        self.loss: RolloutError | None = None
        """Why it is gone."""
        self.in_flight = 0
        self._found: ServerClient | None = None
        """It is there and proved, but its weights may not be the trainer's."""
        self._instance: str | None = None
        self._loaded: str | None = None
        """The process that has the trainer's weights, if it is known which."""
        self._search: asyncio.Task[None] | None = None
        self._restoring: asyncio.Future[None] | None = None
        self._left: list[ServerClient] = []
        """Clients of processes that are gone: requests may still be ending on them."""

    async def join(self) -> None:
        """Connect for the first time, before the trainer's weights are brought. Raises what `reach` raises."""
        await self.find()
        self.client, self._found, self._loaded = self._found, None, self._instance

    @property
    def is_reached(self) -> bool:
        """Whether something that will do answers, with the trainer's weights or without."""
        return self.client is not None or self._found is not None

    @property
    def search(self) -> "asyncio.Task[None] | None":
        """While it is looked for."""
        return self._search if self._search is not None and not self._search.done() else None

    def lose(self, client: ServerClient | None, error: RolloutError) -> None:
        """`client` has found it gone. Other requests on it find out by themselves."""
        if client is not None and client in (self.client, self._found):
            logger.warning("%s", error)
            self._left.append(client)
            self.client, self._found, self.loss = None, None, error

    def seek(self) -> None:
        """Begin to look for it, if it is gone and has not turned out to be of no use since the call began."""
        if self.client is None and self._restore is not None and self._search is None:
            self._search = asyncio.create_task(self._bring_back())

    async def stop_seeking(self) -> None:
        """A restore that is under way goes on: see `settle`."""
        search, self._search = self._search, None
        if search is not None:
            search.cancel()
            await asyncio.gather(search, return_exceptions=True)

    async def settle(self) -> None:
        """Wait for a restore that is under way: the trainer's sync must not meet it."""
        if self._restoring is not None:
            await asyncio.wait([self._restoring])

    async def is_another(self) -> bool:
        """Whether the process that answers is not the one that was proved.

        Raises:
            ServerGoneError: none answers.
        """
        client = self.client or self._found
        instance = None if client is None else await _instance(client)
        return None not in (instance, self._instance) and instance != self._instance

    async def look(self) -> None:
        """Before a call of the rollout: is it still there, and the process that it was?"""
        try:
            if await self.is_another():
                raise ServerGoneError(f"The server at {self.base_url} was restarted since the last call.")
        except ServerGoneError as error:
            self.lose(self.client or self._found, error)
        if self.client is None:
            self._loaded = None  # new ones may be on their way

    def miss(self, error: RolloutError) -> None:
        """It did not get the trainer's new weights."""
        self.lose(self.client, error)
        self._loaded = None

    async def find(self) -> None:
        """Reach it, whatever its weights. Raises what `reach` raises."""
        client = await self._reach(self.base_url)
        try:
            self._instance = await _instance(client)
        except BaseException:
            await client.close()
            raise
        self._found, self.max_model_len = client, client.max_model_len

    async def forget(self) -> None:
        """Close the clients of processes that are gone."""
        left, self._left = self._left, []
        for client in left:
            await client.close()

    async def close(self) -> None:
        await self.stop_seeking()
        for client in (self.client, self._found):
            if client is not None:
                await client.close()
        await self.forget()

    async def _bring_back(self) -> None:
        """Until it is back with the trainer's weights, or what is there will not do."""
        while self.client is None:
            try:
                if self._found is None:
                    await self.find()
                found = self._found
                if self._instance is None or self._instance != self._loaded:
                    await self._restored()
                    self._loaded = self._instance
                self.client, self._found, self.loss = found, None, None
            except RolloutError as error:
                if not _may_pass(error):
                    logger.error("The server at %s cannot be used any more: %s", self.base_url, error)
                    self.loss = error
                    return
                self.lose(self._found, error)
                await asyncio.sleep(SEARCH_S)
        self._search = None
        logger.warning("The server at %s is back.", self.base_url)

    async def _restored(self) -> None:
        assert self._restore is not None
        await self.settle()
        self._restoring = asyncio.ensure_future(call(self._restore, self.base_url))
        self._restoring.add_done_callback(lambda restoring: restoring.cancelled() or restoring.exception())
        with boundary(WeightSyncError, f"The weights could not be brought to {self.base_url}"):
            await asyncio.shield(self._restoring)


async def first_reached(members: Sequence[Member]) -> bool:
    """Look for all of them until one is reached, whatever its weights; as long as `reach` waits."""
    searches = [asyncio.create_task(member.find()) for member in members]
    try:
        for search in asyncio.as_completed(searches):
            try:
                await search
                return True
            except RolloutError as error:
                if not _may_pass(error):
                    raise
        return False
    finally:
        for task in searches:
            task.cancel()
        await asyncio.gather(*searches, return_exceptions=True)


def _may_pass(error: RolloutError) -> bool:
    """Whether looking once more may find it well."""
    if isinstance(error, RequestError):
        return error.status is None or error.status == 429 or error.status >= 500
    return isinstance(error, ServerGoneError)


async def _instance(client: ServerClient) -> str | None:
    try:
        return await client.instance()
    except TimeoutError:  # busy, perhaps; requests have a limit of their own
        return None
    except aiohttp.ClientError as error:
        raise ServerGoneError(
            f"The server at {client.base_url} cannot be reached ({type(error).__name__}: {error})."
        ) from error
