"""Readers of calls, one for each kind of writing. `formats` says which family writes which.

A reader takes a turn's text without its thoughts and returns what it calls, in order. It finds a call by the mark that
opens it; from there on the text is a call, or a call that cannot be read, whose error says what is wrong with it.

Behind a call that cannot be read, reading goes on only where its closing mark and the next call's opening one stand
side by side. Else it ends: what looks like a call there may be text of the broken one, and must not be run.
"""

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .calls import Call, Schemas, decode_json, literal, skip_space, typed, unquoted

Reader = Callable[[str, Schemas], list[Call]]

_NOT_JSON = 'The tool call is not valid JSON. Write {"name": <function name>, "arguments": {...}} and close it.'
_MAX_BROKEN = 32
"""Broken calls after which a turn is read no further."""


class _Marks:
    """What opens and what closes the calls of a format, as patterns."""

    def __init__(self, opening: str, closing: str) -> None:
        self._opening, self._closing = re.compile(opening), re.compile(closing or "(?!)")

    def read(self, text: str, position: int, read_one: Callable[[int, int], list[Call]]) -> list[Call]:
        """All calls from `position` on. `read_one` takes where a call begins, and where it goes on behind the mark."""
        calls: list[Call] = []
        match = self._opening.search(text, position)
        while match is not None and sum(call.error is not None for call in calls) < _MAX_BROKEN:
            calls += read_one(match.start(), match.end())
            if calls[-1].error is not None:
                behind = self._opening.search(text, max(match.end(), match.start() + 1))
                stop = behind.start() if behind else len(text)
                closed = self._closing.search(text, match.end(), stop)
                goes_on = closed is not None and not text[closed.end() : stop].strip()
                calls[-1] = replace(calls[-1], end=stop if goes_on else len(text))
            match = self._opening.search(text, max(calls[-1].end, match.start() + 1))
        return calls


def json_calls(opening: str, closing: str, *, bare: str = "") -> Reader:
    """Calls as JSON objects, or lists of them.

    Args:
        opening: a pattern for the mark before one.
        closing: one for the mark behind one; empty where there is none.
        bare: one for what may stand before calls that begin the text without a mark; none by default.
    """
    marks, bare_pattern = _Marks(opening, closing), re.compile(bare) if bare else None

    def read(text: str, schemas: Schemas) -> list[Call]:
        def read_one(start: int, inner: int) -> list[Call]:
            value, end = decode_json(text, inner)
            if end is None:
                return [Call(start, inner, arguments=text[inner:], error=_NOT_JSON)]
            items = value if isinstance(value, list) and value else [value]
            return [
                *(_from_json(item, start, end) for item in items),
                *_one_behind_the_other(text, end, is_marked=True),
            ]

        begin = bare_pattern.match(text) if bare_pattern else None
        calls = list(_one_behind_the_other(text, begin.end(), is_marked=False)) if begin else []
        if calls:
            calls[0] = replace(calls[0], start=0)
        return calls + marks.read(text, calls[-1].end if calls else 0, read_one)

    return read


_NAME, _ARGUMENTS, _ID = ("name", "tool_name"), ("arguments", "parameters"), ("id", "tool_call_id")
_BETWEEN, _LIKE_A_CALL = re.compile(r"(?:[\s,;]|```(?:json)?)*+"), re.compile(r'\{\s*"(?:name|tool_name|type)"')


def _from_json(value: Any, start: int, end: int) -> Call:
    if not isinstance(value, dict):
        return Call(start, end, arguments=value, error=_NOT_JSON)
    if isinstance(value.get("function"), dict):  # as the schemas in the prompt are written
        value = value["function"]
    given = [[key for key in keys if key in value] for keys in (_NAME, _ARGUMENTS, _ID)]
    if len(value) - ("type" in value) > sum(map(bool, given)):
        error = 'The tool call has more than a name and its arguments. Put all of these into "arguments".'
        return Call(start, end, arguments=value, error=error)
    name, arguments, call_id = (value[keys[0]] if keys else None for keys in given)
    return Call.read(start, end, name, arguments, call_id)


