"""Readers of calls, one for each kind of writing. `formats` says which family writes which.

A reader takes a turn's text without its thoughts and returns what it calls, in order. It finds a call by the mark that
opens it; from there on the text is a call, or a call that cannot be read, whose error says what is wrong with it. All
are linear in the text's length, but for `python_calls`, which tries a bounded number of ends.
"""

import ast
import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any

from .calls import Call, Schemas, decode_json, literal, skip_space, typed

Reader = Callable[[str, Schemas], list[Call]]

_NOT_JSON = 'The tool call is not valid JSON. Write {"name": <function name>, "arguments": {...}} and close it.'


def json_calls(opening: str, *, bare: str = "") -> Reader:
    """Calls as JSON objects, or lists of them.

    Args:
        opening: a pattern for the mark before one.
        bare: a pattern for what may stand before a call that begins the text without the mark; none by default.
    """
    pattern, bare_pattern = re.compile(opening), re.compile(bare) if bare else None

    def read(text: str, schemas: Schemas) -> list[Call]:
        match = pattern.search(text)
        if match is None and bare_pattern and (begin := bare_pattern.match(text)):
            whole = list(_one_behind_the_other(text, begin.end()))
            return [_from_json(value, start if n else 0, end) for n, (value, start, end) in enumerate(whole)]
        calls: list[Call] = []
        while match is not None:
            value, end = decode_json(text, match.end())
            if end is None:  # no JSON: up to the next call, or the end
                behind = pattern.search(text, match.end())
                stop = behind.start() if behind else len(text)
                calls.append(Call(match.start(), stop, arguments=text[match.end() : stop].strip(), error=_NOT_JSON))
            else:
                for item in value if isinstance(value, list) and value else [value]:
                    calls.append(_from_json(item, match.start(), end))
                calls += [_from_json(*found) for found in _one_behind_the_other(text, end)]
                stop = calls[-1].end
            match = pattern.search(text, stop)
        return calls

    return read


def _from_json(value: Any, start: int, end: int) -> Call:
    if not isinstance(value, dict):
        return Call(start, end, arguments=value, error=_NOT_JSON)
    name, arguments, call_id = (_first(value, keys) for keys in (_NAME, _ARGUMENTS, _ID))
    return Call.read(start, end, name, arguments, call_id)


_NAME, _ARGUMENTS, _ID = ("name", "tool_name"), ("arguments", "parameters"), ("id", "tool_call_id")


