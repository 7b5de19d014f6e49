"""From text to calls: an exact call or a typed error, never an exception and never a wrong dict."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_rollouts import SetupError
from trl_rollouts.parsing import find_format, parse_hermes
from trl_rollouts.testing import byte_tokenizer
from trl_rollouts.tokens import ChatTokenizer

TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr, index]


def calls(text: str) -> list[tuple[str, Any]]:
    """Name and arguments of each call that can be run."""
    found = parse_hermes(text).get("tool_calls", [])
    return [(c["function"]["name"], c["function"]["arguments"]) for c in found if "error" not in c]


def errors(text: str) -> list[str]:
    return [call["error"] for call in parse_hermes(text).get("tool_calls", []) if "error" in call]


def test_text_without_a_call_is_content() -> None:
    assert parse_hermes("It is 56.") == {"role": "assistant", "content": "It is 56."}


def test_a_tagged_call_is_read_with_the_text_before_it() -> None:
    assert parse_hermes('Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>') == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [{"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }


def test_two_blocks_are_two_calls_in_order() -> None:
    text = (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    )
    assert calls(text) == [("f", {}), ("g", {})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"a": 1}}',
        '  {"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '```json\n{"name": "f", "arguments": {"a": 1}}\n```',
    ],
)
def test_bare_json_is_a_call(text: str) -> None:
    assert calls(text) == [("f", {"a": 1})]


def test_json_in_the_middle_of_an_answer_is_not_a_call() -> None:
    assert calls('A call looks like {"name": "f", "arguments": {}}.') == []


@pytest.mark.parametrize("arguments", ["null", '"{\\"a\\": 1}"', '{"a": 1}'])
def test_arguments_may_be_missing_or_a_json_string(arguments: str) -> None:
    found = calls(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    assert found == [("f", {} if arguments == "null" else {"a": 1})]
    assert calls('<tool_call>{"name": "f"}</tool_call>') == [("f", {})]


@pytest.mark.parametrize(
    "inner", ["{}", '{"name": 1}', "[]", "nonsense", '{"name": "f", "arguments": [1]}', "", '"f"']
)
def test_a_call_that_cannot_be_run_is_an_error_in_its_place(inner: str) -> None:
    text = f'<tool_call>{inner}</tool_call><tool_call>{{"name": "g", "arguments": {{}}}}</tool_call>'
    assert [("error" in call) for call in parse_hermes(text)["tool_calls"]] == [True, False]


def test_a_second_call_in_the_same_tags_is_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {}}</tool_call>'
    assert calls(text) == [("f", {}), ("g", {})]


@pytest.mark.parametrize("depth", [65, 500, 960, 100_000])
def test_json_that_is_nested_beyond_reason_is_an_error(depth: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"
    assert len(errors(text)) == 1


def test_thousands_of_broken_calls_are_read_in_no_time() -> None:
    started = time.monotonic()
    assert 8 < len(errors("<tool_call>x</tool_call>" * 10_000)) < 100
    assert time.monotonic() - started < 5


def test_nothing_is_run_behind_a_broken_call_that_is_not_closed() -> None:
    whole = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert calls('<tool_call>{"name": "f", "arguments": {"s": "such as ' + whole) == []
    assert len(errors('<tool_call>{"name": "f", "arguments": {"s": "such as ' + whole)) == 1
    assert calls("<tool_call>oops</tool_call>\n" + whole) == [("g", {})]
    assert calls(f'<tool_call>{{"name": "f", "arguments": {{"s": "</tool_call>, e.g. {whole}"}}}}</tool_call>') == []


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {}}\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}\n{"name": "g"}</tool_call>',
        '```json\n{"name": "f", "arguments": {}}\n```\n```json\n{"name": "g", "arguments": {}}\n```',
        '{"type": "function", "function": {"name": "f", "parameters": {}}}{"name": "g", "arguments": {}}',
    ],
)
def test_no_call_of_a_turn_is_lost_by_what_stands_between_them(text: str) -> None:
    assert calls(text) == [("f", {}), ("g", {})]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1} or so"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
        '{"name": "f", "arguments": {"a": 1}',
        '<tool_call>{"name": "f", "arguments": null, "parameters": {"a": 1}}</tool_call>',
    ],
)
def test_a_call_is_not_run_with_arguments_that_were_not_given(text: str) -> None:
    assert calls(text) == []
    assert len(errors(text)) == 1


def test_an_answer_that_is_json_is_no_call() -> None:
    assert parse_hermes('{"name": "Ada", "born": 1815}') == {
        "role": "assistant",
        "content": '{"name": "Ada", "born": 1815}',
    }


@pytest.mark.parametrize("first", ["<think>a</think>So. ", "So. "])
def test_thoughts_that_open_later_are_thoughts_too(first: str) -> None:
    message = parse_hermes(
        f'{first}<think>maybe <tool_call>{{"name": "g", "arguments": {{}}}}</tool_call></think>'
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    )
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert message["content"] == "So."


def test_a_call_in_thoughts_between_calls_is_a_thought() -> None:
    f = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    g = f.replace("f", "g")
    assert calls(f"{f}<think>or {g}?</think>{f}") == [("f", {}), ("f", {})]


def test_ids_differ_though_a_model_wrote_one_that_is_ours() -> None:
    written = [{"name": "f", "arguments": {}, "id": name} for name in ("call00000", "a", "a", "b")]
    ids = [call["id"] for call in parse_hermes(f"<tool_call>{json.dumps(written)}</tool_call>")["tool_calls"]]
    assert ids == ["call00000", "call00001", "call00002", "b"]


def test_a_closing_tag_and_braces_inside_a_string_belong_to_the_string() -> None:
    assert calls('<tool_call>{"name": "f", "arguments": {"s": "}</tool_call>{"}}</tool_call>') == [
        ("f", {"s": "}</tool_call>{"})
    ]


def test_a_call_that_was_cut_by_length_is_an_error_unless_its_json_is_whole() -> None:
    assert len(errors('<tool_call>{"name": "f", "argum')) == 1
    assert calls('<tool_call>{"name": "f", "arguments": {}}') == [("f", {})]


def test_a_call_inside_a_thought_is_a_thought() -> None:
    message = parse_hermes('<think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>\n</think>\n\nNo.')
    assert message == {
        "role": "assistant",
        "content": "No.",
        "reasoning_content": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    }


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"s": "</think>"}}</tool_call>',
        '{"name": "f", "arguments": {"s": "</think>"}}',
    ],
)
def test_the_tag_of_a_thought_inside_an_argument_belongs_to_the_argument(text: str) -> None:
    assert calls(text) == [("f", {"s": "</think>"})]


def test_a_call_in_a_thought_that_the_template_opened_is_not_made() -> None:
    text = 'Maybe <tool_call>{"name": "drop", "arguments": {}}</tool_call>? No.\n</think>\n\nI will not.'
    assert parse_hermes(text)["content"] == "I will not."
    assert calls(text) == []


def test_a_thought_that_the_template_opened_or_that_never_closes_is_a_thought() -> None:
    assert parse_hermes("hm\n</think>\n\nYes.") == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}
    assert parse_hermes("<think>\nhm") == {"role": "assistant", "content": "", "reasoning_content": "hm"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(max_size=9), JSON, max_size=3), min_size=1, max_size=3))
def test_any_arguments_come_back_equal(arguments: list[dict[str, Any]]) -> None:
    text = "\n".join(f"<tool_call>\n{json.dumps({'name': 'f', 'arguments': a})}\n</tool_call>" for a in arguments)
    assert calls(text) == [("f", a) for a in arguments]


@given(
    st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f"', ', "arguments": {}', "}", "x", "<think>"])
    )
)
def test_no_mixture_of_fragments_raises(parts: list[str]) -> None:
    message = parse_hermes("".join(parts))
    assert message["role"] == "assistant"
    json.dumps(message)


def template(name: str) -> ChatTokenizer:
    return ChatTokenizer(byte_tokenizer(), chat_template=(TEMPLATES / f"{name}.jinja").read_text())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2_5", "hermes"),
        ("qwen3", "hermes"),
        ("qwen3_instruct_2507", "hermes"),
        ("qwen3_vl", "hermes"),
        ("qwen3_5_think", "qwen3-coder"),
        ("nemotron_3_nano", "qwen3-coder"),
        ("glm4moe", "glm"),
        ("llama3_1", "llama3"),
        ("deepseekv3", "deepseek-v3"),
        ("gptoss", "gpt-oss"),
        ("gemma4", "gemma"),
        ("lfm2_2_5", "lfm2"),
    ],
)
def test_the_format_is_found_by_reading_a_call_back_from_the_template(name: str, expected: str) -> None:
    assert find_format(template(name)).name == expected


def test_the_format_of_the_test_tokenizer_is_found() -> None:
    assert find_format(ChatTokenizer(byte_tokenizer())).name == "hermes"


@pytest.mark.parametrize("name", ["gemma3", "llama3", "phi3", "cohere", "qwen2_5_vl", "smolvlm"])
def test_a_template_without_a_known_format_is_refused(name: str) -> None:
    with pytest.raises(SetupError, match="Pass parser="):
        find_format(template(name))
