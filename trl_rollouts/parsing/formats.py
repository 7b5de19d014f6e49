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
from .calls import Call, Schemas, decode_json
from .grammars import Reader, braced, header_calls, json_calls, python_calls, xml_calls
from .thoughts import split_thoughts


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A family's way to write a turn."""

    name: str
    parse: Callable[[str, Schemas], Message]
    """Takes a completion behind the tag of thoughts that its prompt has opened, and the types of the arguments, which
    formats without quotes need."""


def _tagged(name: str, read: Reader) -> ToolFormat:
    """A format whose calls stand in the text, behind the thoughts."""

    def parse(text: str, schemas: Schemas) -> Message:
        def is_in_call(position: int) -> bool:
            return any(call.start < position < call.end for call in read(text, schemas) if call.error is None)

        reasoning, content, is_open = split_thoughts(text, is_in_call=is_in_call)
        calls = read(content, schemas)
        if is_open and read(reasoning or "", schemas):
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
        message["tool_calls"] = [call.as_tool_call(index) for index, call in enumerate(calls)]
    return message


_CHANNEL = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?P<header>[^<]*(?:<\|(?:channel|constrain)\|>[^<]*)*)<\|message\|>(?P<body>.*?)"
    r"(?:<\|(?:end|call|return)\|>|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def _parse_channels(text: str, schemas: Schemas) -> Message:
    thoughts, contents, calls, position = list[str](), list[str](), list[Call](), 0
    while match := _CHANNEL.match(text, position):
        start, position = match.start("body"), match.end()
        if recipient := _RECIPIENT.search(match["header"]):
            value, end = decode_json(text, start)
            if end is None:
                error = f"The arguments of {recipient[1]} are not valid JSON."
                calls.append(Call(start, position, recipient[1], match["body"], error=error))
            else:
                calls.append(Call.read(start, end, recipient[1], value))
        else:
            (thoughts if "analysis" in match["header"] else contents).append(match["body"])
    contents += [text[position:]] if text[position:].strip() else []
    return _message("\n".join(thoughts) if thoughts else None, "\n".join(contents), calls)


PLAIN = _tagged("plain", lambda text, schemas: [])
"""Thoughts and content; no call is one."""

HERMES = _tagged("hermes", json_calls("<tool_call>", bare=r"\s*(?:```(?:json)?)?"))

FORMATS = (
    _tagged("llama3", json_calls(r"<\|python_tag\|>", bare=r"\s*")),
    HERMES,
    _tagged(
        "qwen3-coder",
        xml_calls(
            opening=r"(?:<tool_call>\s*)?(?=<function=)|<tool_call>",
            name=r"<function=(?P<name>[^>\n]+)>",
            key=r"<parameter=(?P<key>[^>\n]+)>",
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
            opening="(?:<minimax:tool_call>\\s*)?<invoke(?= )",
            name=r' name="(?P<name>[^"]+)">',
            key=r'<parameter name="(?P<key>[^"]+)">',
            end_of_value="</parameter>",
            end_of_call=r"</invoke>(?:\s*</minimax:tool_call>)?",
        ),
    ),
    _tagged(
        "deepseek-v3",
        header_calls(
            "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>(?P<name>[^\n`<]+)\n```json\n"
        ),
    ),
    _tagged(
        "deepseek-v3.1",
        header_calls("(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>", "(?P<name>[^<\n]+)<｜tool▁sep｜>"),
    ),
    _tagged(
        "kimi",
        header_calls(
            r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>",
            r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*<\|tool_call_argument_begin\|>",
        ),
    ),
    _tagged("gemma", header_calls(r"<\|tool_call>", r"call:(?P<name>[\w.-]+)(?=\{)", braced('<|"|>'))),
    _tagged(
        "functiongemma", header_calls("<start_function_call>", r"call:(?P<name>[\w.-]+)(?=\{)", braced("<escape>"))
    ),
    ToolFormat("gpt-oss", _parse_channels),
    _tagged("mistral", json_calls(r"\[TOOL_CALLS\]")),
    _tagged(
        "mistral-v11",
        header_calls(r"\[TOOL_CALLS\]", r"\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?(?=\s*\{)"),
    ),
    _tagged("command", json_calls(r"<\|START_ACTION\|>")),
    _tagged("phi", json_calls(r"<\|tool_call\|>|functools(?=\[)")),
    _tagged("lfm2", python_calls("<|tool_call_start|>", "<|tool_call_end|>")),
    _tagged("olmo", python_calls("<function_calls>", "</function_calls>")),
    _tagged("pythonic", python_calls("", "")),
)
"""All formats with calls. The first that reads a template's calls is taken: Hermes reads bare JSON too."""
