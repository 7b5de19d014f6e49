"""The formats in which model families write tool calls.

Four kinds of writing (`grammars`) make up all of them, and channels, which order the whole turn:

    JSON      a call, or a list of calls, as JSON behind a mark         Hermes, Llama 3, Mistral, Phi, Granite, Command
    header    a mark and a name, then the arguments as JSON             DeepSeek, Kimi, newer Mistral, Gemma
    XML       a tag for each argument, its value written as it is       Qwen3-Coder, Qwen3.5, Nemotron 3, GLM, MiniMax
    Python    a list of calls with keyword arguments                    Llama 4, LFM2, OLMo
    channels  a turn of several messages, a call is one to a function   gpt-oss (Harmony)

The formats are published by the models' authors, in model cards and chat templates. docs/parsing.md says why the
libraries that read them are not used here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..trajectory import Message
from .calls import Call, Schemas, as_tool_calls, decode_json
from .grammars import Reader, braced, header_calls, json_calls, python_calls, xml_calls
from .thoughts import later_thoughts, split_thoughts


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's way to write a turn."""

    name: str
    parse: Callable[[str, Schemas], Message]
    """Takes a completion behind the tag of thoughts that its prompt has opened, and the types of the arguments, which
    formats without quotes need."""


_MAX_LATER_THOUGHTS = 16


def _tagged(name: str, read: Reader) -> ToolFormat:
    """A format whose calls stand in the text, behind the thoughts."""

    def parse(text: str, schemas: Schemas) -> Message:
        def is_in_call(position: int) -> bool:
            return any(call.start < position < call.end for call in read(text, schemas))

        reasoning, content, is_open = split_thoughts(text, is_in_call=is_in_call)
        calls = read(content, schemas)
        for _ in range(_MAX_LATER_THOUGHTS):
            if is_open or not (more := later_thoughts(content, [(call.start, call.end) for call in calls])):
                break
            thought, content, is_open = more
            reasoning = thought if reasoning is None else f"{reasoning}\n{thought}"
            calls = read(content, schemas)
        if is_open and not calls and read(reasoning or "", schemas):
            calls = [Call(0, 0, error="The tool call is inside thoughts that were not ended. End them, then call.")]
        if calls:
            content = content[: calls[0].start].strip()
        return _message(reasoning, content, calls)

    return ToolFormat(name, parse)


def _message(reasoning: str | None, content: str, calls: list[Call]) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = as_tool_calls(calls)
    return message


_HEADER = re.compile(r"\s*+(?:<\|start\|>assistant)?([^<]*+(?:<\|(?:channel|constrain)\|>[^<]*+)*+)(<\|message\|>|\Z)")
_END = re.compile(r"<\|(?:end|call|return)\|>|\Z")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _parse_channels(text: str, schemas: Schemas) -> Message:
    """Messages one behind the other, each with a header that names its channel, and its function if it is a call."""
    thoughts, contents, calls, position = list[str](), list[str](), list[Call](), 0
    while position < len(text) and (match := _HEADER.match(text, position)):
        header, start = match[1], match.end()
        if not match[2] and "<|channel|>" not in header:
            break
        if recipient := _RECIPIENT.search(header):
            calls.append(_call_to(recipient[1], text, start))
            start = calls[-1].end
        end = _END.search(text, start)
        assert end is not None, "the text ends"
        if not recipient:
            (thoughts if "analysis" in header else contents).append(text[start : end.start()])
        position = end.end()
    contents += [text[position:]] if text[position:].strip() else []
    return _message("\n".join(thoughts) if thoughts else None, "\n".join(filter(None, contents)), calls)


def _call_to(name: str, text: str, start: int) -> Call:
    value, end = decode_json(text, start)
    if end is not None:
        return Call.read(start, end, name, value)
    error = f"The arguments of {name} are not valid JSON."  # and what follows may be their text
    return Call(start, len(text), name, text[start:], error=error)


PLAIN = _tagged("plain", lambda text, schemas: [])
"""Thoughts and content; no call is one."""

HERMES = _tagged("hermes", json_calls("<tool_call>", "</tool_call>", bare=r"\s*(?:```(?:json)?)?"))

_GEMMA_HEADER = r"call:(?P<name>[\w.-]+)(?=\{)"

FORMATS = (
    _tagged("llama3", json_calls(r"<\|python_tag\|>", "", bare=r"\s*")),
    HERMES,
    _tagged(
        "qwen3-coder",
        xml_calls(
            opening=r"(?:<tool_call>\s*)?(?=<function=)|<tool_call>",
            name=r"<function=(?P<name>[^<>\n]+)>",
            key=r"<parameter=(?P<key>[^<>\n]+)>",
            end_of_value="</parameter>",
            end_of_call=r"</function>(?:\s*</tool_call>)?",
            lines=True,
        ),
    ),
    _tagged(
        "glm",
        xml_calls(
            opening="<tool_call>",
            name=r"\s*(?P<name>[^\s<{]+)",
            key=r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
            end_of_value="</arg_value>",
            end_of_call="</tool_call>",
        ),
    ),
    _tagged(
        "minimax",
        xml_calls(
            opening=r"(?:<minimax:tool_call>\s*)?<invoke(?= )",
            name=r' name="(?P<name>[^"<]+)">',
            key=r'<parameter name="(?P<key>[^"<]+)">',
            end_of_value="</parameter>",
            end_of_call=r"</invoke>(?:\s*</minimax:tool_call>)?",
        ),
    ),
    _tagged(
        "deepseek-v3",
        header_calls(
            opening="(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>",
            header="function<｜tool▁sep｜>(?P<name>[^\n`<]+)\n```json\n",
            closing="<｜tool▁call▁end｜>",
        ),
    ),
    _tagged(
        "deepseek-v3.1",
        header_calls(
            opening="(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>",
            header="(?P<name>[^<\n]+)<｜tool▁sep｜>",
            closing="<｜tool▁call▁end｜>",
        ),
    ),
    _tagged(
        "kimi",
        header_calls(
            opening=r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>",
            header=r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
            closing=r"<\|tool_call_end\|>",
        ),
    ),
    _tagged(
        "gemma",
        header_calls(opening=r"<\|tool_call>", header=_GEMMA_HEADER, closing=r"<tool_call\|>", decode=braced('<|"|>')),
    ),
    _tagged(
        "functiongemma",
        header_calls(
            opening="<start_function_call>",
            header=_GEMMA_HEADER,
            closing="<end_function_call>",
            decode=braced("<escape>"),
        ),
    ),
    ToolFormat("gpt-oss", _parse_channels),
    _tagged("mistral", json_calls(r"\[TOOL_CALLS\]", "")),
    _tagged(
        "mistral-v11",
        header_calls(
            opening=r"\[TOOL_CALLS\]",
            header=r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?(?=\s*\{)",
            closing="",
        ),
    ),
    _tagged("command", json_calls(r"<\|START_ACTION\|>", r"<\|END_ACTION\|>")),
    _tagged("phi", json_calls(r"<\|tool_call\|>|functools(?=\[)", r"<\|/tool_call\|>")),
    _tagged("lfm2", python_calls("<|tool_call_start|>", "<|tool_call_end|>")),
    _tagged("olmo", python_calls("<function_calls>", "</function_calls>")),
    _tagged("pythonic", python_calls("", "")),
)
"""All formats with calls. The first that reads a template's calls is taken: Hermes reads bare JSON too."""
