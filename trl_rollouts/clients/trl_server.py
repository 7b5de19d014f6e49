"""TRL's own server, `trl vllm-serve` of TRL <= 1.10, and its `/generate/`.

Three things of it decide this module. It serves one request at a time, so the contexts that are ready at the same
moment travel as one request. It names no finish reason, which follows from the length and the last id. And a prompt
beyond the model's length leaves it hanging for ever (huggingface/trl#3433), so lengths must be known before anything
is sent.
"""

import asyncio
import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from ..errors import RequestError, ServerError
from ..sampling import Sampling
from ..trajectory import Completion
from .http import Http

_NAMED = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")


SETTLE_S = 0.01
"""How long contexts that become ready one after another are gathered: next to nothing beside a request for each."""


@dataclass(slots=True)
class _Request:
    token_ids: list[int]
    sampling: Sampling
    completion: asyncio.Future[Completion]


class TRLServerClient:
    """One `trl vllm-serve`.

    Args:
        http: the connection.
        eos_token_ids: ids that end a completion.
        max_model_len: the server does not tell; None leaves over-long contexts unnoticed.
    """

    def __init__(self, http: Http, *, eos_token_ids: frozenset[int], max_model_len: int | None) -> None:
        self._http = http
        self.base_url = http.base_url
        self.max_model_len = max_model_len
        self._eos_token_ids = eos_token_ids
        self._waiting: list[_Request] = []
        self._sender: asyncio.Task[None] | None = None

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        request = _Request(token_ids, sampling, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_waiting())
        return await request.completion

    async def probe(self, text: str) -> list[int]:
        """The ids that the server makes of `text`."""
        answer = await self._post([text], Sampling(max_tokens=1))
        prompt_ids: list[int] = answer["prompt_ids"][0]
        return prompt_ids

    async def instance(self) -> str | None:
        """It does not tell, and answers nothing at all while it generates."""
        return None

    async def close(self) -> None:
        if self._sender is not None:
            self._sender.cancel()
        for request in self._waiting:
            request.completion.cancel()
        await self._http.close()

    async def _send_waiting(self) -> None:
        """Send what waits, one request after the other, as long as anything does."""
        while self._waiting:
            num_waiting = 0
            while num_waiting < len(self._waiting):  # those that are about to be ready get into this request
                num_waiting = len(self._waiting)
                await asyncio.sleep(SETTLE_S)
            waiting, self._waiting = self._waiting, []
            batches: dict[str, list[_Request]] = defaultdict(list)
            for request in waiting:
                if not request.completion.done():  # else its trajectory was given up meanwhile
                    batches[repr(replace(request.sampling, max_tokens=1))].append(request)
            for batch in batches.values():
                await self._send(batch)

    async def _send(self, batch: list[_Request]) -> None:
        """One request with the largest budget; each row is cut to its own."""
        max_tokens = max(request.sampling.max_tokens for request in batch)
        sampling = replace(batch[0].sampling, max_tokens=max_tokens)
        try:
            answer = await self._post([request.token_ids for request in batch], sampling)
            completions = [
                self._completion(ids, logprobs, request.sampling)
                for request, ids, logprobs in zip(batch, answer["completion_ids"], answer["logprobs"], strict=True)
            ]
        except Exception as error:
            if len(batch) > 1 and isinstance(error, RequestError) and error.status in (400, 422, 500):
                for request in batch:  # one of them spoils it for all
                    await self._send([request])
                return
            for request in batch:
                if not request.completion.done():
                    request.completion.set_exception(_fresh(error))
            return
        except asyncio.CancelledError:
            for request in batch:
                request.completion.cancel()
            raise
        for request, completion in zip(batch, completions, strict=True):
            if not request.completion.done():
                request.completion.set_result(completion)

    async def _post(self, prompts: list[str] | list[list[int]], sampling: Sampling) -> dict[str, Any]:
        settings = sampling.body()
        body = {name: settings.pop(name) for name in _NAMED if name in settings}
        body |= {"prompts": prompts, "n": 1, "logprobs": 0, "generation_kwargs": settings}
        try:
            answer = await self._http.post("/generate/", body)
        except RequestError as error:
            if error.status is not None:
                raise
            raise RequestError(
                f"{error} This server also hangs for ever after a prompt longer than its --max_model_len: if that is "
                f"below {self.max_model_len}, restart it and set GRPOConfig.vllm_max_model_length to it."
            ) from error
        rows = (
            [answer.get(name) for name in ("prompt_ids", "completion_ids", "logprobs")]
            if isinstance(answer, dict)
            else []
        )
        if not rows or any(not isinstance(row, list) or len(row) != len(prompts) for row in rows):
            raise ServerError(f"{self.base_url}/generate/ did not answer {len(prompts)} prompts with as many rows.")
        if not isinstance(prompts[0], str) and answer["prompt_ids"] != prompts:
            raise ServerError(
                f"The server at {self.base_url} completed other prompts than it was sent. Use TRL >= 1.0."
            )
        return dict(answer)

    def _completion(self, token_ids: list[int], logprobs: list[list[float | None]], sampling: Sampling) -> Completion:
        """The first `sampling.max_tokens` ids, and why they end there."""
        if not token_ids or len(logprobs) != len(token_ids):
            raise ServerError(
                f"{self.base_url}/generate/ returned {len(token_ids)} ids and {len(logprobs)} logprobs for one "
                "completion."
            )
        num_kept = min(len(token_ids), sampling.max_tokens)
        ends = self._eos_token_ids | set(sampling.stop_token_ids)
        whole = num_kept == len(token_ids)
        stopped = whole and (token_ids[-1] in ends or num_kept < sampling.max_tokens)
        values = [math.nan if row[0] is None else float(row[0]) for row in logprobs[:num_kept]]
        return Completion(token_ids[:num_kept], values, "stop" if stopped else "length")


def _fresh(error: Exception) -> Exception:
    """The error for one more waiter: a shared exception would collect all their tracebacks."""
    kind = type(error) if isinstance(error, ServerError) else RequestError
    copy = kind(str(error))
    if isinstance(error, RequestError) and isinstance(copy, RequestError):
        copy.status = error.status
    copy.__cause__ = error
    return copy
