"""An answer of the fake server, or what comes in place of one, as bytes on the wire."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn

from aiohttp import web

from .dialect import Answer
from .faults import BrokenBody, CutOff, Garbage, Late, Reset, Restart, Silence, Status, Trickle

Instead = Status | Reset | Silence | Restart
OnTheWire = BrokenBody | CutOff | Garbage | Trickle | Late

_NUM_PIECES = 20


def whole(answer: Answer) -> web.Response:
    """The answer as it is meant to be."""
    if isinstance(answer.body, str):
        return web.Response(text=answer.body)
    return web.Response() if answer.body is None else web.json_response(answer.body)


async def instead(fault: Instead, request: web.Request) -> web.StreamResponse:
    """What comes in place of an answer."""
    match fault:
        case Status(code, None):
            return web.Response(status=code, text="Internal Server Error")
        case Status(code, str() as text):
            return web.Response(status=code, text=text)
        case Status(code, error):
            return web.json_response(error, status=code)
        case Silence() | Restart():  # a restart drops the connection, as any other
            await for_ever()
        case Reset():
            if (transport := request.transport) is not None:
                # Lingering for zero seconds makes closing a TCP reset.
                linger = struct.pack("ii", 1, 0)
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                transport.abort()
            return web.Response()


async def spoiled(fault: OnTheWire, answer: Answer, request: web.Request) -> web.StreamResponse:
    """The answer, right in its content, and wrong in its bytes or their time."""
    text = json.dumps(answer.body).encode()
    match fault:
        case BrokenBody():
            return web.Response(body=text[: len(text) // 2], content_type="application/json")
        case Garbage():
            return web.Response(body=b"\xff\xfe\xfd" + text, content_type="application/json", charset="utf-8")
        case Late(delay_s):
            await asyncio.sleep(delay_s)
            return whole(answer)
        case Trickle(over_s):
            size = -(-len(text) // _NUM_PIECES)
            pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
            return await _in_pieces(pieces, len(text), over_s / len(pieces), request)
        case CutOff():
            response = await _in_pieces([text[: len(text) // 2]], len(text), 0.0, request)
            if request.transport is not None:
                request.transport.close()
            return response


async def for_ever() -> NoReturn:
    """Until the loop ends, which cancels it."""
    while True:
        await asyncio.sleep(3600.0)


async def _in_pieces(
    pieces: Sequence[bytes], num_promised: int, pause_s: float, request: web.Request
) -> web.StreamResponse:
    """Headers that promise so many bytes, and then, each after a pause, the pieces."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(num_promised)})
    with contextlib.suppress(ConnectionError):  # nobody waits for it any more
        await response.prepare(request)
        for piece in pieces:
            await asyncio.sleep(pause_s)
            await response.write(piece)
    return response
