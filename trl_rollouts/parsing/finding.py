"""Which format a chat template speaks: the one that reads calls back from the template's own text."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import SetupError, TemplateError
from ..tokens import ChatTokenizer
from ..trajectory import Message
from .calls import schemas_of
from .formats import FORMATS, HERMES, PLAIN, ToolFormat

Parser = Callable[[str], Message]
"""Takes a completion's text (special tokens kept, the end of the turn removed; put before it, the tag with which its
prompt opened the thoughts), returns the assistant's message."""

_PROBE = {
    "type": "function",
    "function": {
        "name": "probe",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "number": {"type": "integer"},
                "words": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}
_WRITTEN = {"name": "probe", "arguments": {"text": "one {two}", "number": 3, "words": ["a", "b"]}}
_IDS = (("call00000", "call00001"), ("functions.probe:0", "functions.probe:1"))
"""Mistral's templates take ids of nine letters only, Kimi's write the id in place of the name."""


def find_parser(tokenizer: ChatTokenizer, tools: Sequence[dict[str, Any]] = ()) -> Parser:
    """The parser for a chat template's turns.

    Args:
        tokenizer: renders the template.
        tools: schemas of the tools that may be called; without any, whatever looks like a call is text.

    Raises:
        SetupError: no known format reads the template's calls. A wrong guess would show as reward 0, days later.
    """
    tool_format, schemas = find_format(tokenizer) if tools else PLAIN, schemas_of(tools)
    return lambda text: tool_format.parse(text, schemas)


@functools.lru_cache(maxsize=4)  # asked for every trajectory; a rollout keeps its tokenizer
def find_format(tokenizer: ChatTokenizer) -> ToolFormat:
    """The format that reads two calls, or the one that the template allows, back from the template's own text.

    Raises:
        SetupError: none does.
    """
    tried = ""
    for num, ids in ((num, ids) for num in (2, 1) for ids in _IDS):
        try:
            turn = tokenizer.written_calls([_WRITTEN] * num, ids[:num])
        except TemplateError as error:
            tried = tried or str(error)
            continue
        for tool_format in FORMATS:
            message = tool_format.parse(turn, schemas_of([_PROBE]))
            if [call["function"] for call in message.get("tool_calls", ())] == [_WRITTEN] * num:
                return tool_format
        tried = f"It writes a call as {turn!r:.300}."
    raise SetupError(
        f"No parser is known for the tool-call format of this chat template. {tried} Known are "
        f"{', '.join(tool_format.name for tool_format in FORMATS)}. Pass parser=, a function from a completion's "
        "text to an assistant message; trl_rollouts.parse_hermes is one."
    )


def parse_hermes(text: str) -> Message:
    """Tool calls as JSON in `<tool_call>` tags (Hermes, Qwen2.5, Qwen3), or as bare JSON without any tag.

    >>> parse_hermes('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')["tool_calls"][0]["function"]
    {'name': 'f', 'arguments': {'a': 1}}
    """
    return HERMES.parse(text, {})
