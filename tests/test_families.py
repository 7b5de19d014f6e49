"""The promise of the tokens, on every chat template that TRL ships and the true tokenizers of their families."""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from families import HAS_TOKENIZERS, MULTIPLY, NAMES, TOKENIZERS, chat, conversation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trl_rollouts import Completion, Message, Sampling, SetupError, StepResult
from trl_rollouts.episode import Setting, run_trajectory
from trl_rollouts.hosting import EnvLimits, HostedEnv
from trl_rollouts.kinds import EnvKinds
from trl_rollouts.parsing import find_format, find_parser
from trl_rollouts.parsing.thoughts import opened_thoughts
from trl_rollouts.tokens import ChatTokenizer

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.families,
    pytest.mark.skipif(
        not HAS_TOKENIZERS and os.environ.get("CI") != "true",
        reason="no tokenizers: `make setup` fetches them with npm",
    ),
]

USER = {"role": "user", "content": "x"}
TOOL = {"role": "tool", "name": "multiply", "tool_call_id": "call00000", "content": "x"}
CASES = {
    "cohere": USER,
    "deepseekv3": USER,
    "gemma": USER,
    "gemma4": TOOL,
    "glm4moe": TOOL,
    "gptoss": TOOL,
    "lfm2_2_5": TOOL,
    "llama3_1": TOOL,
    "llava_next": USER,
    "nemotron_3_nano": TOOL,
    "phi3": USER,
    "qwen3": TOOL,
    "qwen3_5_think": TOOL,
}
"""One template of each kind, with a message that it shows."""


