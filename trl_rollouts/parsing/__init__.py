"""From a completion's text to the assistant's message: reasoning, content, tool calls.

Parsed messages are for environments and for people. They never become tokens again, so a parser may be wrong about a
format without hurting a single training id.

A call that cannot be read stays in `tool_calls`, in its place, with an `error` that its author can learn from.
Arguments are what was written: nothing is stripped, completed or guessed, but for types where the format has none.

    calls      one call, read or not; JSON and typed values
    thoughts   reasoning and the rest
    formats    the formats that model families write calls in
    finding    which of them a chat template speaks
"""

from .calls import read_arguments
from .finding import Parser, find_format, find_parser, parse_hermes
from .formats import FORMATS

__all__ = ["FORMATS", "Parser", "find_format", "find_parser", "parse_hermes", "read_arguments"]
