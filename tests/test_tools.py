"""Functions as tools: every call gets an answer that the model can learn from."""

import asyncio
import sys
import time
from contextlib import suppress
from typing import Any, Literal

import pytest

from trl_rollouts import SetupError, tool_rollout
from trl_rollouts.tools import Tool, ToolEnv


def multiply(a: int, b: int = 2) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


async def search(query: str, where: Literal["web", "wiki"] = "web") -> list[str]:
    """Search.

    Args:
        query: What for.
        where: In which index.
    """
    return [query, where]


def leave() -> None:
    """Leave."""
    sys.exit(3)


def fail(text: str) -> str:
    """Fail.

    Args:
        text: Why.
    """
    raise TimeoutError(text)


def sleep(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return f"slept {seconds}"


def step(*calls: tuple[str, Any], timeout_s: float = 5.0) -> tuple[list[str], list[dict[str, Any]]]:
    """What the model is told, and the records, for one turn with these calls."""
    env = ToolEnv([Tool(f) for f in (multiply, search, leave, fail, sleep)], timeout_s=timeout_s)
    items = [
        {"id": f"call_{i}", "function": {"name": name, "arguments": args}} for i, (name, args) in enumerate(calls)
    ]
    result = asyncio.run(env.step({"role": "assistant", "content": "", "tool_calls": items}))
    return [message["content"] for message in result.messages], result.info["tool_calls"]


def test_sync_and_async_functions_are_called_and_data_is_answered_as_json() -> None:
    contents, records = step(("multiply", {"a": 7, "b": 8}), ("search", {"query": "x"}))
    assert contents == ["56", '["x", "web"]']
    assert [record["result"] for record in records] == [56, ["x", "web"]]
    assert [record["error"] for record in records] == [None, None]


def test_a_value_of_another_type_is_converted_where_nothing_is_lost() -> None:
    contents, _ = step(("multiply", {"a": "7", "b": 8.0}))
    assert contents == ["56"]


@pytest.mark.parametrize(
    ("name", "arguments", "kind", "said"),
    [
        ("solve_equation", {}, "unknown_tool", "there is no tool 'solve_equation'. The tools are: multiply, search"),
        ("multiply", {}, "invalid_arguments", "multiply needs the argument a."),
        ("multiply", {"a": 1, "c": 2}, "invalid_arguments", "multiply has no argument c. Its arguments are: a, b."),
        ("multiply", {"a": 1.5}, "invalid_arguments", "multiply: argument a=1.5: Input should be a valid integer"),
        ("search", {"query": "x", "where": "moon"}, "invalid_arguments", "Input should be 'web' or 'wiki'"),
        ("fail", {"text": "no route"}, "exception", "Error: TimeoutError: no route"),
        ("leave", {}, "exception", "SystemExit: 3"),
    ],
)
def test_a_bad_call_is_answered_in_words(name: str, arguments: Any, kind: str, said: str) -> None:
    [content], [record] = step((name, arguments))
    assert said in content
    assert record["error"] == kind
    assert record["result"] is None


def test_a_call_that_could_not_be_read_is_answered_with_what_is_wrong() -> None:
    env = ToolEnv([Tool(multiply)], timeout_s=1.0)
    call = {"id": "call_0", "function": {"name": "", "arguments": "{"}, "error": "The tool call is not valid JSON."}
    result = asyncio.run(env.step({"role": "assistant", "content": "", "tool_calls": [call]}))
    assert result.messages == [
        {"role": "tool", "tool_call_id": "call_0", "name": "", "content": "Error: The tool call is not valid JSON."}
    ]
    assert not result.terminated


def test_a_tool_that_hangs_is_given_up_at_its_limit() -> None:
    started = time.monotonic()
    [content], [record] = step(("sleep", {"seconds": 3}), timeout_s=0.1)
    assert time.monotonic() - started < 2
    assert content == "Error: sleep took longer than 0.1 seconds and was given up."
    assert record["error"] == "timeout"


def test_a_tool_that_catches_its_cancellation_is_given_up_too() -> None:
    async def stubborn(times: int) -> str:
        """Go on.

        Args:
            times: How often.
        """
        for _ in range(times):
            with suppress(BaseException):
                await asyncio.sleep(0.2)
        return "late"

    async def turn() -> Any:
        call = {"function": {"name": "stubborn", "arguments": {"times": 3}}}
        return await ToolEnv([Tool(stubborn)], timeout_s=0.1).step({"role": "assistant", "tool_calls": [call]})

    started = time.monotonic()
    loop = asyncio.new_event_loop()
    result = loop.run_until_complete(turn())
    assert time.monotonic() - started < 1
    assert result.info["tool_calls"][0]["error"] == "timeout"
    loop.run_until_complete(asyncio.sleep(0.8))  # until it is through
    loop.close()


def test_only_so_many_calls_of_a_turn_are_run() -> None:
    contents, records = step(*[("multiply", {"a": i}) for i in range(100)])
    assert contents[31:33] == ["62", "Error: only the first 32 calls of a turn are run."]
    assert [record["error"] for record in records[:33]] == [None] * 32 + ["too_many_calls"]


def test_the_calls_of_a_turn_run_at_the_same_time_and_are_answered_in_order() -> None:
    started = time.monotonic()
    contents, _ = step(("sleep", {"seconds": 0.4}), ("sleep", {"seconds": 0.1}), ("sleep", {"seconds": 0.3}))
    assert contents == ["slept 0.4", "slept 0.1", "slept 0.3"]
    assert time.monotonic() - started < 0.75


def test_a_result_that_cannot_be_written_down_is_an_answered_error() -> None:
    def power(base: int, exponent: int) -> int:
        """Raise to a power.

        Args:
            base: What.
            exponent: How often.
        """
        return base**exponent

    call = {"function": {"name": "power", "arguments": {"base": 10, "exponent": 5000}}}
    result = asyncio.run(ToolEnv([Tool(power)], timeout_s=5.0).step({"role": "assistant", "tool_calls": [call]}))
    assert result.messages[0]["content"].startswith("Error: ValueError: Exceeds the limit")


def test_an_answer_without_a_call_ends_the_episode() -> None:
    result = asyncio.run(ToolEnv([Tool(multiply)], timeout_s=1.0).step({"role": "assistant", "content": "56"}))
    assert result.terminated
    assert result.messages == []


def test_a_schema_is_made_of_hints_and_docstring() -> None:
    function = Tool(multiply).schema["function"]
    assert function["name"] == "multiply"
    assert function["parameters"]["required"] == ["a"]
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first factor."}


def test_a_tool_that_cannot_be_described_is_refused_when_it_is_passed() -> None:
    def silent(a: int) -> int:
        return a

    def untyped(a):  # type: ignore[no-untyped-def]
        """Do it.

        Args:
            a: Something.
        """
        return a

    def anything(**options: int) -> int:
        """Do it.

        Args:
            options: Something.
        """
        return len(options)

    with pytest.raises(SetupError, match=r"takes \*\*options: int; a call names each argument"):
        tool_rollout([anything])
    for function in (silent, untyped):
        with pytest.raises(SetupError, match=f"{function.__name__} cannot be described.*Args:"):
            tool_rollout([function])
    with pytest.raises(SetupError, match="needs tools"):
        tool_rollout([])
    with pytest.raises(SetupError, match="different names"):
        tool_rollout([multiply, multiply])


def test_the_nearest_name_is_suggested() -> None:
    [content], _ = step(("multiplly", {"a": 1}))
    assert content.startswith("Error: there is no tool 'multiplly'. Did you mean multiply? The tools are: multiply,")


def lookup(code: str, words: list[str], limit: int | None = None) -> str:
    """Look up.

    Args:
        code: A postal code.
        words: What to look for.
        limit: How many.
    """
    return f"{code!r} {words!r} {limit!r}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"code": 75001, "words": ["a"]}, "'75001' ['a'] None"),
        ({"code": "75001", "words": '["a", "b"]'}, "'75001' ['a', 'b'] None"),
        ({"code": "75001", "words": [], "limit": "3"}, "'75001' [] 3"),
        ({"code": "75001", "words": [], "limit": "null"}, "'75001' [] None"),
        ({"code": "75001", "words": "a"}, 'Error: lookup: argument words="a": Input should be a valid list.'),
        ({"code": None, "words": []}, "Error: lookup: argument code=null: Input should be a valid string."),
    ],
)
def test_numbers_become_text_and_text_that_is_json_is_read(arguments: dict[str, Any], said: str) -> None:
    item = {"function": {"name": "lookup", "arguments": arguments}}
    result = asyncio.run(ToolEnv([Tool(lookup)], timeout_s=5.0).step({"role": "assistant", "tool_calls": [item]}))
    assert result.messages[0]["content"] == said


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def complain(long: bool) -> None:
    """Complain.

    Args:
        long: In many lines.
    """
    raise ValueError("one\n  two\n" * 1000) if long else Unspeakable