@pytest.mark.timeout(600)
def test_the_table_of_compatibility_is_what_is_found_when_all_is_tried_again() -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "docs/make_compatibility.py", "--verify"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_bridge_of_the_table_is_exact_or_refused() -> None:
    lines = [line.split(" | ") for line in (ROOT / "docs" / "compatibility.md").read_text().splitlines()[1:]]
    rows = {cells[0].removeprefix("| "): cells for cells in lines if cells[0].removeprefix("| ") in NAMES}
    assert sorted(rows) == NAMES
    drifts = {cell for cells in rows.values() for cell in cells[2:5]}
    assert {drift for drift in drifts if not drift.startswith("refused: ")} == {"0", "one call a turn"}


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_is_what_the_tokenizer_makes_of_the_template(name: str) -> None:
    tokenizer, question = chat(name), conversation("user", 0)
    if tokenizer._content_is_parts:
        question = [{"role": "user", "content": [{"type": "text", "text": question[0]["content"]}]}]
    whole = tokenizer._tokenizer.apply_chat_template(
        question, chat_template=tokenizer.chat_template, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.prompt(conversation("user", 0)) == whole


def _fragments(tokenizer: ChatTokenizer) -> list[str]:
    special = [token.content for token in tokenizer._tokenizer.added_tokens_decoder.values() if token.content.strip()]
    in_template = [token for token in special if token in str(tokenizer.chat_template)]
    ends = [tokenizer.decode_one(token_id) for token_id in sorted(tokenizer.eos_token_ids)]
    return [
        *in_template[:30],
        *ends,
        "a",
        "bc ",
        " d",
        "\n",
        "é",
        "🎉",
        "{",
        "}",
        '"',
        "\\",
        "ENDofTHEturn",
        "<|",
        "|>",
    ]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_observation_is_shown_once_as_text_and_the_turn_before_it_ends_once(name: str, data: Any) -> None:
    tokenizer, message = chat(name), CASES[name]
    text = "".join(data.draw(st.lists(st.sampled_from(_fragments(tokenizer)), max_size=8))).strip() or "x"
    end_id = tokenizer._bridge.prove([message]).end_id
    bridge = tokenizer.bridge([{**message, "content": text}], last_id=end_id)
    harmless = tokenizer.bridge([message], last_id=end_id)

    shown = tokenizer._tokenizer.decode([end_id, *bridge], clean_up_tokenization_spaces=False)
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    frame = tokenizer._tokenizer.decode([end_id, *harmless], clean_up_tokenization_spaces=False)
    before, after = _around(frame)
    assert shown in (before + text + after, before + escaped + after, before + _escaped_apart(text, tokenizer) + after)

    def controls(ids: list[int]) -> Counter[int]:
        return Counter(token_id for token_id in ids if token_id in tokenizer.special_ids)

    assert controls(bridge) == controls(harmless)
    assert tokenizer.bridge([{**message, "content": text}], last_id=-1) == [end_id, *bridge]


@pytest.mark.parametrize("name", [name for name, message in CASES.items() if message is TOOL])
def test_a_name_that_a_model_made_up_brings_no_control_token_into_its_answer(name: str) -> None:
    tokenizer = chat(name)
    harmless = tokenizer.bridge([{**TOOL, "name": "multiply_", "tool_call_id": "call00000_"}], last_id=-1)
    controls = [token_id for token_id in harmless if token_id in tokenizer.special_ids]
    for word in (tokenizer.decode_one(token_id) for token_id in sorted(tokenizer.special_ids)[:40]):
        for whole in (word, word[:2] + word + word[2:]):
            named = {**TOOL, "name": f"multiply{whole}", "tool_call_id": f"call00000{whole}"}
            hostile = tokenizer.bridge([named], last_id=-1)
            assert [token_id for token_id in hostile if token_id in tokenizer.special_ids] == controls


def _around(frame: str) -> tuple[str, str]:
    """What stands before and behind the one "x" that is the observation's."""
    at = max(
        index for index, letter in enumerate(frame) if letter == "x" and not frame[index + 1 : index + 2].isalpha()
    )
    return frame[:at], frame[at + 1 :]


def _escaped_apart(text: str, tokenizer: ChatTokenizer) -> str:
    """JSON's escapes, but in the texts of control tokens, which are put in behind the template's back."""
    parts, position = [], 0
    for match in tokenizer.control_words.finditer(text):
        parts += [json.dumps(text[position : match.start()], ensure_ascii=False)[1:-1], match[0]]
        position = match.end()
    return "".join([*parts, json.dumps(text[position:], ensure_ascii=False)[1:-1]])


class Script:
    """A client, and the environment's answers, of one trajectory."""

    max_model_len = None

    def __init__(self) -> None:
        self.turns: list[tuple[list[int], str]] = []
        self.answers: list[Message] = []
        self.contexts: list[list[int]] = []

    async def generate(self, token_ids: list[int], sampling: Sampling) -> Completion:
        sampled, finish_reason = self.turns[len(self.contexts)]
        self.contexts.append(token_ids)
        return Completion(sampled, [-0.5] * len(sampled), finish_reason)

    async def close(self) -> None:
        pass

    async def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    async def step(self, action: Message) -> StepResult:
        answered = len(self.contexts)
        return StepResult([self.answers[answered - 1]] if answered < len(self.turns) else [], reward=1.0)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_row_is_what_was_sampled_and_bridges_whatever_is_said_and_wherever_it_is_cut(name: str, data: Any) -> None:
    tokenizer, message = chat(name), CASES[name]
    end_id = tokenizer._bridge.prove([message]).end_id
    texts = st.lists(st.sampled_from(_fragments(tokenizer)), max_size=4).map("".join)
    script, num_turns = Script(), data.draw(st.integers(1, 6))
    for turn in range(num_turns):
        sampled = tokenizer.encode_rest(f"TURN{turn}. " + data.draw(texts))
        is_cut = data.draw(st.booleans())
        script.turns.append((sampled if is_cut else [*sampled, end_id], "length" if is_cut else "stop"))
        script.answers.append({**message, "content": f"ANSWER{turn}. {data.draw(texts)}".strip()})

    setting = Setting(
        env_kinds=EnvKinds(lambda: script),
        env_limits=EnvLimits(),
        client=script,
        tokenizer=tokenizer,
        parser=None,
        sampling=Sampling(max_tokens=100_000),
        max_completion_length=100_000,
        vocab_size=None,
        max_turns=num_turns,
        max_result_tokens=None,
        timeout_s=60.0,
    )
    row = asyncio.run(run_trajectory(conversation("user", 0), HostedEnv(lambda: script, EnvLimits()), 0, setting))

    assert row.error is None
    assert row.num_turns == num_turns
    assert len(row.completion_ids) == len(row.env_mask) == len(row.logprobs)
    whole = row.prompt_ids + row.completion_ids
    assert all(whole[: len(context)] == context for context in script.contexts)
    expected: list[int] = []
    for (sampled, _), answer in zip(script.turns[:-1], script.answers, strict=False):
        expected += [*sampled, *tokenizer.bridge([answer], last_id=sampled[-1])]
    assert row.completion_ids == expected + script.turns[-1][0]
    assert sum(row.env_mask) == sum(len(sampled) for sampled, _ in script.turns)
    assert [lp == 0.0 for lp in row.logprobs] == [flag == 0 for flag in row.env_mask]
    text = tokenizer._tokenizer.decode(row.completion_ids)
    assert [text.count(f"TURN{turn}.") for turn in range(num_turns)] == [1] * num_turns
    assert [text.count(f"ANSWER{turn}.") for turn in range(num_turns - 1)] == [1] * (num_turns - 1)


@pytest.mark.parametrize("name", [name for name, message in CASES.items() if message is TOOL])
def test_a_call_in_the_templates_own_words_is_read_back(name: str) -> None:
    tokenizer = chat(name)
    written = {"name": "multiply", "arguments": {"a": -12, "b": 7}}
    turn = tokenizer.written_calls([written], ["call00000"])
    schemas = {"multiply": MULTIPLY["function"]["parameters"]["properties"]}
    calls = find_format(tokenizer).parse(turn, schemas)["tool_calls"]
    assert [call["function"] for call in calls] == [written]


@pytest.mark.parametrize("name", ["qwen3_5_think", "nemotron_3_nano"])
def test_a_call_in_thoughts_that_the_prompt_opened_is_not_run(name: str) -> None:
    tokenizer = chat(name)
    parse = find_parser(tokenizer, [MULTIPLY])
    opened = opened_thoughts(tokenizer.decode_end(tokenizer.prompt(conversation("user", 0), [MULTIPLY])))
    call = "<tool_call>\n<function=multiply>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    assert "tool_calls" not in parse(f"{opened}I could {call}, but no.\n</think>\n\nNo.")
    assert "thoughts" in parse(f"{opened}I will {call}")["tool_calls"][0]["error"]


def test_a_tokenizer_that_was_loaded_as_another_class_is_refused() -> None:
    from transformers import AutoTokenizer

    with pytest.raises(SetupError, match="PreTrainedTokenizerFast"):
        ChatTokenizer(AutoTokenizer.from_pretrained(TOKENIZERS / "deepseek_v3"))
