"""What can go wrong at a server, on demand: a `FakeServer` takes these as `faults`.

    in place of an answer (no reply of the script is used)     Status, Reset, Silence, Restart
    an answer's bytes                                          BrokenBody, CutOff, Garbage
    an answer's time                                           Trickle, Late
    an answer's content, in the words of either protocol       the `AnswerFault`s: NoLogprobs, NullLogprob, NaNLogprob,
                                                               NoTokenIds, LongTokenIds, ForeignTokenId,
                                                               WrongPromptIds, WrongCount, WrongIndex, Reordered

A class of one's own with a `spoil` method works as an `AnswerFault` as well. `SeededFaults` draws of any of them.

Not here: a server that answers one request with the completion of another one that has the same prompt, or swaps
completions and leaves the prompts in place. Neither can be told from a right answer.
"""

import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Status:
    """An HTTP error. 429 comes from a gateway that limits rates, 502 to 504 from one that has lost its server, 500
    from the server itself, where a logprob is not finite.
    """

    code: int
    body: Any = None
    """Sent as JSON, or as plain text if it is a str. None: the words of the web framework for an unhandled error."""


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset without an answer, as when the server's process dies."""


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer, until the server is stopped. TRL's server answers nothing else meanwhile."""


@dataclass(frozen=True, slots=True)
class Restart:
    """The server is stopped with all that is under way, and started again: killed, and a supervisor that sees it."""

    down_s: float = 0.0
    """How long nobody listens at its address."""


@dataclass(frozen=True, slots=True)
class BrokenBody:
    """Status 200, and half of the JSON, whole as far as HTTP can tell: a gateway that lost its server says so."""


@dataclass(frozen=True, slots=True)
class CutOff:
    """Status 200, and half of the bytes that the headers promise before the connection closes: a server that is killed
    while it writes.
    """


@dataclass(frozen=True, slots=True)
class Garbage:
    """Status 200, and bytes that are no text in the encoding that they claim."""


@dataclass(frozen=True, slots=True)
class Trickle:
    """The headers come at once and the answer bit by bit: a congested link. No single read waits for long."""

    over_s: float


@dataclass(frozen=True, slots=True)
class Late:
    """The answer is right, and this much later; perhaps when nobody waits any more. vLLM's server notices that its
    client has gone; TRL's works on, and everyone else waits behind.
    """

    delay_s: float


class AnswerFault(Protocol):
    """Spoils an answer in place: one with `choices` is vLLM's, the other is TRL's."""

    def spoil(self, answer: dict[str, Any]) -> None: ...


Fault = Status | Reset | Silence | Restart | BrokenBody | CutOff | Garbage | Trickle | Late | AnswerFault


class SeededFaults:
    """Draws a fault for some of the requests: of the same seed, the n-th request to come meets the same one.

        faults = SeededFaults(seed=1, rate=0.1, kinds=[Status(503), Reset(), CutOff()])
        FakeServer(..., faults=faults)

    Requests with texts in place of ids are how a client proves a server; they are neither counted nor met by a fault
    (`also_probes`). May be shared by servers; `rate` and `kinds` may be changed at any time.

    Args:
        seed: of the draws.
        rate: the share of requests that meet a fault.
        kinds: of which one is drawn; one that is in it twice is drawn twice as often.
        also_probes: whether requests with texts are treated like the others.
    """

    def __init__(self, seed: int, rate: float, kinds: Sequence[Fault], *, also_probes: bool = False) -> None:
        self.rate, self.kinds = rate, list(kinds)
        self.drawn: Counter[str] = Counter()
        """How often each kind was, by its name."""
        self._random, self._lock, self._also_probes = random.Random(seed), threading.Lock(), also_probes

    def __call__(self, body: Any) -> Fault | None:
        prompts = body.get("prompts") or [body.get("prompt")]
        if isinstance(prompts[0], str) and not self._also_probes:
            return None
        with self._lock:
            chance, place = self._random.random(), self._random.random()  # both: a request takes the same of the seed
            if chance >= self.rate or not self.kinds:
                return None
            fault = self.kinds[int(place * len(self.kinds))]
            self.drawn[type(fault).__name__] += 1
        return fault


