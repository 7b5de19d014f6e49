"""From a completion to the model's next turn, in tokens: the end of the turn, the observation, the generation prompt.

The chat template renders the observation behind a short dummy turn of the assistant's; what it writes from that turn's
end on is encoded and appended to the sampled ids. So the work of a turn depends on its new messages only, and
templates that rewrite earlier turns (Qwen3 drops past thoughts) cannot touch what was sampled.

TRL bridges by the difference of two such renders (`GRPOTrainer._get_tool_suffix_ids`), which needs a template whose
assistant turn looks the same when it is the last one. A marker inside the dummy turn does without the second render.

A template is proved for each sequence of roles before it is used: it must end the assistant's turn, and then show
every message, once and in order.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import TemplateError
from .messages import message_text
from .trajectory import Message

if TYPE_CHECKING:
    from .tokens import ChatTokenizer

_MARKER = "ENDofTHEturn"
_HOLE = "SPECIALtoken"


@dataclass(frozen=True, slots=True)
class _Junction:
    """What was proved of a sequence of roles."""

    dummy_turn: Callable[[str, list[Message]], Message]
    """Makes the assistant's turn that holds the marker, from the marker and the observation."""
    end_id: int
    """The id that ends the assistant's turn, or opens the message behind it."""
    is_opening: bool
    """The latter: GLM's `<|user|>`, Gemma's `<|tool_response>`."""


