"""Each family's way to write calls, as its model card or template has it."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_rollouts.parsing.calls import typed
from trl_rollouts.parsing.formats import FORMATS
from trl_rollouts.trajectory import Message

BY_NAME = {tool_format.name: tool_format for tool_format in FORMATS}
SCHEMAS = {
    "f": {"a": {"type": "integer"}, "s": {"type": "string"}},
    "g": {"words": {"type": "array", "items": {"type": "string"}}},
}
F, G = ("f", {"a": 1, "s": "x y"}), ("g", {"words": ["u"]})

# Two calls, F and then G, behind a word of content where the format has room for one.
WRITTEN = {
    "llama3": '{"name": "f", "parameters": {"a": 1, "s": "x y"}}; {"name": "g", "parameters": {"words": ["u"]}}',
    "hermes": (
        'Hm.\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "s": "x y"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {"words": ["u"]}}\n</tool_call>'
    ),
    "qwen3-coder": (
        "Hm.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx y\n</parameter>\n"
        '</function>\n</tool_call>\n<tool_call>\n<function=g>\n<parameter=words>\n["u"]\n</parameter>\n</function>\n</tool_call>'
    ),
    "glm": (
        "Hm.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
        "<arg_value>x y</arg_value>\n</tool_call>\n<tool_call>g\n<arg_key>words</arg_key>\n"
        '<arg_value>["u"]</arg_value>\n</tool_call>'
    ),
    "minimax": (
        'Hm.\n<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
        '<parameter name="s">x y</parameter>\n</invoke>\n<invoke name="g">\n'
        '<parameter name="words">["u"]</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "deepseek-v3": (
        'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1, "s": "x y"}\n```'
        '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{"words": ["u"]}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek-v3.1": (
        'Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1, "s": "x y"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"words": ["u"]}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "kimi": (
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"a": 1, "s": "x y"}<|tool_call_end|><|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>'
        '{"words": ["u"]}<|tool_call_end|><|tool_calls_section_end|>'
    ),
    "gemma": (
        'Hm.<|tool_call>call:f{a:1,s:<|"|>x y<|"|>}<tool_call|><|tool_call>call:g{words:[<|"|>u<|"|>]}<tool_call|>'
    ),
    "functiongemma": (
        "Hm.<start_function_call>call:f{a:1,s:<escape>x y<escape>}<end_function_call>"
        "<start_function_call>call:g{words:[<escape>u<escape>]}<end_function_call>"
    ),
    "gpt-oss": (
        "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1, "s": "x y"}<|call|><|start|>assistant to=functions.g'
        '<|channel|>commentary json<|message|>{"words": ["u"]}<|call|>'
    ),
    "mistral": (
        'Hm.[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1, "s": "x y"}, "id": "abcdefgh1"}, '
        '{"name": "g", "arguments": {"words": ["u"]}, "id": "abcdefgh2"}]'
    ),
    "mistral-v11": 'Hm.[TOOL_CALLS]f[ARGS]{"a": 1, "s": "x y"}[TOOL_CALLS]g[CALL_ID]abcdefgh2[ARGS]{"words": ["u"]}',
    "command": (
        'Hm.<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1, "s": "x y"}}, '
        '{"tool_call_id": "1", "tool_name": "g", "parameters": {"words": ["u"]}}]<|END_ACTION|>'
    ),
    "phi": (
        'Hm.<|tool_call|>[{"name": "f", "arguments": {"a": 1, "s": "x y"}}, {"name": "g", "arguments": '
        '{"words": ["u"]}}]<|/tool_call|>'
    ),
    "lfm2": "Hm.<|tool_call_start|>[f(a=1, s='x y'), g(words=[\"u\"])]<|tool_call_end|>",
    "olmo": "Hm.<function_calls>\nf(a=1, s='x y')\ng(words=['u'])\n</function_calls>",
    "pythonic": "[f(a=1, s='x y'), g(words=['u'])]",
}


def read(name: str, text: str) -> Message:
    return BY_NAME[name].parse(text, SCHEMAS)


def runnable(message: Message) -> list[tuple[str, Any]]:
    calls = [call for call in message.get("tool_calls", []) if "error" not in call]
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_every_format_has_an_example() -> None:
    assert sorted(WRITTEN) == sorted(BY_NAME)


@pytest.mark.parametrize("name", WRITTEN)
def test_two_calls_are_read_with_the_text_before_them(name: str) -> None:
    message = read(name, WRITTEN[name])
    assert runnable(message) == [F, G]
    assert message["content"] == ("" if name in ("llama3", "pythonic") else "Hm.")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_turn_that_is_cut_anywhere_runs_whole_calls_only(name: str) -> None:
    seen = [runnable(read(name, WRITTEN[name][:end])) for end in range(len(WRITTEN[name]) + 1)]
    assert all(calls in ([], [F], [F, G]) for calls in seen)
    if name not in ("pythonic", "lfm2", "olmo", "mistral", "command", "phi"):  # whose calls are one list
        assert [F] in seen


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_without_a_call_is_content(name: str) -> None:
    assert read(name, "Just 12.") == {"role": "assistant", "content": "Just 12."}


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"gpt-oss"}))
def test_a_call_behind_thoughts_is_run_and_one_within_is_not(name: str) -> None:
    message = read(name, f"<think>\n{WRITTEN[name]}\n</think>\n\n{WRITTEN[name]}")
    assert runnable(message) == [F, G]
    assert message["reasoning_content"] == WRITTEN[name]


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"gpt-oss"}))
def test_a_call_in_thoughts_that_were_not_ended_is_an_error(name: str) -> None:
    begin = "" if name in ("llama3", "pythonic") else "Let me see. "
    (call,) = read(name, f"<think>{begin}{WRITTEN[name]}")["tool_calls"]
    assert call["error"] == "The tool call is inside thoughts that were not ended. End them, then call."


@pytest.mark.parametrize(
    ("name", "opened", "closed"),
    [
        ("gemma", "<|channel>thought", "<channel|>"),
        ("mistral", "[THINK]", "[/THINK]"),
        ("command", "<|START_THINKING|>", "<|END_THINKING|>"),
        ("kimi", "◁think▷", "◁/think▷"),
    ],
)
def test_a_familys_own_thoughts_are_told_apart(name: str, opened: str, closed: str) -> None:
    assert read(name, f"{opened}\nhm\n{closed}Yes.") == {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hm",
    }


def test_the_channels_of_gpt_oss_are_thoughts_and_content() -> None:
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert read("gpt-oss", text) == {"role": "assistant", "content": "Yes.", "reasoning_content": "hm"}


@pytest.mark.parametrize(("name", "ids"), [("kimi", ["functions.f:0", "functions.g:1"]), ("command", ["0", "1"])])
def test_the_models_own_id_of_a_call_is_kept_for_its_answer(name: str, ids: list[str]) -> None:
    assert [call["id"] for call in read(name, WRITTEN[name])["tool_calls"]] == ids


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        ("minimax", '<invoke name="f">\n<parameter name="s">{}</parameter>\n</invoke>'),
        ("gemma", '<|tool_call>call:f{{s:<|"|>{}<|"|>}}<tool_call|>'),
    ],
)
@pytest.mark.parametrize(
    "value",
    [
        "",
        "7",
        "true",
        "    indented\n    twice\n",
        "\n",
        "a </parameter> b </arg_value> c",
        '{"x": 1}',
        "</function",
        '"',
    ],
)
def test_a_text_comes_back_as_it_was_written(name: str, text: str, value: str) -> None:
    assert runnable(read(name, text.format(value))) == [("f", {"s": value})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=s>\nx\n<parameter=a>\n1\n</parameter>\n</function>"),
        ("qwen3-coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>"),
        ("qwen3-coder", "<function=f>\n<parameter=a>\n1\n</parameter>\nand more\n</function>"),
        ("qwen3-coder", "<tool_call>f(1)</tool_call>"),
        ("glm", "<tool_call>\n</tool_call>"),
        ("deepseek-v3", "<｜tool▁call▁begin｜>f(1)<｜tool▁call▁end｜>"),
        ("kimi", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{a: 1}<|tool_call_end|>"),
        ("gemma", "<|tool_call>call:f{a:1<tool_call|>"),
        ("mistral", "[TOOL_CALLS] f(1)"),
        ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=open('x'))]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[f(a=1, a=2)]<|tool_call_end|>"),
        ("pythonic", "[f(a=1]"),
        ("gpt-oss", "<|channel|>commentary to=functions.f<|message|>a=1<|call|>"),
    ],
)
def test_a_call_that_is_not_well_formed_is_an_error_and_never_another_call(name: str, text: str) -> None:
    calls = read(name, text)["tool_calls"]
    assert [len(call["error"]) < 300 for call in calls] == [True]


@pytest.mark.parametrize("name", WRITTEN)
@given(data=st.data())
def test_no_mixture_of_a_formats_fragments_raises(name: str, data: st.DataObject) -> None:
    whole = WRITTEN[name]
    cuts = [whole[i : i + 9] for i in range(0, len(whole), 9)]
    text = "".join(data.draw(st.lists(st.sampled_from([*cuts, whole, "<think>", "</think>", "\n"]), max_size=12)))
    json.dumps(read(name, text))


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"llama3", "pythonic"}))
def test_a_call_that_is_written_in_anothers_argument_is_not_run(name: str) -> None:
    whole = WRITTEN[name]
    start = whole.index("x y")
    for end in range(start, len(whole) + 1):
        inside = whole[:start] + whole[:end].removeprefix("Hm.")
        assert ("g", {"words": ["u"]}) not in runnable(read(name, inside))


def test_the_arguments_of_gpt_oss_may_hold_what_ends_a_message() -> None:
    call = '<|channel|>commentary to=functions.f<|message|>{"s": "<|call|> to=functions.g<|message|>{}"}<|call|>'
    assert runnable(read("gpt-oss", call)) == [("f", {"s": "<|call|> to=functions.g<|message|>{}"})]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("minimax", '<invoke name="f"><parameter name="s">x</parameter></invoke> y</parameter></invoke>'),
        ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value></tool_call> y</arg_value></tool_call>"),
        ("qwen3-coder", "<function=f><parameter=s>x</parameter></function> y</parameter></function>"),
        ("gemma", '<|tool_call>call:f{s:<|"|>x<|"|>} y<|"|>,a:3}<tool_call|>'),
        ("deepseek-v3.1", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"s": "x"}{"a": 2}<｜tool▁call▁end｜>'),
    ],
)
def test_a_call_is_not_run_where_its_end_is_ambiguous(name: str, text: str) -> None:
    assert [("error" in call) for call in read(name, text)["tool_calls"]] == [True]


def test_an_answer_of_gpt_oss_without_channels_is_content() -> None:
    assert read("gpt-oss", "Set x to=5 and go.") == {"role": "assistant", "content": "Set x to=5 and go."}


def test_a_call_of_gpt_oss_that_is_cut_in_its_header_is_an_error() -> None:
    assert "error" in read("gpt-oss", "<|channel|>commentary to=functions.f <|constrain|>js")["tool_calls"][0]


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("hermes", '<tool_call>{"name": "g", "arguments": {"s": "</think>"</tool_call>'),
        ("qwen3-coder", "<function=g>\n<parameter=s>\n<parameter=s>\n</think>\n</parameter>\n</function>"),
    ],
)
def test_the_tag_of_a_thought_in_a_broken_call_leaves_the_calls_before_it(name: str, broken: str) -> None:
    message = read(name, f"{WRITTEN[name]}\n{broken}")
    assert runnable(message) == [F, G]
    assert "error" in message["tool_calls"][2]


def test_a_bare_call_may_begin_with_its_type() -> None:
    text = '{"type": "function", "name": "f", "parameters": {"a": 1, "s": "x y"}}'
    assert runnable(read("llama3", text)) == [F]


def test_a_text_in_quotes_stays_text_where_text_is_allowed() -> None:
    schemas = {"f": {"o": {"type": "string", "nullable": True}, "a": {"type": "integer"}}}
    message = BY_NAME["pythonic"].parse("[f(o='null', a='3')]", schemas)
    assert runnable(message) == [("f", {"o": "null", "a": 3})]


@pytest.mark.parametrize("callee", ["f" + ".a" * 500, "f" + "()" * 1000, "f" + "[1]" * 1000])
def test_a_name_that_is_an_endless_expression_is_an_error(callee: str) -> None:
    (call,) = read("lfm2", f"<|tool_call_start|>[{callee}(a=1)]<|tool_call_end|>")["tool_calls"]
    assert "error" in call


FRAGMENTS = [
    " ",
    "\n",
    "{",
    '"',
    '\\"',
    '<|"|>',
    "[f(",
    "<parameter=a>",
    "<parameter=",
    "<function=",
    "<tool_call>",
    "functools[",
]
OPENINGS = ["", "<function=f><parameter=a>", '<|tool_call>call:f{a:"', "<tool_call>f<arg_key>a</arg_key><arg_value>"]


@pytest.mark.parametrize("name", WRITTEN)
def test_50000_characters_of_any_fragment_are_read_in_no_time(name: str) -> None:
    whole = WRITTEN[name]
    for fragment in [*FRAGMENTS, whole[: len(whole) // 2], whole[4:20]]:
        for opening in OPENINGS:
            started = time.monotonic()
            closing = "</parameter></function></arg_value></tool_call>"
            read(name, opening + fragment * (50_000 // len(fragment)) + closing)
            assert time.monotonic() - started < 2, (opening, fragment)


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("7", {"type": "integer"}, 7),
        ("7", {"type": "string"}, "7"),
        ("7", None, "7"),
        ("7.5", {"type": "number"}, 7.5),
        ("7", {"type": "number"}, 7),
        ("True", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ("null", {"type": "string", "nullable": True}, None),
        ("null", {"type": "string"}, "null"),
        ("x", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x"),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 3),
        ('["a"]', {"type": "array"}, ["a"]),
        ("['a', None]", {"type": "array"}, ["a", None]),
        ("{'a': true}", {"type": "object"}, {"a": True}),
        ("[1", {"type": "array"}, "[1"),
        ("007", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "007"),
        ("1_000", {"type": "integer"}, "1_000"),
        ("inf", {"type": "number"}, "inf"),
        (" 7\n", {"type": "integer"}, 7),
    ],
)
def test_an_argument_without_quotes_has_its_declared_type_where_it_fits(text: str, schema: Any, expected: Any) -> None:
    assert typed(text, schema) == expected
    assert type(typed(text, schema)) is type(expected)
