"""Which server answers at an address, and the proof that what it samples can be trained on."""

import asyncio
import logging
import time
from typing import Any

import aiohttp

from ..errors import RequestError, ServerError, ServerGoneError, SetupError
from ..tokens import ChatTokenizer
from . import ServerClient
from .http import Http
from .trl_server import TRLServerClient
from .vllm import VLLMClient

logger = logging.getLogger(__name__)

_PROBE_TEXT = (
    'Compute 17 * 3.\n<tool_call>{"name": "f"}</tool_call> \N{GREEK SMALL LETTER PI} \N{CJK UNIFIED IDEOGRAPH-6F22}'
)
_RETRY_S = 2.0


async def connect_one(
    base_url: str,
    tokenizer: ChatTokenizer,
    *,
    max_completion_length: int,
    max_model_len: int | None,
    wait_s: float,
    request_timeout_s: float,
) -> ServerClient:
    """The client for the server at `base_url`, proved. Raises as `connect` does."""
    http = Http(base_url, timeout_s=request_timeout_s)
    try:
        models = await _models(http, wait_s)
        if models is not None:
            model = models["data"][0]
            client = VLLMClient(http, model=model["id"], max_model_len=model.get("max_model_len"))
            _check_length(client.max_model_len, max_completion_length, http.base_url)
            await _prove_vllm(client, tokenizer)
            return client
        _check_length(max_model_len, max_completion_length, http.base_url)
        logger.warning(
            "The server at %s is TRL's own, which does not tell its context and hangs for ever on a longer prompt. "
            "It is taken to hold %s tokens; if it was started with another --max_model_len, set "
            "GRPOConfig.vllm_max_model_length to that.",
            http.base_url,
            max_model_len or "any number of",
        )
        trl_client = TRLServerClient(http, eos_token_ids=tokenizer.eos_token_ids, max_model_len=max_model_len)
        _check_vocabulary(await trl_client.probe(_PROBE_TEXT), tokenizer, http.base_url)
        return trl_client
    except BaseException:
        await http.close()
        raise


async def _models(http: Http, wait_s: float) -> dict[str, Any] | None:
    """`/v1/models` of vLLM's server; None for TRL's.

    Raises:
        ServerError: nothing answers within `wait_s`, or something else does.
    """
    started, waited = time.monotonic(), False
    while True:
        is_gone = True
        try:
            status, answer = await http.get("/v1/models")
            if status == 200 and _lists_models(answer):
                return answer  # type: ignore[no-any-return]
            trl_status, _ = await http.get("/get_world_size/")
            if status == 404 and trl_status == 200:
                return None
            problem = f"answers {status} to /v1/models and {trl_status} to /get_world_size/"
            is_gone = status in (502, 503, 504)  # a proxy, whose server is still starting
            if not is_gone:
                break
        except (aiohttp.ClientError, TimeoutError) as cause:
            problem = f"cannot be reached ({type(cause).__name__}: {cause})"
        elapsed = time.monotonic() - started
        if elapsed >= wait_s:
            break
        level = logging.INFO if waited else logging.WARNING  # once where a user sees it, then for those who ask
        logger.log(
            level, "The server at %s %s. Waiting for it, %.0f of %.0f s.", http.base_url, problem, elapsed, wait_s
        )
        waited = True
        await asyncio.sleep(min(_RETRY_S, wait_s - elapsed))
    raise (ServerGoneError if is_gone else ServerError)(
        f"The server at {http.base_url} {problem}, after {time.monotonic() - started:.0f} s. Expected is a vLLM "
        "server: start one with `trl-rollouts serve MODEL` (or `trl vllm-serve`; TRL <= 1.10 has its own, with "
        "/generate/), and check host and port."
    )


def _check_length(max_model_len: int | None, max_completion_length: int, base_url: str) -> None:
    if max_model_len is not None and max_model_len <= max_completion_length:
        raise SetupError(
            f"The server at {base_url} has max_model_len={max_model_len}, which leaves no room for a prompt beside "
            f"max_completion_length={max_completion_length}. Restart it with --max-model-len of at least "
            f"{max_completion_length} plus the longest prompt, or lower GRPOConfig.max_completion_length."
        )


def _lists_models(answer: Any) -> bool:
    data = answer.get("data") if isinstance(answer, dict) else None
    return isinstance(data, list) and bool(data) and isinstance(data[0], dict) and "id" in data[0]


async def _prove_vllm(client: VLLMClient, tokenizer: ChatTokenizer) -> None:
    try:
        ids, cold = await client.probe(_PROBE_TEXT, temperature=0.5)
        _, hot = await client.probe(_PROBE_TEXT, temperature=2.0)
    except RequestError as cause:
        if cause.status != 400:
            raise
        raise SetupError(
            f"The server at {client.base_url} refuses a request with logprobs: {cause} Restart it with "
            "--max-logprobs -1 --logprobs-mode processed_logprobs, as `trl-rollouts serve` does."
        ) from cause
    _check_vocabulary(ids, tokenizer, client.base_url)
    if abs(cold - hot) < 1e-6:  # the same logits at a quarter of the temperature differ, unless the mode is raw
        raise SetupError(
            f"The server at {client.base_url} returns logprobs before temperature: the likeliest token has "
            f"{cold:.4f} at temperature 0.5 and {hot:.4f} at 2.0. The trainer compares them with its own at the "
            "sampling temperature. Restart the server with --logprobs-mode processed_logprobs."
        )


def _check_vocabulary(server_ids: list[int], tokenizer: ChatTokenizer, base_url: str) -> None:
    own_ids = tokenizer.encode(_PROBE_TEXT, special_tokens=True)
    if server_ids != own_ids:
        raise SetupError(
            f"The server at {base_url} serves a model with another vocabulary than the trainer's: the same text is "
            f"{server_ids[:8]}... ({len(server_ids)} ids) there and {own_ids[:8]}... ({len(own_ids)} ids) here. "
            "Start it with the trainer's model."
        )
