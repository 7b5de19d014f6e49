"""A model's reasoning, and where it ends."""

import re
from collections.abc import Callable

_TAGS = (
    ("<think>", "</think>"),
    ("<|channel>thought", "<channel|>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)
"""What model families open and close their reasoning with."""


def opened_thoughts(prompt: str) -> str:
    """The tag with which a prompt opens the model's reasoning; empty where it does not.

    A completion of such a prompt begins inside its thoughts, and has no tag that says so.
    """
    return next((opening for opening, _ in _TAGS if prompt.rstrip().endswith(opening)), "")


def split_thoughts(text: str, *, is_in_call: Callable[[int], bool]) -> tuple[str | None, str, bool]:
    """Thoughts, the rest, and whether the thoughts were left open.

    Args:
        text: a completion, behind the tag that its prompt has opened.
        is_in_call: whether a position lies inside a call. A `</think>` that nothing has opened still ends thoughts
            (templates that drop the tag from earlier turns leave it), but not one in a call's arguments.
    """
    for opening, closing in _TAGS:
        if text.lstrip().startswith(opening):
            before, closed, after = text.partition(closing)
            return before.lstrip().removeprefix(opening).strip("\n"), after.lstrip("\n"), not closed
    before, closed, after = text.partition("</think>")
    if closed and "<think>" not in before and not is_in_call(len(before)):
        return before.strip("\n"), after.lstrip("\n"), False
    return None, text, False


def later_thoughts(content: str, calls: list[tuple[int, int]]) -> tuple[str, str, bool] | None:
    """Thoughts that open before the last call, and in none: the thoughts, the content without them, and whether they
    were left open.
    """
    for match in _OPENING.finditer(content, 0, calls[-1][0] if calls else 0):
        if not any(start < match.start() < end for start, end in calls):
            inner, closed, after = content[match.end() :].partition(_CLOSING[match[0]])
            return inner.strip("\n"), content[: match.start()] + after, not closed
    return None


_CLOSING = dict(_TAGS)
_OPENING = re.compile("|".join(map(re.escape, _CLOSING)))