def _one_behind_the_other(text: str, position: int, *, is_marked: bool) -> Iterator[Call]:
    """JSON objects with nothing between them but space, a comma, a semicolon or the marks of code.

    Without a mark before them, those that are no calls are an answer.
    """
    while text.startswith("{", start := _end_of(_BETWEEN, text, position)):
        value, end = decode_json(text, start)
        if end is None and (is_marked or _LIKE_A_CALL.match(text, start)):
            yield Call(start, len(text), arguments=text[start:], error=_NOT_JSON)
        if end is None or not (is_marked or _is_call(value)):
            return
        yield _from_json(value, start, end)
        position = end


def _is_call(value: dict[str, Any]) -> bool:
    function = value["function"] if isinstance(value.get("function"), dict) else value
    return bool(function.keys() & set(_NAME) and function.keys() & set(_ARGUMENTS))


def _end_of(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    return match.end() if match else position


Decode = Callable[[str, int], tuple[Any, int | None]]
"""Reads the arguments that begin at a position; where they end, None if they cannot be read."""


def header_calls(*, opening: str, header: str, closing: str, decode: Decode = decode_json) -> Reader:
    """Calls as a mark, a header and the arguments.

    Args:
        opening: a pattern for the mark.
        header: one with the group `name`, and `id` where the model writes one.
        closing: one for the mark behind the arguments; empty where there is none.
        decode: reads the arguments.
    """
    marks, header_pattern = _Marks(opening, closing), re.compile(header)
    rest = re.compile(rf"[\s`]*+(?:{closing}|{opening}|\Z)" if closing else "")

    def read(text: str, schemas: Schemas) -> list[Call]:
        def read_one(start: int, inner: int) -> list[Call]:
            head = header_pattern.match(text, inner)
            if head is None:
                error = "The tool call does not begin with the name of a function and its arguments."
                return [Call(start, inner, arguments=text[inner:], error=error)]
            value, end = decode(text, head.end())
            if end is None or not rest.match(text, end):
                error = f"The arguments of {head['name']} cannot be read, or are not closed."
                return [Call(start, inner, head["name"], text[head.end() :], error=error)]
            return [Call.read(start, end, head["name"], value, head.groupdict().get("id"))]

        return marks.read(text, 0, read_one)

    return read


def xml_calls(
    *, opening: str, name: str, key: str, end_of_value: str, end_of_call: str, lines: bool = False
) -> Reader:
    """Calls with a tag for each argument, whose value is written as it is.

    A value ends at a closing tag that the next argument or the end of the call follows, so it may hold that tag.

    Args:
        opening: a pattern for what a call begins with.
        name: one with the group `name`.
        key: one with the group `key`, for what stands before a value.
        end_of_value: one for what stands behind it.
        end_of_call: one for what ends the call.
        lines: a value stands on lines of its own.
    """
    marks = _Marks(opening, end_of_call)
    tags = _Tags(
        opening=re.compile(opening),
        name=re.compile(name),
        key=re.compile(key),
        before_value=re.compile(rf"\s*{key}" + ("\n?" if lines else "")),
        after_value="\n" if lines else "",
        end_of_call=re.compile(rf"\s*{end_of_call}"),
        again=re.compile(end_of_call),
    )
    value_end = re.compile(rf"{end_of_value}(?=\s*(?:{end_of_call}|{re.sub('P<key>', ':', key)}))")

    def read(text: str, schemas: Schemas) -> list[Call]:
        ends = [match.span() for match in value_end.finditer(text)]
        return marks.read(text, 0, lambda start, inner: [tags.read(text, start, inner, ends, schemas)])

    return read


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tags:
    """The tags of a format, as patterns."""

    opening: re.Pattern[str]
    name: re.Pattern[str]
    key: re.Pattern[str]
    before_value: re.Pattern[str]
    after_value: str
    end_of_call: re.Pattern[str]
    again: re.Pattern[str]

    def read(self, text: str, start: int, inner: int, ends: list[tuple[int, int]], schemas: Schemas) -> Call:
        """The call that begins at `start`, and goes on at `inner`. `ends`: where values end, in the whole text."""
        head = self.name.match(text, inner)
        if head is None:
            return Call(start, inner, error="The tool call does not begin with the name of a function.")
        called, arguments, position = head["name"], dict[str, Any](), head.end()

        def broken(what: str) -> Call:
            return Call(start, position, called, arguments, error=f"{what} Write every tag of the call, once.")

        while found := self.before_value.match(text, position):
            index = bisect_left(ends, (found.end(), 0))
            end = ends[index] if index < len(ends) else None
            if end is None or self.key.search(text, found.end(), end[0]) or found["key"] in arguments:
                return broken(f"The argument {found['key']} of {called} is not closed, or given twice.")
            value = text[found.end() : end[0]].removesuffix(self.after_value)
            arguments[found["key"]] = typed(value, schemas.get(called, {}).get(found["key"]))
            position = end[1]
        if (closed := self.end_of_call.match(text, position)) is None:
            return broken(f"The call of {called} is not closed, or has text between its arguments.")
        again, behind = self.again.search(text, closed.end()), self.opening.search(text, closed.end())
        if again and (behind is None or again.start() < behind.start()):
            return broken(f"The call of {called} is closed twice.")
        return Call.read(start, closed.end(), called, arguments)


_MAX_ENDS, _MAX_CODE_CHARS = 4, 50_000


def python_calls(opening: str, closing: str) -> Reader:
    """Calls with keyword arguments, in a list or one a line, between two texts.

    Both texts empty: a turn that is such a list and nothing else.
    """

    def ends(text: str, start: int) -> Iterator[int]:
        """Where a block may end: a string in it may hold the closing text."""
        end = text.find(closing, start) if closing else len(text)
        for _ in range(_MAX_ENDS if closing else 1):
            if end < 0:
                return
            yield end
            end = text.find(closing, end + len(closing))

    def read_block(text: str, start: int, schemas: Schemas) -> list[Call]:
        inner, end = start + len(opening), len(text)
        for end in ends(text, inner):
            if end - inner <= _MAX_CODE_CHARS and (nodes := _call_nodes(text[inner:end].strip())):
                return [_from_node(node, start, end, schemas) for node in nodes]
        error = "The tool call is not a list of Python calls that is closed."
        return [Call(start, end, arguments=text[inner:end], error=error)]

    def read(text: str, schemas: Schemas) -> list[Call]:
        if not opening:
            return read_block(text, 0, schemas) if re.match(r"\s*\[\s*[A-Za-z_][\w.]*\(", text) else []
        marks = _Marks(re.escape(opening), re.escape(closing))
        return marks.read(text, 0, lambda start, inner: read_block(text, start, schemas))

    return read


def _call_nodes(code: str) -> list[ast.Call]:
    """The calls that `code` is made of, a list of them or one behind the other; none where it is anything else."""
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    trees = [statement.value for statement in statements if isinstance(statement, ast.Expr)]
    nodes = [node for tree in trees for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return calls if len(calls) == len(nodes) and len(trees) == len(statements) else []


def _from_node(node: ast.Call, start: int, end: int, schemas: Schemas) -> Call:
    keys = [keyword.arg or "" for keyword in node.keywords]
    try:
        name = ast.unparse(node.func)
        values = [literal(keyword.value) for keyword in node.keywords]
    except (ValueError, RecursionError):
        return Call(start, end, error="The arguments of a call must be literals, and its name a name.")
    if node.args or "" in keys or len(set(keys)) < len(keys):
        return Call(start, end, name, error=f"Write each argument of {name} by its name, once.")
    known = schemas.get(name, {})
    pairs = zip(keys, values, strict=True)
    return Call.read(start, end, name, {key: unquoted(value, known.get(key)) for key, value in pairs})


def braced(quote: str) -> Decode:
    """A decoder of JSON with bare keys, and with `quote` around strings in place of quotation marks."""
    mark = re.escape(quote)
    token = re.compile(
        rf'{mark}(?P<string>.*?){mark}|(?P<json>"(?:[^"\\]|\\.)*+")|(?P<word>[^\s{{}}\[\],:<"]++)(?P<key>\s*+(?=:))?|(?P<other>[^"])',
        re.DOTALL,
    )

    def decode(text: str, start: int) -> tuple[Any, int | None]:
        parts, depth, position = list[str](), 0, skip_space(text, start)
        while match := token.match(text, position):
            position = match.end()
            if match["string"] is not None:
                parts.append(json.dumps(match["string"]))
            elif match["key"] is not None:
                parts.append(json.dumps(match["word"]))
            else:
                parts.append(match[0])
                depth += (match[0] in ("{", "[")) - (match[0] in ("}", "]"))
                if depth <= 0:
                    value, end = decode_json("".join(parts), 0)
                    return (None, None) if end is None else (value, position)
        return None, None

    return decode
