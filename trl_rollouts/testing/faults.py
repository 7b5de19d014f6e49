"""What can go wrong at a server, on demand: a `FakeServer` takes these as `faults`.

`Status`, `Reset` and `Silence` stand in for the answer and use no reply of the script; `BrokenBody` cuts the answer in
half. The others are `AnswerFault`s: they spoil an answer that is otherwise right, in the words of either protocol. A
class of one's own with a `spoil` method works as well.
"""

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Status:
    """An HTTP error."""

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
class BrokenBody:
    """Status 200, and half of the JSON."""


class AnswerFault(Protocol):
    """Spoils an answer in place: one with `choices` is vLLM's, the other is TRL's."""

    def spoil(self, answer: dict[str, Any]) -> None: ...


Fault = Status | Reset | Silence | BrokenBody | AnswerFault


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
        for row in answer.get("logprobs", ()):
            row[self.position] = [None] * len(row[self.position])
        for choice in answer.get("choices", ()):
            logprobs = choice["logprobs"]
            logprobs["token_logprobs"][self.position] = None
            logprobs["top_logprobs"][self.position] = {logprobs["tokens"][self.position]: None}


@dataclass(frozen=True, slots=True)
class NoTokenIds:
    """The answer has no ids: a vLLM that does not know `return_token_ids` leaves the fields out."""

    def spoil(self, answer: dict[str, Any]) -> None:
        answer.pop("completion_ids", None)
        for choice in answer.get("choices", ()):
            del choice["token_ids"], choice["prompt_token_ids"]


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