@dataclass(frozen=True, slots=True)
class NoLogprobs:
    """The logprobs are null."""

    def spoil(self, answer: dict[str, Any]) -> None:
        if "choices" not in answer:
            answer["logprobs"] = answer["logprob_token_ids"] = None
        for choice in answer.get("choices", ()):
            choice["logprobs"] = None


@dataclass(frozen=True, slots=True)
class NullLogprob:
    """One logprob of every completion is null: NaN in the server's own numbers."""

    position: int

    def spoil(self, answer: dict[str, Any]) -> None:
        _set_logprob(answer, self.position, None)


@dataclass(frozen=True, slots=True)
class NaNLogprob:
    """One logprob of every completion is NaN, spelled as `NaN`: no JSON, and what Python's own writer makes of it."""

    position: int

    def spoil(self, answer: dict[str, Any]) -> None:
        _set_logprob(answer, self.position, float("nan"))


@dataclass(frozen=True, slots=True)
class NoTokenIds:
    """The answer has no ids: a vLLM that does not know `return_token_ids` leaves the fields out."""

    def spoil(self, answer: dict[str, Any]) -> None:
        answer.pop("completion_ids", None)
        for choice in answer.get("choices", ()):
            del choice["token_ids"], choice["prompt_token_ids"]


@dataclass(frozen=True, slots=True)
class LongTokenIds:
    """Every completion's ids come twice in a row, its logprobs once: chunks of a stream that were put together ill."""

    def spoil(self, answer: dict[str, Any]) -> None:
        for ids in _completions(answer):
            ids *= 2


@dataclass(frozen=True, slots=True)
class ForeignTokenId:
    """One id of every completion is none of the vocabulary: another model's."""

    position: int = 0
    token_id: int = 10**9

    def spoil(self, answer: dict[str, Any]) -> None:
        for ids in _completions(answer):
            ids[self.position] = self.token_id


@dataclass(frozen=True, slots=True)
class WrongPromptIds:
    """The prompt comes back with one more id at its end, as if the server had encoded it in another way."""

    def spoil(self, answer: dict[str, Any]) -> None:
        for ids in answer.get("prompt_ids", ()):
            ids.append(0)
        for choice in answer.get("choices", ()):
            choice["prompt_token_ids"].append(0)


@dataclass(frozen=True, slots=True)
class WrongCount:
    """The last completion is missing."""

    def spoil(self, answer: dict[str, Any]) -> None:
        for name in ("choices", "completion_ids"):
            if name in answer:
                answer[name].pop()


@dataclass(frozen=True, slots=True)
class WrongIndex:
    """vLLM's choices count from 1. TRL's rows have no number."""

    def spoil(self, answer: dict[str, Any]) -> None:
        for choice in answer.get("choices", ()):
            choice["index"] += 1


@dataclass(frozen=True, slots=True)
class Reordered:
    """The rows come in reverse order, each whole, with its prompt: gathered as they were finished."""

    def spoil(self, answer: dict[str, Any]) -> None:
        for name in ("choices", "prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"):
            if isinstance(answer.get(name), list):
                answer[name].reverse()


def _completions(answer: dict[str, Any]) -> list[list[int]]:
    if "choices" in answer:
        return [choice["token_ids"] for choice in answer["choices"]]
    return list(answer["completion_ids"])


def _set_logprob(answer: dict[str, Any], position: int, value: float | None) -> None:
    for row in answer.get("logprobs") or ():
        row[position] = [value] * len(row[position])
    for choice in answer.get("choices", ()):
        logprobs = choice["logprobs"]
        logprobs["token_logprobs"][position] = value
        logprobs["top_logprobs"][position] = {logprobs["tokens"][position]: value}
