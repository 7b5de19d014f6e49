"""vLLM's own server (`vllm serve`, which `trl vllm-serve` starts from TRL 1.11 on).

`/v1/completions` takes token ids and gives token ids (`return_token_ids`, vLLM >= 0.10.2), with the sampled token's
logprob. One request a trajectory: the server batches what is under way.
"""

import math
import re
from typing import Any

import aiohttp

from ..errors import RequestError, ServerError, ServerGoneError
from ..sampling import Sampling
from ..trajectory import Completion
from .http import Http

_STARTED = re.compile(r"^process_start_time_seconds (\S+)$", re.MULTILINE)


class VLLMClient:
    """One `vllm serve`. `model` is the name under which it serves."""

    def __init__(self, http: Http, *, model: str, max_model_len: int | None) -> None:
        self._http = http
        self.base_url = http.base_url
        self.model = model
        self.max_model_len = max_model_len

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        choice = await self._complete(token_ids, logprobs=0, settings=sampling.body())
        if choice.get("prompt_token_ids") not in (None, token_ids):
            raise ServerError(
                f"The server at {self.base_url} completed another prompt ({len(choice['prompt_token_ids'])} tokens) "
                f"than it was sent ({len(token_ids)} tokens). A setting in generation_kwargs may change prompts; "
                "remove it."
            )
        return _completion(choice, self.base_url)

    async def probe(self, text: str, temperature: float) -> tuple[list[int], float]:
        """The ids that the server makes of `text`, and the logprob of the likeliest next token."""
        settings = {"max_tokens": 1, "temperature": temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        choice = await self._complete(text, logprobs=1, settings=settings | {"repetition_penalty": 1.0})
        _completion(choice, self.base_url)
        try:
            return choice["prompt_token_ids"], max(map(float, choice["logprobs"]["top_logprobs"][0].values()))
        except (KeyError, TypeError, ValueError) as cause:
            raise ServerError(
                f"The server at {self.base_url} answers without prompt ids or top logprobs: {choice!r:.300}. It needs "
                "vLLM >= 0.10.2."
            ) from cause

    async def instance(self) -> str | None:
        """The start of the server's process. vLLM started with several API servers does not tell it."""
        status, answer = await self._http.get("/metrics")
        found = _STARTED.search(answer) if status == 200 and isinstance(answer, str) else None
        return found[1] if found else None

    async def close(self) -> None:
        await self._http.close()

    async def _complete(self, prompt: str | list[int], *, logprobs: int, settings: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "n": 1,
            "logprobs": logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        try:
            answer = await self._http.post("/v1/completions", settings | body)
        except RequestError as error:
            if (error.status is None or error.status >= 500) and (problem := await self._problem()):
                raise ServerGoneError(f"{error} And {self.base_url}/health {problem}.") from error
            raise
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ServerError(f"{self.base_url}/v1/completions answered without exactly one choice: {answer!r:.300}")
        choice: dict[str, Any] = choices[0]
        return choice

    async def _problem(self) -> str | None:
        """What is wrong with the server itself, by its own word: it is not healthy once its engine has died."""
        try:
            status, _ = await self._http.get("/health")
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"does not answer ({type(error).__name__}: {error})"
        return f"answers {status}" if status >= 500 else None


def _completion(choice: dict[str, Any], base_url: str) -> Completion:
    """The choice, checked. The sampled token's logprob is its own field, whatever else was asked for."""
    token_ids, finish_reason = choice.get("token_ids"), choice.get("finish_reason")
    if finish_reason not in ("stop", "length"):  # "abort", "error": the completion is not what the model would say
        raise RequestError(f"{base_url}/v1/completions gave a completion up: finish_reason={finish_reason!r}.")
    if not isinstance(token_ids, list) or not token_ids or not all(type(token_id) is int for token_id in token_ids):
        raise ServerError(
            f"The server at {base_url} returned no token ids ({token_ids!r}), so nothing exact can be trained on. It "
            "needs vLLM >= 0.10.2 (return_token_ids)."
        )
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(logprobs, list) or len(logprobs) != len(token_ids):
        raise ServerError(
            f"The server at {base_url} returned no logprobs for {len(token_ids)} tokens. Start it with "
            "--max-logprobs -1 (`trl-rollouts serve` does)."
        )
    return Completion(token_ids, [math.nan if lp is None else float(lp) for lp in logprobs], finish_reason)
