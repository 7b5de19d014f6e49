"""Frames between the host and a sandboxed process: four bytes of length, then JSON.

A frame from a sandbox is hostile: its length is bounded before anything is allocated, its JSON is data and never
pickle, and whatever is wrong with it is one error. Text is ASCII on the wire, since a snippet may print, or be, half
of a surrogate pair.
"""

import json
import struct
from collections.abc import Callable
from typing import Any

MAX_FRAME_BYTES = 1 << 20
"""Of a frame from a sandbox. The host's own may be of any length."""

MAX_CALL_BYTES = 128 << 10
"""Of a call of one of the host's functions: many may follow one another, and each is read on the host's event loop."""

_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """The other end does not keep to the protocol."""


def encode(message: dict[str, Any], default: Callable[[Any], Any] | None = None) -> bytes:
    """The message as a frame. `default` makes plain data of what JSON does not know, as for `json.dumps`.

    Raises:
        TypeError, ValueError: it holds what JSON cannot.
    """
    body = json.dumps(message, default=default).encode()
    return _LENGTH.pack(len(body)) + body


class Decoder:
    """Puts frames together from pieces of a stream."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self.num_bytes = 0
        """Of the last frame."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left over behind the last frame."""
        return not self._buffer

    def feed(self, piece: bytes) -> None:
        self._buffer += piece

    def next(self) -> dict[str, Any] | None:
        """The next whole frame, or None.

        Raises:
            WireError: it is too long, or is not a JSON object.
        """
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self._max_bytes:
            raise WireError(f"a frame of {length} bytes")
        if len(self._buffer) < _LENGTH.size + length:
            return None
        self.num_bytes = length
        body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
        del self._buffer[: _LENGTH.size + length]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as cause:
            raise WireError(f"a frame that is no JSON ({type(cause).__name__})") from cause
        if not isinstance(message, dict):
            raise WireError("a frame that is no object")
        return message