def _first(value: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((value[key] for key in keys if key in value), None)


def _one_behind_the_other(text: str, position: int) -> Iterator[tuple[Any, int, int]]:
    """Whole calls, with nothing between them but space or a semicolon."""
    while text.startswith("{", start := skip_space(text, position)):
        value, end = decode_json(text, start)
        if end is None or not (value.keys() & set(_NAME) and value.keys() & set(_ARGUMENTS)):
            return
        yield value, start, end
        position = end + text.startswith(";", end)


Decode = Callable[[str, int, int], tuple[Any, int | None]]
"""Reads the arguments that begin at one position and end before another; where they end, None if they cannot be."""


def _json(text: str, start: int, stop: int) -> tuple[Any, int | None]:
    return decode_json(text, start)  # whose strings may hold what opens the next call


def header_calls(opening: str, header: str, decode: Decode = _json) -> Reader:
    """Calls as a mark, a header and the arguments.

    Args:
        opening: a pattern for the mark.
        header: one with the group `name`, and `id` where the model writes one.
        decode: reads the arguments.
    """
    open_pattern, header_pattern = re.compile(opening), re.compile(header)

    def read_one(text: str, start: int, inner: int, stop: int) -> Call:
        head = header_pattern.match(text, inner)
        if head is None:
            error = "The tool call does not begin with the name of a function and its arguments."
            return Call(start, stop, arguments=text[inner:stop], error=error)
        value, end = decode(text, head.end(), stop)
        if end is None:
            error = f"The arguments of {head['name']} are not valid JSON."
            return Call(start, stop, head["name"], text[head.end() : stop], error=error)
        return Call.read(start, end, head["name"], value, head.groupdict().get("id"))

    def read(text: str, schemas: Schemas) -> list[Call]:
        calls: list[Call] = []
        match = open_pattern.search(text)
        while match is not None:
            behind = open_pattern.search(text, match.end())
            calls.append(read_one(text, match.start(), match.end(), behind.start() if behind else len(text)))
            match = open_pattern.search(text, max(match.end(), calls[-1].end))
        return calls

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
    edge = "\n?" if lines else ""
    open_pattern, name_pattern, end_pattern = re.compile(opening), re.compile(name), re.compile(rf"\s*{end_of_call}")
    key_pattern = re.compile(rf"\s*{key}{edge}")
    value_end = re.compile(rf"{edge}{end_of_value}(?=\s*(?:{end_of_call}|{re.sub('P<key>', ':', key)}))")

    def read_one(text: str, start: int, inner: int, ends: list[tuple[int, int]], schemas: Schemas) -> Call:
        head = name_pattern.match(text, inner)
        if head is None:
            return Call(start, inner, error="The tool call does not begin with the name of a function.")
        called, arguments, position = head["name"], dict[str, Any](), head.end()

        def broken(what: str) -> Call:
            return Call(start, position, called, arguments, error=f"{what} Write every tag of the call.")

        while found := key_pattern.match(text, position):
            index = bisect_left(ends, (found.end(), 0))
            end = ends[index] if index < len(ends) else None
            if end is None or key_pattern.search(text, found.end(), end[0]) or found["key"] in arguments:
                return broken(f"The argument {found['key']} of {called} is not closed, or given twice.")
            value = text[found.end() : end[0]]
            arguments[found["key"]] = typed(value, schemas.get(called, {}).get(found["key"]))
            position = end[1]
        if (closed := end_pattern.match(text, position)) is None:
            return broken(f"The call of {called} is not closed, or has text between its arguments.")
        return Call.read(start, closed.end(), called, arguments)

    def read(text: str, schemas: Schemas) -> list[Call]:
        ends = [match.span() for match in value_end.finditer(text)]
        calls: list[Call] = []
        match = open_pattern.search(text)
        while match is not None:
            calls.append(read_one(text, match.start(), match.end(), ends, schemas))
            match = open_pattern.search(text, max(match.end(), calls[-1].end))
        return calls

    return read


_MAX_ENDS = 8


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
            if nodes := _call_nodes(text[inner:end].strip()):
                return [_from_node(node, start, end, schemas) for node in nodes]
        error = "The tool call is not a list of Python calls that is closed."
        return [Call(start, end, arguments=text[inner:end], error=error)]

    def read(text: str, schemas: Schemas) -> list[Call]:
        if not opening:
            return read_block(text, 0, schemas) if re.match(r"\s*\[\s*[A-Za-z_][\w.]*\(", text) else []
        calls: list[Call] = []
        start = text.find(opening)
        while start >= 0:
            calls += read_block(text, start, schemas)
            start = text.find(opening, max(calls[-1].end, start + len(opening)))
        return calls

    return read


def _call_nodes(code: str) -> list[ast.Call]:
    """The calls that `code` is made of; none where it is anything else."""
    try:
        trees = [ast.parse(line, mode="eval").body for line in ([code] if code[:1] == "[" else code.splitlines())]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    nodes = [node for tree in trees for node in (tree.elts if isinstance(tree, ast.List) else [tree])]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return calls if len(calls) == len(nodes) else []


def _from_node(node: ast.Call, start: int, end: int, schemas: Schemas) -> Call:
    name, keys = ast.unparse(node.func), [keyword.arg or "" for keyword in node.keywords]
    if node.args or "" in keys or len(set(keys)) < len(keys):
        return Call(start, end, name, error=f"Write each argument of {name} by its name, once.")
    try:
        values = [literal(keyword.value) for keyword in node.keywords]
    except ValueError:
        return Call(start, end, name, error=f"The arguments of {name} must be literals.")
    known = schemas.get(name, {})
    pairs = zip(keys, values, strict=True)
    return Call.read(start, end, name, {k: typed(v, known.get(k)) if isinstance(v, str) else v for k, v in pairs})


def braced(quote: str) -> Decode:
    """A decoder of JSON with bare keys, and with `quote` around strings in place of quotation marks."""
    mark = re.escape(quote)
    token = re.compile(
        rf'{mark}(?P<string>.*?){mark}|(?P<json>"(?:[^"\\]|\\.)*+")|(?P<word>[^\s{{}}\[\],:<"]++)(?P<key>\s*+(?=:))?|(?P<other>.)',
        re.DOTALL,
    )

    def decode(text: str, start: int, stop: int) -> tuple[Any, int | None]:
        parts, depth, position = list[str](), 0, skip_space(text, start)
        while match := token.match(text, position, stop):
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
