"""From a completion's text to the assistant's message: reasoning, content, tool calls.

Parsed messages are for environments and for people. They never become tokens again, so a parser may be wrong about a
format without hurting a single training id.

A call that cannot be read stays in `tool_calls`, in its place, with an `error` that its author can learn from.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from .errors import SetupError, TemplateError
from .tokens import ChatTokenizer
from .trajectory import Message

Parser = Callable[[str], Message]
"""Takes a completion's text (special tokens kept, the end of the turn removed), returns the assistant's message."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"\s*")
_FENCE = re.compile(r"\s*```(?:json)?")
_MAX_DEPTH = 64


def find_parser(tokenizer: ChatTokenizer) -> Parser:
    """The parser for a chat template's tool format: the one that reads a call back from its render.

    Raises:
        SetupError: none does. A wrong guess would show as reward 0, days later.
    """
    written = {"name": "probe", "arguments": {"text": "one {two}", "number": 3}}
    with suppress(TemplateError):
        calls = parse_hermes(tokenizer.render_call(written)).get("tool_calls", ())
        if [call["function"] for call in calls] == [written]:
            return parse_hermes
    raise SetupError(
        "No parser is known for the tool-call format of this chat template (known: JSON in <tool_call> tags, as "
        "Hermes and Qwen2.5/Qwen3 write it). Pass parser=, a function from a completion's text to an assistant "
        "message; trl_rollouts.parse_hermes is one."
    )


def parse_plain(text: str) -> Message:
    """Reasoning and content, for environments without tools: whatever looks like a call is text."""
    reasoning, content = _split_reasoning(text)
    message: Message = {"role": "assistant", "content": content}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def parse_hermes(text: str) -> Message:
    """Tool calls as JSON in `<tool_call>` tags (Hermes, Qwen2.5, Qwen3), or as bare JSON without any tag.

    >>> parse_hermes('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': {'a': 1}}
    """
    message = parse_plain(text)
    content = message["content"]
    before, tagged, _ = content.partition(_OPEN)
    blocks = list(_tagged(content)) if tagged else list(_bare(content))
    if blocks:
        message["content"] = before.strip() if tagged else ""
        message["tool_calls"] = [_call(index, block) for index, block in enumerate(blocks)]
    return message


def _split_reasoning(text: str) -> tuple[str | None, str]:
    """Thoughts and the rest.

    Where a template opened `<think>` in the prompt, a closing tag alone ends the thoughts, but not one within a call.
    """
    before, closed, after = text.partition("</think>")
    opened = text.lstrip().startswith("<think>")
    if closed and (opened or not _is_inside_call(text, len(before))):
        return before.lstrip().removeprefix("<think>").strip("\n"), after.lstrip("\n")
    if opened:
        return text.lstrip().removeprefix("<think>").strip("\n"), ""
    return None, text


def _is_inside_call(text: str, position: int) -> bool:
    """Whether `position` lies in the JSON of a call that begins before it."""
    starts = [match.end() for match in re.finditer(f"{_OPEN}|{_FENCE.pattern}", text[:position])] or [0]
    return any((_decode(text, start)[1] or 0) > position for start in starts)


def _tagged(content: str) -> Iterator[Any]:
    """What stands in each pair of tags: decoded values, or the raw text where it is no JSON."""
    position = content.find(_OPEN)
    while position >= 0:
        start = position + len(_OPEN)
        value, end = _decode(content, start)
        if end is None:  # no JSON: up to the closing tag, the next call, or the end
            stops = [at for at in (content.find(_CLOSE, start), content.find(_OPEN, start)) if at >= 0]
            end = min(stops, default=len(content))
            value = content[start:end].strip()
        yield value
        yield from _bare(content, end)  # a second call behind the first one
        position = content.find(_OPEN, end)


def _bare(content: str, position: int | None = 0) -> Iterator[Any]:
    """Calls that stand at `position` as JSON objects one behind the other, in a code fence or not."""
    if position == 0 and (fence := _FENCE.match(content)):
        position = fence.end()
    while position is not None and content.startswith("{", _skip_space(content, position)):
        value, position = _decode(content, position)
        if isinstance(value, dict) and {"name", "arguments"} <= value.keys():
            yield value


def _decode(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON value that begins at `start`, and where it ends: closing tags and braces in strings do not count.

    A value nested deeper than anybody means it is none: what is deep here overflows somewhere else.
    """
    try:
        value, end = _DECODER.raw_decode(text, _skip_space(text, start))
    except (ValueError, RecursionError):
        return None, None
    return (value, end) if _is_shallow(value) else (None, None)


def _skip_space(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    assert match is not None, "the pattern takes nothing, too"
    return match.end()


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [item for part in level for item in _items(part)]
        if not level:
            return True
    return False


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _call(index: int, block: Any) -> dict[str, Any]:
    """One entry of `tool_calls`. `error` says why a call cannot be run."""
    name, arguments, error = "", block, None
    if not isinstance(block, dict):
        error = (
            'The tool call is not valid JSON. Write {"name": <function name>, "arguments": {...}} and close the tag.'
        )
    elif not isinstance(block.get("name"), str) or not block["name"]:
        error = (
            f'The tool call has no function name: {json.dumps(block)[:200]}. Write {{"name": ..., "arguments": ...}}.'
        )
    else:
        name, arguments = block["name"], read_arguments(block.get("arguments"))
        if not isinstance(arguments, dict):
            error = f'"arguments" of {name} must be a JSON object, not {json.dumps(arguments)[:200]}.'
    call: dict[str, Any] = {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return call if error is None else {**call, "error": error}


def read_arguments(value: Any) -> Any:
    """Arguments that were left out, or are a JSON string, as some models and parsers write them."""
    if value is None:
        return {}
    if isinstance(value, str):
        decoded, end = _decode(value, 0)
        return decoded if end is not None else value
    return value
