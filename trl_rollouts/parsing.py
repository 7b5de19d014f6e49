"""From a completion's text to the assistant's message: reasoning, content, tool calls.

Parsed messages are for environments and for people. They never become tokens again, so a parser may be wrong about a
format without hurting a single training id.

A call that cannot be read stays in `tool_calls`, in its place, with an `error` that its author can learn from.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from .errors import SetupError
from .trajectory import Message

Parser = Callable[[str], Message]
"""Takes a completion's text (special tokens kept, the end of the turn removed), returns the assistant's message."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_DECODER = json.JSONDecoder()


def find_parser(chat_template: str | None) -> Parser:
    """The parser for the tool format that a chat template teaches the model.

    Raises:
        SetupError: the template's format is not known here. A wrong guess would show as reward 0, days later.
    """
    template = chat_template or ""
    if _OPEN in template and "arguments" in template and "<function=" not in template:
        return parse_hermes
    raise SetupError(
        "No parser is known for the tool-call format of this chat template (known: JSON in <tool_call> tags, as "
        "Hermes and Qwen2.5/Qwen3 write it). Pass parser=, a function from a completion's text to an assistant "
        "message; trl_rollouts.parsing.parse_hermes is one."
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
    """Thoughts and the rest. A template may have opened `<think>` in the prompt already."""
    before, closed, after = text.partition("</think>")
    if closed:
        return before.removeprefix("<think>").strip("\n"), after.lstrip("\n")
    if text.lstrip().startswith("<think>"):
        return text.lstrip().removeprefix("<think>").strip("\n"), ""
    return None, text


def _tagged(content: str) -> Iterator[Any]:
    """What stands in each pair of tags: a decoded value, or the raw text where it is no JSON."""
    position = content.find(_OPEN)
    while position >= 0:
        start = position + len(_OPEN)
        value, end = _decode(content, start)
        if end is None:  # no JSON: up to the closing tag, the next call, or the end
            stops = [at for at in (content.find(_CLOSE, start), content.find(_OPEN, start)) if at >= 0]
            end = min(stops, default=len(content))
            value = content[start:end].strip()
        yield value
        position = content.find(_OPEN, end)


def _bare(content: str) -> Iterator[Any]:
    """Calls of a completion that is nothing but JSON objects, in a code fence or not."""
    text = re.sub(r"^\s*```(?:json)?|```\s*$", "", content)
    position: int | None = 0
    while position is not None and text[position:].lstrip().startswith("{"):
        value, position = _decode(text, position)
        if isinstance(value, dict) and {"name", "arguments"} <= value.keys():
            yield value


def _decode(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON value that begins at `start`, and where it ends: closing tags and braces in strings do not count."""
    begin = start + len(text[start:]) - len(text[start:].lstrip())
    try:
        return _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, None


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
        name, arguments = block["name"], _arguments(block.get("arguments"))
        if not isinstance(arguments, dict):
            error = f'"arguments" of {name} must be a JSON object, not {json.dumps(arguments)[:200]}.'
    call: dict[str, Any] = {
        "id": f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return call if error is None else {**call, "error": error}


def _arguments(value: Any) -> Any:
    """Arguments that were left out, or written as a JSON string, as some models do."""
    if value is None:
        return {}
    if isinstance(value, str):
        decoded, end = _decode(value, 0)
        return decoded if end is not None else value
    return value
