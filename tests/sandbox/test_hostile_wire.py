"""Whatever a session sends ends that session at most: nothing is raised in the host, and nothing waits for ever."""

import asyncio
import json
import struct
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from harness import ENDED, Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_rollouts.sandbox import ExecResult
from trl_rollouts.sandbox.wire import MAX_FRAME_BYTES, Decoder, WireError, encode

TIMEOUT_S = 0.2
NAMES = "status stdout stderr value error number call args kwargs ready failed pidfd code".split()
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec="utf-8"), max_size=20)
ODD = st.sampled_from(["ok", "timeout", "killed", "host_add", "\ud800", 1, 2, [], {}, "x" * 70_000, 10**400])
VALUES = st.recursive(
    PLAIN | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
FRAMES = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=7) | VALUES


async def sent(stage: Stage, data: bytes) -> Sequence[ExecResult]:
    """What the host makes of a session that sends this beside its answer to one snippet, and of the next two."""
    session = await stage._open()
    try:
        code = f"import os\nrest = {data!r}\nwhile rest: rest = rest[os.write(3, rest):]"
        return [await session.run(code, TIMEOUT_S), await session.run("40 + 2", TIMEOUT_S), await session.run("", 1.0)]
    finally:
        await session.close()


def check(results: Sequence[ExecResult], took_s: float) -> None:
    assert took_s < 10.0
    for first, then in pairwise(results):
        if first.status in ENDED:
            assert then.status == "died"
    for result in results:
        for text in (result.stdout, result.stderr, result.value, result.error):
            assert text is None or (type(text) is str and len(text.encode()) < 200_000)


@pytest.mark.timeout(300)
@settings(max_examples=60)
@given(data=st.binary(min_size=1, max_size=300))
def test_bytes_that_nobody_asked_for(runner: asyncio.Runner, stage: Stage, data: bytes) -> None:
    started_at = time.monotonic()
    check(runner.run(sent(stage, data)), time.monotonic() - started_at)


@pytest.mark.timeout(300)
@settings(max_examples=150)
@given(values=st.lists(FRAMES, min_size=1, max_size=3))
def test_frames_that_nobody_asked_for(runner: asyncio.Runner, stage: Stage, values: list[Any]) -> None:
    bodies = [json.dumps(value).encode() for value in values]
    started_at = time.monotonic()
    results = runner.run(sent(stage, b"".join(struct.pack("<I", len(body)) + body for body in bodies)))
    check(results, time.monotonic() - started_at)


@given(data=st.binary(max_size=2000), sizes=st.lists(st.integers(1, 300), min_size=1))
def test_the_decoder_raises_one_error_or_waits(data: bytes, sizes: list[int]) -> None:
    decoder = Decoder()
    while data:
        size = sizes[len(data) % len(sizes)]
        decoder.feed(data[:size])
        data = data[size:]
        try:
            while (frame := decoder.next()) is not None:
                assert isinstance(frame, dict)
        except WireError:
            return


@given(messages=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=4), size=st.integers(1, 100))
def test_frames_come_through_whole_however_they_are_cut(messages: list[dict[str, Any]], size: int) -> None:
    decoder, data, received = Decoder(), b"".join(map(encode, messages)), []
    for at in range(0, len(data), size):
        decoder.feed(data[at : at + size])
        while (frame := decoder.next()) is not None:
            received.append(frame)
    assert json.dumps(received) == json.dumps(messages)
    assert decoder.is_empty


def test_a_length_beyond_the_limit_is_refused_before_anything_follows() -> None:
    decoder = Decoder()
    decoder.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(WireError, match="a frame of 1048577 bytes"):
        decoder.next()