@pytest.mark.parametrize(
    ("long", "said"),
    [(True, "Error: ValueError: one two one two"), (False, "Error: Unspeakable: (its message cannot be read)")],
)
def test_an_exception_is_one_short_line(long: bool, said: str) -> None:
    item = {"function": {"name": "complain", "arguments": {"long": long}}}
    result = asyncio.run(ToolEnv([Tool(complain)], timeout_s=5.0).step({"role": "assistant", "tool_calls": [item]}))
    content = result.messages[0]["content"]
    assert content.startswith(said)
    assert "\n" not in content
    assert len(content) < 520


@pytest.mark.parametrize(("arguments", "ends"), [({"a": 7}, True), ({"c": 7}, False)])
def test_a_stop_tool_ends_the_episode_once_it_has_returned(arguments: dict[str, int], ends: bool) -> None:
    env = ToolEnv([Tool(multiply)], timeout_s=5.0, stop_tools=["multiply"])
    item = {"function": {"name": "multiply", "arguments": arguments}}
    assert asyncio.run(env.step({"role": "assistant", "tool_calls": [item]})).terminated is ends


def test_a_row_may_offer_some_of_the_tools() -> None:
    env = ToolEnv([Tool(multiply), Tool(search)], timeout_s=5.0)
    asyncio.run(env.reset([{"role": "user", "content": "?", "task": {"tool_names": ["search"]}}]))
    assert [schema["function"]["name"] for schema in env.tools] == ["search"]
    item = {"function": {"name": "multiply", "arguments": {"a": 7}}}
    result = asyncio.run(env.step({"role": "assistant", "tool_calls": [item]}))
    assert result.messages[0]["content"] == "Error: there is no tool 'multiply'. The tools are: search."
    assert result.info["tool_calls"][0]["error"] == "unknown_tool"


@pytest.mark.parametrize("names", ["search", ["serch"], [1]])
def test_a_row_that_offers_other_tools_is_refused_with_those_there_are(names: Any) -> None:
    env = ToolEnv([Tool(multiply), Tool(search)], timeout_s=5.0)
    with pytest.raises(SetupError, match="tool_rollout (knows no|takes a list).*; it was given multiply, search"):
        asyncio.run(env.reset([{"role": "user", "content": "?", "task": {"tool_names": names}}]))


@pytest.mark.parametrize("stop_tools", ["multiply", ["multiplly"], None])
def test_a_stop_tool_that_is_none_is_refused(stop_tools: Any) -> None:
    with pytest.raises(SetupError, match="stop_tools must be a list of names among"):
        tool_rollout([multiply], stop_tools=stop_tools)


@pytest.mark.parametrize("max_result_tokens", [0, 10.0, "many"])
def test_a_limit_of_a_result_that_is_no_number_of_tokens_is_refused(max_result_tokens: Any) -> None:
    with pytest.raises(SetupError, match="max_result_tokens must be a number of tokens, or None"):
        tool_rollout([multiply], max_result_tokens=max_result_tokens)
