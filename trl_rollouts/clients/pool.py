"""Several servers of one model as one: each request goes to the server with the fewest under way."""

from collections.abc import Sequence

from ..sampling import Sampling
from ..trajectory import Completion
from . import Client


class PoolClient:
    """Clients of servers that serve the same weights."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = list(clients)
        self._in_flight = [0] * len(self._clients)
        lengths = [client.max_model_len for client in self._clients if client.max_model_len is not None]
        self.max_model_len = min(lengths, default=None)

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        index = min(range(len(self._clients)), key=self._in_flight.__getitem__)
        self._in_flight[index] += 1
        try:
            return await self._clients[index].generate(token_ids, sampling)
        finally:
            self._in_flight[index] -= 1

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
