"""What a session says a snippet did, checked: the right kind, of bounded length, valid Unicode."""

from typing import Any

from . import ExecResult, ExecStatus
from .clock import Clock
from .runner import MAX_OUTPUT_BYTES, cut
from .wire import WireError

_MAX_TEXT_CHARS = MAX_OUTPUT_BYTES + 100
"""The session's own code has cut its texts, and says how much is missing."""

_STATUSES = {str(status) for status in (ExecStatus.OK, ExecStatus.ERROR, ExecStatus.EXIT, ExecStatus.TIMEOUT)}


def result_of(frame: dict[str, Any], number: int, clock: Clock) -> ExecResult:
    """The answer to snippet `number`.

    Raises:
        WireError: it is none.
    """
    status, stdout, stderr = frame.get("status"), frame.get("stdout"), frame.get("stderr")
    value, error = frame.get("value"), frame.get("error")
    if frame.get("number") != number:  # the true answer to a snippet that had forged one
        raise WireError("an answer to another snippet")
    if (
        not (isinstance(status, str) and status in _STATUSES)
        or (status == ExecStatus.TIMEOUT and clock.interrupted_at_s is None)
        or not (isinstance(stdout, str) and isinstance(stderr, str))
        or not (isinstance(value, str | None) and isinstance(error, str | None))
    ):
        raise WireError("an answer that is none")
    if status == ExecStatus.TIMEOUT:
        error = f"The time limit of {clock.timeout_s:g} s passed and the code was interrupted."
    return ExecResult(
        ExecStatus(str(status)),
        _text(stdout),
        _text(stderr),
        None if value is None else _text(value),
        None if error is None else _text(error),
        duration_s=clock.elapsed_s(),
    )


def _text(text: str) -> str:
    return str(clean(cut(text, _MAX_TEXT_CHARS)))


def clean(value: Any) -> Any:
    """The value with every text in it valid Unicode."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [clean(item) for item in value]
    return {clean(key): clean(item) for key, item in value.items()} if isinstance(value, dict) else value