class Bridge:
    """Bridges observations by one chat template."""

    def __init__(self, tokenizer: "ChatTokenizer") -> None:
        self._tokenizer = tokenizer
        self._proved: dict[tuple[tuple[Any, ...], ...], _Junction] = {}

    def ids(self, observation: list[Message], *, last_id: int) -> list[int]:
        """The ids to append to a completion.

        A turn ends once. Where the model has ended it, with the template's id or with another one of its EOS ids, no
        end is added; where it was cut, the template's is.

        Args:
            observation: the messages to show, never the assistant's.
            last_id: the completion's last id.

        Raises:
            TemplateError: the template fails on these messages, leaves one out, or does not end the assistant's turn.
        """
        control_words, texts = self._tokenizer.control_words, [message_text(message) for message in observation]
        marker, hole = (_absent(word, [*texts, str(observation)]) for word in (_MARKER, _HOLE))
        shown = [
            {**self._named(message), "content": control_words.sub(hole, text)}
            for message, text in zip(observation, texts, strict=True)
        ]
        junction = self.prove(shown)
        tail = self._after_turn(junction.dummy_turn(marker, shown), marker, shown)
        ids = self._encode_with_holes(tail, hole, [word for text in texts for word in control_words.findall(text)])
        if junction.end_id not in ids:
            raise TemplateError(
                f"The chat template does not end the assistant's turn before {observation!r:.200}. Show another "
                "message, or use another template."
            )
        end = ids.index(junction.end_id)
        is_ended = last_id == junction.end_id or (last_id in self._tokenizer.eos_token_ids and not junction.is_opening)
        return ids[end + 1 :] if is_ended else ids[end:]

    def prove(self, observation: list[Message]) -> _Junction:
        """How the template joins messages of these roles to the assistant's turn; proved once.

        Raises:
            TemplateError: it does not. Unproved, the end might be found behind the observation, which would be lost.
        """
        ids = [message.get("tool_call_id") for message in observation]  # templates look answers up by it
        key = tuple(
            (m["role"], bool(m.get("name")), i and ids.index(i)) for m, i in zip(observation, ids, strict=True)
        )
        if key not in self._proved:
            self._proved[key] = self._find_junction(observation, tuple(message["role"] for message in observation))
        return self._proved[key]

    def _named(self, message: Message) -> Message:
        """The message with names that are only names: a model may have written an unknown tool's."""
        named = dict(message)
        for key in ("name", "tool_call_id"):
            while isinstance(named.get(key), str) and self._tokenizer.control_words.search(named[key]):
                named[key] = self._tokenizer.control_words.sub("_", named[key])  # which may put a new one together
        return named

    def _find_junction(self, observation: list[Message], roles: tuple[str, ...]) -> _Junction:
        marks = [f"OBSERVATION{index}x" for index in range(len(observation))]
        marked = [{**message, "content": mark} for message, mark in zip(observation, marks, strict=True)]
        failure = ""
        for dummy_turn in (_call_only, _call_with_content) if "tool" in roles else (_content_only,):
            try:
                tail = self._after_turn(dummy_turn(_MARKER, marked), _MARKER, marked)
            except TemplateError as cause:
                failure = failure or str(cause)
                continue
            places = [tail.find(mark) for mark in marks]
            is_shown = -1 not in places and places == sorted(places) and all(tail.count(mark) == 1 for mark in marks)
            ids = self._tokenizer.encode(tail[: min(places)]) if is_shown and places else []
            has_calls = dummy_turn is not _content_only
            end = self._find_end(ids, has_calls=has_calls)
            if end is not None:
                is_opening = self._is_text(ids[end + 1 :]) and (has_calls or not self._ends_alone_with(ids[end]))
                return _Junction(dummy_turn, ids[end], is_opening)
            failure = failure or self._why_not(roles, tail)
        raise TemplateError(failure)

    def _find_end(self, ids: list[int], *, has_calls: bool) -> int | None:
        """Where the turn ends: at its EOS, or (gpt-oss writes `<|end|>` for a sampled `<|return|>`) at the first
        special token. A call holds special tokens of its own.
        """
        for ends in (self._tokenizer.eos_token_ids, frozenset() if has_calls else self._tokenizer.special_ids):
            for index, token_id in enumerate(ids):
                if token_id in ends:
                    return index
        return None

    def _why_not(self, roles: tuple[str, ...], tail: str) -> str:
        def named(ids: Iterable[int]) -> str:
            return ", ".join(f"{token_id} ({self._tokenizer.decode_one(token_id)})" for token_id in ids) or "none"

        there = [token_id for token_id in self._tokenizer.encode(tail) if token_id in self._tokenizer.special_ids]
        return (
            f"The chat template does not end the assistant's turn and then show messages of the roles {roles}: it "
            f"continues with {tail[:200]!r}, whose special tokens are {named(dict.fromkeys(there))}; the ids that end "
            f"a turn are {named(sorted(self._tokenizer.eos_token_ids))}. Put the one that ends the turn there into "
            "tokenizer.eos_token or the model's generation_config.eos_token_id (a list), or use a template that shows "
            "these roles."
        )

    def _is_text(self, behind: list[int]) -> bool:
        """Whether text, and no further special token, follows the end: then it may be what opens the message."""
        for token_id in behind:
            if token_id in self._tokenizer.special_ids:
                return False
            if self._tokenizer.decode_one(token_id).strip():
                return True
        return True

    def _ends_alone_with(self, token_id: int) -> bool:
        """Whether the template ends the assistant's turn with `token_id` where no message follows."""
        turns = [{"role": "user", "content": "."}, _content_only(_MARKER, [])]
        text = self._tokenizer.render(turns, is_whole=True)
        return token_id in self._tokenizer.encode(text.rpartition(_MARKER)[2])

    def _after_turn(self, turn: Message, marker: str, observation: list[Message]) -> str:
        """What the template writes behind `marker`, the last one of the assistant's `turn`."""
        text = self._tokenizer.render([{"role": "user", "content": "."}, turn, *observation])
        return text.rpartition(marker)[2] if marker in text else ""

    def _encode_with_holes(self, text: str, hole: str, words: list[str]) -> list[int]:
        """`text` with each hole filled by its word, the text of a control token, encoded as the text it is.

        A tool's result that spells out `<|im_end|>` must not end the turn.
        """
        first, *rest = text.split(hole)
        if len(rest) != len(words):
            raise TemplateError(
                f"The chat template leaves out or repeats an observation with the text of special tokens: {words}. "
                "Use another template, or take them out."
            )
        ids = self._tokenizer.encode(first)
        for word, part in zip(words, rest, strict=True):
            ids += self._tokenizer.encode_words(word)
            ids += self._tokenizer.encode_rest(part)
        return ids


def _content_only(marker: str, observation: list[Message]) -> Message:
    return {"role": "assistant", "content": marker}


def _call_only(marker: str, observation: list[Message]) -> Message:
    """Calls for the tool messages to answer. No content: there are templates that drop the calls beside one, and
    templates that write it behind the answers.
    """
    answers = [message for message in observation if message["role"] == "tool"]
    calls = [
        {
            "id": message.get("tool_call_id") or f"call{index:05}",
            "type": "function",
            "function": {"name": message.get("name") or "tool", "arguments": {"x": marker}},
        }
        for index, message in enumerate(answers)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _call_with_content(marker: str, observation: list[Message]) -> Message:
    """For templates that know tool messages and no calls."""
    return {**_call_only(marker, observation), "content": marker}


def _absent(word: str, texts: list[str]) -> str:
    """`word`, made longer until it stands in no text."""
    while any(word in text for text in texts):
        word += "Z" * len(word)
    return word


def alternatives(words: set[str]) -> re.Pattern[str]:
    """Matches each of the words, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))))
