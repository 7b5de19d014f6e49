"""A `Client` without a server: scripted completions, handed over in the same process."""

import asyncio
from typing import Any

from ..errors import RequestError
from ..sampling import Sampling
from ..trajectory import Completion
from .model import FakeModel, Replies


class ScriptedClient:
    """Answers from a script, as `FakeServer` does, at no cost.

    Args:
        replies: the script, see `Reply`. A function may raise what a client raises.
        tokenizer: encodes replies; a `byte_tokenizer()` if None.
        max_model_len: tokens of prompt and completion together; None for a server that does not say.
    """

    def __init__(self, replies: Replies, *, tokenizer: Any = None, max_model_len: int | None = 4096) -> None:
        self._model = FakeModel(replies, tokenizer)
        self.max_model_len = max_model_len
        self.calls: list[tuple[list[int], Sampling]] = []
        """Prompt ids and settings of every call, in order of arrival."""
        self.max_in_flight = 0
        """Most calls under way at one moment."""
        self.is_closed = False
        self._in_flight = 0

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        """The next reply.

        Raises:
            RequestError: the prompt leaves no room in `max_model_len` for `sampling.max_tokens`, as with vLLM.
        """
        self.calls.append((list(token_ids), sampling))
        if self.max_model_len is not None and len(token_ids) + sampling.max_tokens > self.max_model_len:
            raise RequestError(
                f"{len(token_ids)} prompt tokens and max_tokens={sampling.max_tokens} exceed max_model_len="
                f"{self.max_model_len}."
            )
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        try:
            sampled = self._model.sample(token_ids, sampling.body())
            await asyncio.sleep(sampled.delay_s)
        finally:
            self._in_flight -= 1
        return Completion(sampled.token_ids, sampled.logprobs, sampled.finish_reason)

    async def close(self) -> None:
        self.is_closed = True

    def logprob(self, token_id: int, temperature: float = 1.0) -> float:
        """The logprob that the client reports for `token_id`, whatever the context."""
        return self._model.logprob(token_id, temperature)
