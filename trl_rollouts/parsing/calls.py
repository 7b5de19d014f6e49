"""One call as a text has it, and the values in it."""

import ast
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

_SPACE = re.compile(r"\s*")
_MAX_DEPTH = 64


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number in JSON")
    return value


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite, parse_float=_finite, object_pairs_hook=_without_repetition)

Schemas = Mapping[str, Mapping[str, Any]]
"""For each tool, the JSON schemas of its arguments."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, or what looks like one."""

    start: int
    """Where it begins in the text."""
    end: int
    name: str = ""
    arguments: Any = None
    id: str | None = None
    """The model's own, in formats that have one; its answer must carry it."""
    error: str | None = None
    """Why it cannot be run."""

    @classmethod
    def read(cls, start: int, end: int, name: Any, arguments: Any, id: Any = None) -> "Call":
        """A call from what stands in the places of its name and its arguments."""
        own_id = id if isinstance(id, str) and id else None
        if not isinstance(name, str) or not name:
            return cls(start, end, "", arguments, own_id, "The tool call has no function name.")
        arguments = read_arguments(arguments)
        if not isinstance(arguments, dict):
            error = f"The arguments of {name} must be a JSON object, not {json.dumps(arguments)[:200]}."
            return cls(start, end, name, arguments, own_id, error)
        return cls(start, end, name, arguments, own_id)


def as_tool_calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The entries of an assistant message's `tool_calls`, each with an id of its own.

    Mistral's templates take ids of nine letters and digits only.
    """
    own = Counter(call.id for call in calls)
    spare = (name for number in itertools.count() if (name := f"call{number:05}") not in own)
    entries = []
    for call in calls:
        function = {"name": call.name, "arguments": call.arguments}
        call_id = call.id if call.id and own[call.id] == 1 else next(spare)
        entry: dict[str, Any] = {"id": call_id, "type": "function", "function": function}
        entries.append(entry if call.error is None else {**entry, "error": call.error})
    return entries


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """The arguments' schemas of tools as a chat template takes them."""
    functions = [tool.get("function", tool) for tool in tools]
    return {
        str(function.get("name")): (function.get("parameters") or {}).get("properties") or {} for function in functions
    }


def read_arguments(value: Any) -> Any:
    """Arguments that were left out, or are a JSON string, as some models and parsers write them."""
    if value is None:
        return {}
    if isinstance(value, str):
        decoded, end = decode_json(value, 0)
        return decoded if end is not None and not value[end:].strip() else value
    return value


def decode_json(text: str, start: int) -> tuple[Any, int | None]:
    """The JSON value that begins at `start`, and where it ends: closing tags and braces in strings do not count.

    A value nested deeper than anybody means it is none: what is deep here overflows somewhere else.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip_space(text, start))
    except (ValueError, RecursionError):
        return None, None
    return (value, end) if _is_shallow(value) else (None, None)


def decode_literal(text: str) -> Any:
    """A Python or JSON literal.

    Raises:
        ValueError: it is none, or nested too deep.
    """
    try:
        return literal(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError) as cause:
        raise ValueError("no literal") from cause


def literal(node: ast.expr) -> Any:
    """The value of a literal's tree as JSON would hold it; JSON's names for `True`, `False` and `None` are known.

    Raises:
        ValueError: it is no literal, nested too deep, or nothing that JSON can hold.
    """
    try:
        value = ast.literal_eval(_JsonNames().visit(node))
        plain = json.loads(json.dumps(value, allow_nan=False)) if _is_shallow(value) else None
    except (TypeError, RecursionError, MemoryError) as cause:
        raise ValueError("no literal") from cause
    if plain is None and value is not None:
        raise ValueError("nested too deep")
    return plain


class _JsonNames(ast.NodeTransformer):
    _VALUES: ClassVar = {"true": True, "false": False, "null": None}

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._VALUES[node.id]) if node.id in self._VALUES else node


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """The value of an argument that is written without quotes, by its declared type; the text where it has none.

    "7" is a number for an integer and a text for a string. What does not fit its type stays text, for the tool to
    refuse in its own words.
    """
    for name in _types(schema):
        with suppress(ValueError):
            if name in _CONVERSIONS:
                return _CONVERSIONS[name](text.strip())
    return text


def unquoted(value: Any, schema: Mapping[str, Any] | None) -> Any:
    """The same for an argument that was quoted, though its type is none of text: Llama 4's template quotes all."""
    return value if not isinstance(value, str) or "string" in _types(schema) else typed(value, schema)


def _types(schema: Mapping[str, Any] | None) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type", [])
    types = [declared] if isinstance(declared, str) else [name for name in declared if isinstance(name, str)]
    for choice in schema.get("anyOf") or schema.get("oneOf") or []:
        types += _types(choice)
    return [*types, "null"] if schema.get("nullable") else types


def _number(*kinds: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value, end = decode_json(text, 0)
        if end != len(text) or type(value) not in kinds:
            raise ValueError("no such number")
        return value

    return convert


def _one_of(values: Mapping[str, Any]) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        if text not in values:
            raise ValueError("no such word")
        return values[text]

    return convert


def _container(kind: type) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        value, end = decode_json(text, 0)
        if end != len(text):
            value = decode_literal(text)  # some templates write Python's repr
        if not isinstance(value, kind):
            raise ValueError(f"no {kind.__name__}")
        return value

    return convert


_CONVERSIONS: dict[str, Callable[[str], Any]] = {
    "integer": _number(int),
    "number": _number(int, float),
    "boolean": _one_of({"true": True, "True": True, "false": False, "False": False}),
    "null": _one_of({"null": None, "None": None}),
    "object": _container(dict),
    "array": _container(list),
}


def skip_space(text: str, start: int) -> int:
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
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
