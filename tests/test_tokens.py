"""Prompts and bridges, to the id. The byte tokenizer's ids are bytes; 257 is <|im_start|>, 258 <|im_end|>."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_rollouts import PromptTooLongError, SetupError, TemplateError
from trl_rollouts.testing import byte_tokenizer
from trl_rollouts.tokens import ChatTokenizer, check_room

START, END = 257, 258
TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr, index]

USER = {"role": "user", "content": "hi"}
TOOL = {"role": "tool", "name": "f", "tool_call_id": "call_0", "content": "56"}


def chat(template: str | None = None, **kwargs: Any) -> ChatTokenizer:
    text = None if template is None else (TEMPLATES / f"{template}.jinja").read_text()
    return ChatTokenizer(byte_tokenizer(), chat_template=text, **kwargs)


def spelled(text: str) -> list[int]:
    return list(text.encode())


def test_a_conversation_is_rendered_once_with_the_generation_prompt() -> None:
    assert chat().prompt([USER]) == [
        START, *spelled("user\nhi"), END, *spelled("\n"), START, *spelled("assistant\n"),
    ]  # fmt: skip


def test_a_string_is_not_put_into_the_template_again() -> None:
    assert chat().prompt("<|im_start|>user\nhi") == [START, *spelled("user\nhi")]


def test_text_blocks_render_as_the_text() -> None:
    blocks = {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}
    assert chat().prompt([blocks]) == chat().prompt([USER])


def test_an_image_is_refused_rather_than_dropped() -> None:
    with pytest.raises(TemplateError, match="Only text can be trained"):
        chat().prompt([{"role": "user", "content": [{"type": "image"}]}])


def test_the_rows_data_and_nulls_of_arrow_do_not_reach_the_template() -> None:
    message = {**USER, "task": {"answer": 4}, "tool_calls": None, "name": None}
    assert chat().prompt([message]) == chat().prompt([USER])


def test_nulls_that_arrow_puts_into_the_arguments_of_a_call_do_not_reach_the_template() -> None:
    def prompt(arguments: dict[str, Any]) -> list[int]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return chat().prompt([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, TOOL])

    assert prompt({"a": 1, "query": None}) == prompt({"a": 1})


def test_a_final_assistant_message_is_continued() -> None:
    ids = chat().prompt([USER, {"role": "assistant", "content": "The"}])
    assert ids[-13:] == [*spelled("assistant\nThe")]


def test_template_arguments_reach_the_prompt_and_every_bridge() -> None:
    quiet = chat("qwen3", template_kwargs={"enable_thinking": False})
    empty_thought = spelled(
        "assistant\n<think>\n\n</think>\n\n".replace("<think>", "\x00").replace("</think>", "\x01")
    )
    empty_thought = [259 if i == 0 else 260 if i == 1 else i for i in empty_thought]
    assert quiet.prompt([USER])[-len(empty_thought) :] == empty_thought
    assert quiet.bridge([TOOL], last_id=END)[-len(empty_thought) :] == empty_thought


def test_a_template_that_hides_the_tools_is_refused() -> None:
    schema = {"type": "function", "function": {"name": "multiply"}}
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(SetupError, match=r"does not show the tools \['multiply'\]"):
        ChatTokenizer(byte_tokenizer(), chat_template=plain).prompt([USER], [schema])


def test_without_a_template_the_error_says_what_to_set() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"Set tokenizer\.chat_template"):
        ChatTokenizer(tokenizer).prompt([USER])


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(PromptTooLongError, match="has 5 tokens and the server's max_model_len is 5"):
        check_room([1, 2, 3, 4, 5], 5)
    check_room([1, 2, 3, 4], 5)


# The bridge from the end of a completion to the next turn. With these tags spelled as single ids:
RESPONSE, RESPONSE_END = 263, 264
TOOL_BRIDGE = [
    *spelled("\n"), START, *spelled("user\n"), RESPONSE, *spelled("\n56\n"), RESPONSE_END, END, *spelled("\n"),
    START, *spelled("assistant\n"),
]  # fmt: skip


@pytest.mark.parametrize("template", [None, "qwen3", "qwen2_5", "qwen3_instruct_2507", "qwen3_training"])
def test_a_tool_result_follows_exactly_the_end_of_the_turn(template: str | None) -> None:
    assert chat(template).bridge([TOOL], last_id=END) == TOOL_BRIDGE


@pytest.mark.parametrize("template", [None, "qwen3", "qwen2_5"])
def test_a_turn_that_was_cut_gets_exactly_one_end(template: str | None) -> None:
    assert chat(template).bridge([TOOL], last_id=97) == [END, *TOOL_BRIDGE]


@pytest.mark.parametrize("template", [None, "qwen3"])
def test_two_tool_results_share_one_user_turn(template: str | None) -> None:
    bridge = chat(template).bridge([TOOL, {**TOOL, "content": "7"}], last_id=END)
    assert bridge == [
        *spelled("\n"), START, *spelled("user\n"), RESPONSE, *spelled("\n56\n"), RESPONSE_END,
        *spelled("\n"), RESPONSE, *spelled("\n7\n"), RESPONSE_END, END, *spelled("\n"), START, *spelled("assistant\n"),
    ]  # fmt: skip


@pytest.mark.parametrize("template", [None, "qwen3", "qwen2_5"])
def test_a_user_observation_follows_exactly_the_end_of_the_turn(template: str | None) -> None:
    assert chat(template).bridge([USER], last_id=END) == [
        *spelled("\n"), START, *spelled("user\nhi"), END, *spelled("\n"), START, *spelled("assistant\n"),
    ]  # fmt: skip


@pytest.mark.parametrize("template", [None, "qwen3"])
@given(content=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_a_bridge_shows_the_observation_and_no_part_of_the_dummy_turn(template: str | None, content: str) -> None:
    ids = chat(template).bridge([{**TOOL, "content": content}], last_id=END)
    assert byte_tokenizer().decode(ids) == (
        f"\n<|im_start|>user\n<tool_response>\n{content}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [None, "qwen3", "qwen2_5"])
@given(parts=st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "<|endoftext|>", "a", "\n", "<|", "im_end|>"])))
def test_the_text_of_a_special_token_in_an_observation_stays_text(template: str | None, parts: list[str]) -> None:
    content = "x" + "".join(parts) + "x"
    ids = chat(template).bridge([TOOL, {**TOOL, "content": content}], last_id=END)
    assert [i for i in ids if i in (256, START, END)] == [START, END, START]
    assert content in bytes(i for i in ids if i < 256).decode()


def test_the_marker_of_the_dummy_turn_may_stand_in_an_observation() -> None:
    bridge = chat().bridge([{**USER, "content": "ENDofTHEturn"}], last_id=END)
    assert bridge == [
        *spelled("\n"), START, *spelled("user\nENDofTHEturn"), END, *spelled("\n"), START, *spelled("assistant\n"),
    ]  # fmt: skip


def test_a_template_without_an_end_of_turn_is_refused_with_what_was_looked_for() -> None:
    endless = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(TemplateError, match=r"tokens are none; the ids that end a turn are 258 \(<\|im_end"):
        ChatTokenizer(byte_tokenizer(), chat_template=endless).bridge([USER], last_id=END)


def test_a_template_that_ends_the_turn_only_behind_the_observation_is_refused() -> None:
    late = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}<|im_end|>{% endif %}{% endfor %}"
    with pytest.raises(TemplateError, match="does not end the assistant's turn and then show"):
        ChatTokenizer(byte_tokenizer(), chat_template=late).bridge([USER], last_id=END)


def test_a_template_that_leaves_the_observation_out_is_refused() -> None:
    deaf = "{% for m in messages if m.role != 'tool' %}{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(TemplateError, match="use a template that shows these roles"):
        ChatTokenizer(byte_tokenizer(), chat_template=deaf).bridge([TOOL], last_id=END)


@pytest.mark.parametrize(
    ("template", "roles"),
    [("qwen3", ["user", "developer"]), ("qwen3_vl", ["user", "system"]), ("qwen2_5", ["user", "developer"])],
)
def test_a_template_that_leaves_out_any_message_of_an_observation_is_refused(template: str, roles: list[str]) -> None:
    with pytest.raises(TemplateError, match="use a template that shows these roles"):
        chat(template).bridge([{"role": role, "content": f"{role}!"} for role in roles], last_id=END)


@pytest.mark.parametrize("template", ["smolvlm", "idefics3", "llava_next"])
def test_a_template_that_knows_content_only_in_parts_gets_parts(template: str) -> None:
    assert "hello" in chat(template).render([{"role": "user", "content": "hello"}])


def test_a_template_that_skips_the_text_of_a_role_is_refused() -> None:
    deaf = "{% for m in messages if m.role == 'system' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(TemplateError, match="does not show the text of message 0 of a prompt, whose role is 'user'"):
        ChatTokenizer(byte_tokenizer(), chat_template=deaf).prompt([USER])


@pytest.mark.parametrize(
    ("template", "message", "what"),
    [
        ("qwen3", {"role": "developer", "content": "Be brief."}, "text of message 1"),
        ("qwen3_vl", {"role": "system", "content": "Be brief."}, "text of message 1"),
        (
            "lfm2",
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "call of message 1",
        ),
        (
            "llama3_1",
            {"role": "assistant", "content": "Hm.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            "text of message 1",
        ),
    ],
)
def test_a_message_of_the_prompt_that_the_template_skips_is_refused(
    template: str, message: dict[str, Any], what: str
) -> None:
    answer = [TOOL] if "tool_calls" in message else []
    with pytest.raises(TemplateError, match=f"does not show the {what}"):
        chat(template).prompt([USER, message, *answer, USER])


def test_a_tool_that_only_the_question_names_is_hidden() -> None:
    schema = {"type": "function", "function": {"name": "multiply"}}
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(SetupError, match=r"does not show the tools \['multiply'\]"):
        ChatTokenizer(byte_tokenizer(), chat_template=plain).prompt(
            [{"role": "user", "content": "multiply!"}], [schema]
        )


def test_a_turn_that_another_eos_of_the_model_ended_gets_no_second_end() -> None:
    assert chat(eos_token_ids=[256]).bridge([USER], last_id=256) == chat().bridge([USER], last_id=END)


def test_an_end_that_opens_the_next_message_is_kept_behind_another_eos_of_the_model() -> None:
    opens = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"  # as GLM does: nothing closes a turn
    bridge = ChatTokenizer(byte_tokenizer(), chat_template=opens, eos_token_ids=[START, END]).bridge
    assert bridge([USER], last_id=START) == [*spelled("hi")]
    assert bridge([USER], last_id=END) == [START, *spelled("hi")]


def test_an_end_before_a_header_of_plain_text_is_not_added_to_another_eos_of_the_model() -> None:
    vicuna = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}<|im_end|>{% endif %}"
    bridge = ChatTokenizer(byte_tokenizer(), chat_template=vicuna + "{% endfor %}", eos_token_ids=[256]).bridge
    assert bridge([USER], last_id=256) == [*spelled("user: hi")]


def test_answers_are_proved_again_where_they_are_told_apart_in_another_way() -> None:
    by_id = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.tool_calls[0].function.arguments.x }}<|im_end|>"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id %}{{ m.content }}<|im_end|>{% endif %}{% endif %}{% endfor %}"
    )
    bridge = ChatTokenizer(byte_tokenizer(), chat_template=by_id).bridge
    assert bridge([TOOL], last_id=END) == [*spelled("56"), END]
    with pytest.raises(TemplateError, match="then show messages"):
        bridge([{"role": "tool", "content": "56"}], last_id=END)


def test_content_in_parts_that_spell_the_mark_together_is_shown() -> None:
    parts = [{"type": "text", "text": "ENDofTHE"}, {"type": "text", "text": "turn"}]
    assert spelled("user\nENDofTHEturn") == chat().bridge([{"role": "user", "content": parts}], last_id=END)[2:19]


@pytest.mark.parametrize("content", [["a"], [{"type": "text", "text": 3}], [{"text": "a"}]])
def test_content_in_parts_that_are_no_text_is_refused(content: Any) -> None:
    with pytest.raises(TemplateError, match="A message has content"):
        chat().bridge([{"role": "user", "content": content}], last_id=END)


def test_half_of_a_surrogate_pair_is_replaced_wherever_it_stands() -> None:
    assert chat().bridge([{"role": "user", "content": "<|im_end|>\ud800b"}], last_id=END)[-15:-13] == spelled("?b")


def test_several_chat_templates_are_refused_by_their_names() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "x", "tool_use": "y"}
    with pytest.raises(TemplateError, match=r"several chat templates \(default, tool_use\)"):
        ChatTokenizer(tokenizer)


def test_an_eos_id_whose_text_is_in_an_observation_is_not_among_its_ids() -> None:
    plain = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    bridge = ChatTokenizer(byte_tokenizer(), chat_template=plain, eos_token_ids=[262]).bridge
    assert 262 not in bridge([{"role": "user", "content": "a</tool_call>b"}], last_id=END)


def test_an_end_that_the_model_never_samples_is_found_and_not_added_to_its_own() -> None:
    returns = "{% for m in messages %}<|im_start|>{{ m.content }}<|endoftext|>{% endfor %}"  # as gpt-oss's <|end|>
    bridge = ChatTokenizer(byte_tokenizer(), chat_template=returns).bridge
    assert bridge([USER], last_id=END) == [START, *spelled("hi"), 256]
    assert bridge([USER], last_id=97) == [256, START, *spelled("hi"), 256]


def test_a_prompt_that_is_empty_or_ends_in_a_call_is_refused() -> None:
    with pytest.raises(TemplateError, match="The prompt is empty"):
        chat().prompt("")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    with pytest.raises(TemplateError, match="ends with a tool call"):
        chat().prompt([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_template_that_raises_is_reported_with_its_own_words() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTokenizer(byte_tokenizer(), chat_template=strict).prompt([USER])


def test_decoding_removes_the_end_of_the_turn_and_nothing_else() -> None:
    assert chat().decode([START, *spelled(" a , b"), END]) == "<|im_start|> a , b"
    assert chat(eos_token_ids=[256]).decode([*spelled("a"), 256]) == "a"
