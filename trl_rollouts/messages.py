"""Messages as a chat template takes them."""

import json
from typing import Any

from .errors import TemplateError
from .trajectory import Message


def message_text(message: Message) -> str:
    """The message's content as text.

    Raises:
        TemplateError: it has content that is none, such as an image.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content}
    if kinds - {"text"}:
        raise TemplateError(
            f"A message has content of type {sorted(kinds)}. Only text can be trained through a rollout_func: TRL "
            "takes no images back from one."
        )
    texts = [part.get("text") or "" for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise TemplateError(f"A message has content that is no text: {content!r:.200}.")
    return "".join(texts)


def plain(message: Message) -> Message:
    """The message with text for its content, without its task, and without the nulls that Arrow adds."""
    plain = {key: value for key, value in message.items() if key == "content" or (key != "task" and value is not None)}
    if "tool_calls" in plain:
        plain["tool_calls"] = _without_nulls(plain["tool_calls"])
    return {**plain, "content": message_text(message)} if isinstance(plain.get("content"), list) else plain


def with_text_behind(prompt: list[Message], text: str) -> list[Message]:
    """The prompt, and what an environment has to say first: a paragraph of its last message, if that is a user's."""
    *others, last = prompt
    if last["role"] != "user":
        return [*prompt, {"role": "user", "content": text}]
    words = message_text(last)
    return [*others, {**last, "content": f"{words}\n\n{text}" if words else text}]


def in_parts(message: Message) -> Message:
    """The message with its text as a list of parts."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def arguments_as_text(message: Message) -> Message:
    """The message with the arguments of its calls as JSON."""

    def as_text(function: dict[str, Any]) -> dict[str, Any]:
        arguments = function.get("arguments")
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": text}

    return _with_functions(message, as_text)


def marked(message: Message, mark: str) -> Message:
    """The message with `mark` for its text, and for the name of what it calls."""
    shown = {**message, "content": f"{mark}text"} if message_text(message) else message
    return _with_functions(shown, lambda function: {**function, "name": f"{mark}call"})


def _with_functions(message: Message, change: Any) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": change(call["function"])} if "function" in call else change(call)
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _without_nulls(value: Any) -> Any:
    """Arrow gives every row's calls the arguments of all rows' calls, null where a row has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
