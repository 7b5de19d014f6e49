"""The words of `vllm serve`, copied from vLLM 0.31.0.

Not spoken: streaming, chat, `/inference/v1/generate`, `echo`, prompt logprobs, weight transfer. Fields that vary from
run to run (ids, times) are constant or counted.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Literal

from .dialect import Answer, Refusal, Route, is_ids
from .model import FakeModel, Sampled


class VLLMDialect:
    """`vllm serve` 0.31."""

    generate_path = "/v1/completions"
    is_serial = False

    def __init__(
        self,
        model: FakeModel,
        *,
        name: str,
        max_model_len: int,
        logprobs_mode: Literal["processed_logprobs", "raw_logprobs"],
        dev_mode: bool,
    ) -> None:
        self._model = model
        self._name = name
        self._max_model_len = max_model_len
        self._logprobs_mode = logprobs_mode
        self._ids = itertools.count()
        self.num_starts = self.num_running = 0
        self.routes: dict[tuple[str, str], Route] = {
            ("GET", "/health"): lambda body, query: Answer(None),
            ("GET", "/metrics"): lambda body, query: Answer(f"process_start_time_seconds {self.num_starts}.0\n"),
            ("GET", "/version"): lambda body, query: Answer({"version": "0.31.0"}),
            ("GET", "/v1/models"): lambda body, query: self._models(),
            ("POST", "/tokenize"): lambda body, query: self._tokenize(body),
            ("POST", self.generate_path): lambda body, query: self._complete(body),
        }
        if dev_mode:
            self.routes |= {
                ("GET", "/get_world_size"): lambda body, query: Answer({"world_size": 1}),
                ("GET", "/server_info"): lambda body, query: self._server_info(query),
                ("POST", "/collective_rpc"): lambda body, query: _collective_rpc(body),
                ("POST", "/reset_prefix_cache"): lambda body, query: self._reset_prefix_cache(),
            }

    def prompts(self, body: Any) -> list[list[int]]:
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            return []
        return [prompt] if is_ids(prompt) else [one for one in prompt if is_ids(one)]

    def not_json(self) -> Refusal:
        return _refusal(
            400, "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.0', 'msg': 'JSON decode error'}"
        )

    def _models(self) -> Answer:
        model = {
            "id": self._name,
            "object": "model",
            "created": 0,
            "owned_by": "vllm",
            "root": self._name,
            "parent": None,
        }
        return Answer({"object": "list", "data": [model | {"max_model_len": self._max_model_len, "permission": []}]})

    def _server_info(self, query: Mapping[str, str]) -> Answer:
        config = {"model": self._name, "max_model_len": self._max_model_len, "logprobs_mode": self._logprobs_mode}
        # The engine's own text form does not name the logprobs mode.
        text = f"model={self._name!r}, max_seq_len={self._max_model_len}"
        is_json = query.get("config_format") == "json"
        return Answer({"vllm_config": {"model_config": config} if is_json else text, "vllm_env": {}, "system_env": {}})

    def _reset_prefix_cache(self) -> Answer:
        """Refused, with status 200, while a request uses the cache."""
        return Answer({"success": self.num_running == 0})

    def _tokenize(self, body: Any) -> Answer:
        ids = self._model.encode(body["prompt"])
        return Answer({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids, "token_strs": None})

    def _complete(self, body: Any) -> Answer:
        if body.get("model") not in (None, self._name):
            raise _refusal(404, f"The model `{body['model']}` does not exist.", "model", "NotFoundError")
        settings = {"max_tokens": 16} | {name: value for name, value in body.items() if value is not None}
        _check_settings(settings)
        prompts = self._prompts(body.get("prompt"))
        for prompt_ids, _ in prompts:
            self._check_prompt(prompt_ids, settings["max_tokens"])
        repeated = [prompt for prompt in prompts for _ in range(settings.get("n", 1))]
        sampled = [self._model.sample(ids, settings, scripted=scripted) for ids, scripted in repeated]
        num_prompt = sum(len(prompt_ids) for prompt_ids, _ in prompts)
        num_sampled = sum(len(one.token_ids) for one in sampled)
        answer = {
            "id": f"cmpl-{next(self._ids):016x}",
            "object": "text_completion",
            "created": 0,
            "model": self._name,
            "choices": [self._choice(index, one, settings) for index, one in enumerate(sampled)],
            "service_tier": None,
            "system_fingerprint": "fake",
            "usage": {
                "prompt_tokens": num_prompt,
                "total_tokens": num_prompt + num_sampled,
                "completion_tokens": num_sampled,
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        return Answer(answer, max(one.delay_s for one in sampled))

    def _prompts(self, prompt: Any) -> list[tuple[list[int], bool]]:
        """Every prompt as ids, and whether it came as ids."""
        if prompt is None:
            raise _refusal(
                400, "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", "prompt"
            )
        if isinstance(prompt, str) or is_ids(prompt):
            prompt = [prompt] if prompt else []
        if not prompt:
            raise _refusal(400, "You must pass at least one prompt")
        return [(self._model.encode(one), False) if isinstance(one, str) else (one, True) for one in prompt]

    def _check_prompt(self, prompt_ids: list[int], max_tokens: int) -> None:
        num, longest = len(prompt_ids), self._max_model_len - max_tokens
        if num > longest:
            qualifier = "at least " if num == longest + 1 else ""  # vLLM reads one token more than fits, then stops
            raise _refusal(
                400,
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{max_tokens} output tokens and your prompt contains {qualifier}{num} input tokens, for a total of "
                f"{qualifier}{num + max_tokens} tokens. Please reduce the length of the input prompt or the number of "
                f"requested output tokens. (parameter=input_tokens, value={num})",
                "input_tokens",
            )
        if prompt_ids and max(prompt_ids) >= self._model.vocab_size:
            raise _refusal(400, f"Token id {max(prompt_ids)} is out of vocabulary")

    def _choice(self, index: int, sampled: Sampled, settings: Mapping[str, Any]) -> dict[str, Any]:
        with_ids = settings.get("return_token_ids", False)
        return {
            "index": index,
            "text": sampled.text,
            "logprobs": self._logprobs(sampled, settings) if settings.get("logprobs") is not None else None,
            "finish_reason": sampled.finish_reason,
            "stop_reason": sampled.stop_reason,
            "token_ids": sampled.token_ids if with_ids else None,
            "prompt_logprobs": None,
            "prompt_token_ids": list(sampled.prompt_ids) if with_ids else None,
            "routed_experts": None,
        }

    def _logprobs(self, sampled: Sampled, settings: Mapping[str, Any]) -> dict[str, Any]:
        def name(token_id: int) -> str:
            as_id = settings.get("return_tokens_as_token_ids", False)
            return f"token_id:{token_id}" if as_id else self._model.decode([token_id])

        names = [name(token_id) for token_id in sampled.token_ids]
        return {
            "text_offset": [0, *itertools.accumulate(len(token) for token in names)][: len(names)],
            "token_logprobs": sampled.logprobs,
            "tokens": names,
            "top_logprobs": [
                {name(token_id): logprob for token_id, logprob in top.items()} for top in sampled.top_logprobs
            ],
        }


def _check_settings(settings: Mapping[str, Any]) -> None:
    """The settings whose bounds a rollout can run into."""
    max_tokens, temperature, top_p = (
        settings["max_tokens"],
        settings.get("temperature", 1.0),
        settings.get("top_p", 1.0),
    )
    for is_wrong, name, value, what in (
        (max_tokens < 1, "max_tokens", max_tokens, "at least 1"),
        (temperature < 0, "temperature", float(temperature), "non-negative"),
        (not 0 < top_p <= 1, "top_p", float(top_p), "in (0, 1]"),
    ):
        if is_wrong:
            message = f"{name} must be {what}, got {value}. (parameter={name}, value={value})"
            raise _refusal(400, message, name)


def _collective_rpc(body: Any) -> Answer:
    if "method" not in body:
        raise _refusal(400, "Missing 'method' in request body", kind="Bad Request")
    return Answer({"results": [None]})


def _refusal(status: int, message: str, param: str | None = None, kind: str = "BadRequestError") -> Refusal:
    return Refusal(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})
