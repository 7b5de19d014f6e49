"""The words of the server that TRL shipped up to 1.10, copied from TRL 1.10.0 and its web framework.

Not spoken: chat, images, sequence logprobs, weight transfer.
"""

from typing import Any

from .dialect import Answer, Bricked, Refusal, Route, is_ids
from .model import FakeModel


class TRLDialect:
    """`trl vllm-serve` of TRL 1.10."""

    generate_path = "/generate/"
    is_serial = True
    num_starts = 0
    num_running = 0

    def __init__(self, model: FakeModel, *, max_model_len: int) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self.routes: dict[tuple[str, str], Route] = {
            ("GET", "/health/"): lambda body, query: Answer({"status": "ok"}),
            ("GET", "/get_world_size/"): lambda body, query: Answer({"world_size": 1}),
            ("POST", "/reset_prefix_cache/"): lambda body, query: Answer(
                {"message": "Request received, resetting prefix cache status: True"}
            ),
            ("POST", self.generate_path): lambda body, query: self._generate(body),
        }

    def prompts(self, body: Any) -> list[list[int]]:
        return [ids for ids in body.get("prompts") or [] if is_ids(ids)]

    def not_json(self) -> Refusal:
        return Refusal(422, {"detail": [{"type": "json_invalid", "loc": ["body", 0], "msg": "JSON decode error"}]})

    def _generate(self, body: Any) -> Answer:
        prompts = body.get("prompts")
        _check_prompts(prompts, body)
        defaults = {"n": 1, "temperature": 1.0, "max_tokens": 16, "logprobs": 0}
        settings = {name: body.get(name, default) for name, default in defaults.items()}
        settings |= body.get("generation_kwargs") or {}
        sampled = []
        for prompt in prompts:
            scripted = not isinstance(prompt, str)
            prompt_ids = prompt if scripted else self._model.encode(prompt)
            room = self._max_model_len - len(prompt_ids)
            if room <= 0 or not prompt_ids or max(prompt_ids) >= self._model.vocab_size:
                raise Bricked  # the worker raises and exits; the server waits for it for ever
            limited = settings | {"max_tokens": min(settings["max_tokens"], room)}
            sampled += [self._model.sample(prompt_ids, limited, scripted=scripted) for _ in range(settings["n"])]
        ranked = [[_by_rank(top) for top in one.top_logprobs] for one in sampled]
        has_logprobs = settings["logprobs"] is not None
        answer = {
            "prompt_ids": [list(one.prompt_ids) for one in sampled[:: settings["n"]]],
            "completion_ids": [one.token_ids for one in sampled],
            "logprobs": [[[x for _, x in top] for top in row] for row in ranked] if has_logprobs else None,
            "logprob_token_ids": [[[i for i, _ in top] for top in row] for row in ranked] if has_logprobs else None,
        }
        return Answer(answer, max((one.delay_s for one in sampled), default=0.0))


def _by_rank(top: dict[int, float]) -> list[tuple[int, float]]:
    return sorted(top.items(), key=lambda item: item[1], reverse=True)


def _check_prompts(prompts: Any, body: Any) -> None:
    """The validation error of `prompts: list[str] | list[list[int]]`, one entry for each way in which it fails."""
    if isinstance(prompts, list) and (all(isinstance(one, str) for one in prompts) or all(map(is_ids, prompts))):
        return
    if prompts is None:
        raise Refusal(422, {"detail": [_invalid("missing", "Field required", body)]})
    if not isinstance(prompts, list):
        kinds = ("list[str]", "list[list[int]]")
        raise Refusal(
            422, {"detail": [_invalid("list_type", "Input should be a valid list", prompts, k) for k in kinds]}
        )
    detail = [
        _invalid("string_type", "Input should be a valid string", one, "list[str]", index)
        for index, one in enumerate(prompts)
        if not isinstance(one, str)
    ]
    for index, one in enumerate(prompts):
        if not isinstance(one, list):
            detail.append(_invalid("list_type", "Input should be a valid list", one, "list[list[int]]", index))
            continue
        detail += [
            _invalid("int_type", "Input should be a valid integer", token_id, "list[list[int]]", index, position)
            for position, token_id in enumerate(one)
            if type(token_id) is not int
        ]
    raise Refusal(422, {"detail": detail})


def _invalid(kind: str, message: str, value: Any, *where: str | int) -> dict[str, Any]:
    return {"type": kind, "loc": ["body", "prompts", *where], "msg": message, "input": value}
