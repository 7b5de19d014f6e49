"""What the fakes sample: replies from a script, with logprobs of one small fixed distribution.

The distribution is a true softmax over the vocabulary, the same at every position, so a logprob follows from the id
and the temperature alone and `FakeModel.logprob` says what to expect. A reply ends where a real server would end it:
at the end-of-turn id, a stop id, a stop string, or `max_tokens`.

Not simulated: penalties, top_p, top_k and min_p (no logprob depends on them), seeds, `ignore_eos`, `min_tokens`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One completion, exactly as given; `max_tokens` still cuts it."""

    token_ids: list[int]  # [T]
    logprobs: list[float] | None = None  # [T]
    """None: those of the fake's distribution."""
    delay_s: float = 0.0
    """Seconds until it is there."""
    finish_reason: FinishReason | None = None
    """None: what follows from the ids. Given, it stands, and nothing but `max_tokens` ends the reply early."""

    def __post_init__(self) -> None:
        if self.logprobs is not None and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"A reply of {len(self.token_ids)} ids has {len(self.logprobs)} logprobs.")


AnyReply = str | list[int] | Reply
"""Text is encoded and gets the end-of-turn id; ids and `Reply`s are taken as they are."""
Replies = Callable[[list[int]], AnyReply] | Iterable[AnyReply]
"""A function from prompt ids to the reply, or replies used in the order in which prompts arrive."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a request gets, before it is put into a protocol's words."""

    prompt_ids: list[int]
    token_ids: list[int]  # [T]
    logprobs: list[float]  # [T]
    top_logprobs: list[dict[int, float]]  # [T]
    """The sampled id first, then the likeliest ones."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop id that ended it; None for the end-of-turn id and for `max_tokens`."""
    text: str
    delay_s: float


class FakeModel:
    """A script and a distribution.

    Args:
        replies: the script.
        tokenizer: encodes and decodes; a `byte_tokenizer()` if None.
        raw_logprobs: logprobs before temperature, as vLLM's `--logprobs-mode raw_logprobs` gives them.
    """

    def __init__(self, replies: Replies, tokenizer: Any = None, *, raw_logprobs: bool = False) -> None:
        if isinstance(replies, str):
            raise ValueError(f"The script is a single text: {replies!r}. Put it into a list, one reply a request.")
        if tokenizer is None:
            from .tokenizer import byte_tokenizer

            tokenizer = byte_tokenizer()
        self.tokenizer = tokenizer
        self.vocab_size: int = len(tokenizer)
        self._reply = replies if callable(replies) else _in_order(replies)
        self._raw_logprobs = raw_logprobs
        self._log_sums: dict[float, float] = {}
        self._ranking: list[int] = []

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def logprob(self, token_id: int, temperature: float = 1.0) -> float:
        """The log-softmax of `token_id` at `temperature`; greedy decoding reports it at 1, as vLLM does."""
        if self._raw_logprobs or temperature == 0.0:
            temperature = 1.0
        if temperature not in self._log_sums:
            scaled = [self._logit(other) / temperature for other in range(self.vocab_size)]
            top = max(scaled)
            self._log_sums[temperature] = top + math.log(sum(math.exp(x - top) for x in scaled))
        return self._logit(token_id) / temperature - self._log_sums[temperature]

    def likeliest(self, num: int) -> list[int]:
        """The `num` likeliest ids."""
        if not self._ranking:
            self._ranking = sorted(range(self.vocab_size), key=self._logit, reverse=True)
        return self._ranking[:num]

    def sample(self, prompt_ids: list[int], settings: Mapping[str, Any], *, scripted: bool = True) -> Sampled:
        """The next reply under a request's `settings` (vLLM's names). Unscripted, it is the likeliest token."""
        reply = self._next(prompt_ids) if scripted else Reply(self.likeliest(1))
        num, finish_reason, stop_reason = self._end(reply, settings)
        token_ids = reply.token_ids[:num]
        temperature = settings.get("temperature", 1.0)
        logprobs = (reply.logprobs or [self.logprob(token_id, temperature) for token_id in token_ids])[:num]
        best = {
            token_id: self.logprob(token_id, temperature) for token_id in self.likeliest(settings.get("logprobs") or 0)
        }
        return Sampled(
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=logprobs,
            top_logprobs=[
                {token_id: logprob, **{other: x for other, x in best.items() if other != token_id}}
                for token_id, logprob in zip(token_ids, logprobs, strict=True)
            ],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            text=self._text(token_ids, finish_reason, stop_reason, settings),
            delay_s=reply.delay_s,
        )

    def _logit(self, token_id: int) -> float:
        # Spread over [0, 5] in an order that looks random; the second term makes ids of the same step differ.
        return (token_id * 37 % 101) / 20 + 0.04 * token_id / self.vocab_size

    def _next(self, prompt_ids: list[int]) -> Reply:
        reply = self._reply(list(prompt_ids))
        if isinstance(reply, str):
            reply = [*self.encode(reply), self.tokenizer.eos_token_id]
        return reply if isinstance(reply, Reply) else Reply(list(reply))

    def _end(self, reply: Reply, settings: Mapping[str, Any]) -> tuple[int, FinishReason, str | int | None]:
        """How many ids of the reply are sampled, why it ends there, and the stop string or id that did it."""
        max_tokens: int = settings["max_tokens"]
        if reply.finish_reason is not None:
            return min(len(reply.token_ids), max_tokens), reply.finish_reason, None
        stop = settings.get("stop") or []
        stop_texts = [stop] if isinstance(stop, str) else stop
        for num, token_id in enumerate(reply.token_ids[:max_tokens], start=1):
            if token_id == self.tokenizer.eos_token_id:
                return num, "stop", None
            if token_id in (settings.get("stop_token_ids") or ()):
                return num, "stop", token_id
            text = self.decode(reply.token_ids[:num], skip_special_tokens=True) if stop_texts else ""
            for stop_text in stop_texts:
                if stop_text in text:
                    return num, "stop", stop_text
            if num == max_tokens:
                return num, "length", None
        return len(reply.token_ids), "stop", None

    def _text(
        self,
        token_ids: list[int],
        finish_reason: FinishReason,
        stop_reason: str | int | None,
        settings: Mapping[str, Any],
    ) -> str:
        """The reply as text. What ended it stays out unless the request includes it; the ids keep it either way."""
        skip = settings.get("skip_special_tokens", True)
        text = self.decode(token_ids, skip_special_tokens=skip)
        if finish_reason == "length" or settings.get("include_stop_str_in_output"):
            return text
        if isinstance(stop_reason, str):
            return text[: text.index(stop_reason)]
        ended = isinstance(stop_reason, int) or token_ids[-1:] == [self.tokenizer.eos_token_id]
        return self.decode(token_ids[:-1], skip_special_tokens=skip) if ended else text


def _in_order(replies: Iterable[AnyReply]) -> Callable[[list[int]], AnyReply]:
    rest, num_used = iter(replies), 0

    def reply(prompt_ids: list[int]) -> AnyReply:
        nonlocal num_used
        for following in rest:
            num_used += 1
            return following
        raise LookupError(f"The script has no reply left after {num_used}, for a prompt of {len(prompt_ids)} tokens.")

    return reply
