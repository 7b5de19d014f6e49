"""One or several servers of one model as one client: each request goes to the server with the fewest under way.

A server that is gone gets no more requests, and those that it had go on at another one, or wait for the first to come
back (`member`). A completion counts only while its server does: nothing that another process has sampled gets in.

A call of the rollout begins with `roll_call` and ends with `rest`. Only between the two are servers looked for and
weights restored, so that this never meets the trainer's own sync.
"""

import asyncio
import time
from collections.abc import Sequence

from ..errors import RolloutError, ServerError, ServerGoneError, is_data
from ..sampling import Sampling
from ..trajectory import Completion
from .member import Member, Reach, Restore, first_reached

MAX_LOSSES = 5
"""Servers that one request may lose. One that kills its server would kill each in turn, and each restart."""


class PoolClient:
    """Clients of servers that serve the same weights.

    Args:
        base_urls: their addresses.
        reach: see `Member`.
        restore: see `Member`.
        wait_s: how long a request waits for a server where none is left.
    """

    def __init__(self, base_urls: Sequence[str], reach: Reach, restore: Restore | None, *, wait_s: float) -> None:
        self._members = [Member(base_url, reach, restore) for base_url in base_urls]
        self._is_final = restore is None
        self._wait_s = wait_s

    @property
    def max_model_len(self) -> int | None:
        """The smallest, of those that tell."""
        return min((m.max_model_len for m in self._members if m.max_model_len is not None), default=None)

    async def join(self) -> None:
        """Connect to all. Raises what `reach` raises."""
        for member in self._members:
            await member.join()

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        num_losses = 0
        while num_losses < MAX_LOSSES:
            member = await self._least_busy()
            client = member.client
            assert client is not None
            member.in_flight += 1
            try:
                completion = await client.generate(token_ids, sampling)
                if member.client is client:
                    return completion
            except ServerGoneError as error:
                member.lose(client, error)
                num_losses += 1
            finally:
                member.in_flight -= 1
        raise ServerError(
            f"{MAX_LOSSES} servers were lost with a request of {len(token_ids)} tokens, max_tokens="
            f"{sampling.max_tokens}. Their logs say why; it may be that this request kills them."
        )

    async def roll_call(self) -> None:
        """Begin a call of the rollout: at least one server is there, and no restore is under way.

        Raises:
            ServerError: none is, or nothing can bring weights to it.
        """
        await asyncio.gather(*(member.settle() for member in self._members))
        await asyncio.gather(*(member.look() for member in self._members))
        if any(member.is_reached for member in self._members):
            return
        started = time.monotonic()
        if self._is_final or not await first_reached(self._members):
            raise self._none_is_left(time.monotonic() - started)

    async def lose(self, base_urls: Sequence[str]) -> None:
        """The trainer's new weights did not reach these: they count as gone until they do."""
        for member in self._members:
            if member.base_url in base_urls:
                member.miss(ServerGoneError(f"The server at {member.base_url} did not get the new weights."))

    async def rest(self) -> list[str]:
        """End a call of the rollout: the addresses of servers that were restarted within it, without being missed."""
        await asyncio.gather(*(member.stop_seeking() for member in self._members))
        await asyncio.gather(*(member.forget() for member in self._members))
        there = [member for member in self._members if member.client is not None]
        others = await asyncio.gather(*(member.is_another() for member in there), return_exceptions=True)
        return [member.base_url for member, is_other in zip(there, others, strict=True) if is_other is True]

    def absence(self) -> RolloutError | None:
        """What to raise where nothing came of a call for want of a server; None if one is there."""
        return None if any(member.client for member in self._members) else self._none_is_left()

    async def close(self) -> None:
        for member in self._members:
            await member.close()

    async def _least_busy(self) -> Member:
        started = time.monotonic()
        while True:
            for member in self._members:
                member.seek()
            if there := [member for member in self._members if member.client is not None]:
                return min(there, key=lambda member: member.in_flight)
            searches = [member.search for member in self._members if member.search is not None]
            waited_s = time.monotonic() - started
            if not searches or waited_s >= self._wait_s:
                raise self._none_is_left(waited_s)
            await asyncio.wait(searches, timeout=self._wait_s - waited_s, return_when=asyncio.FIRST_COMPLETED)

    def _none_is_left(self, waited_s: float | None = None) -> RolloutError:
        """What to raise, behind the reason why a server is gone."""
        loss = next(member.loss for member in self._members if member.loss is not None)
        if self._is_final:
            hint = (
                "Nothing here brings the trainer's weights to a server that is started anew: start the training "
                "again from its last checkpoint."
            )
        elif isinstance(loss, ServerGoneError):
            waited = "in time" if waited_s is None else f"within {waited_s:.0f} s"
            hint = f"It did not come back {waited} (GRPOConfig.vllm_server_timeout={self._wait_s:g})."
        else:
            hint = "No other server is left."
        error = (ServerError if is_data(loss) else type(loss))(f"{loss} {hint}")
        error.__cause__ = loss
        return error
