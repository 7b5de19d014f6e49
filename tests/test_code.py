"""Code that the model writes, from its completion to the row: in a real sandbox, with scripted completions."""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trl_rollouts import LocalExecutor, SetupError, code_rollout
from trl_rollouts.code import FORMATS, INSTRUCTIONS, shown_result
from trl_rollouts.rollout import Rollout
from trl_rollouts.sandbox import ExecResult, ExecStatus
from trl_rollouts.testing import Reply, ScriptedClient, byte_tokenizer, fake_trainer

TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "user", "content": "6 times 7?"}]

Roll = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    shared = LocalExecutor(modules=[])
    yield shared
    asyncio.run(shared.close())


@pytest.fixture
def roll(executor: LocalExecutor) -> Iterator[Roll]:
    rollouts: list[Rollout] = []

    def run(
        replies: list[Any],
        *,
        prompt: Any = QUESTION,
        config: dict[str, Any] | None = None,
        tokenizer: Any = TOKENIZER,
        **options: Any,
    ) -> Any:
        client = ScriptedClient(replies, tokenizer=tokenizer, max_model_len=None)
        rollouts.append(code_rollout(executor, client=client, **options))
        batch = rollouts[-1]([prompt], fake_trainer(tokenizer, **{"max_completion_length": 4000} | (config or {})))
        return {name: column[0] for name, column in batch.items()} | {"client": client}

    yield run
    for rollout in rollouts:
        rollout.close()


def contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["transcript"]]


def test_a_result_is_shown_and_the_model_goes_on_until_it_answers_without_code(roll: Roll) -> None:
    row = roll(["<code>6 * 7</code>", "It is 42."])
    assert contents(row)[2:] == ["<code>6 * 7</code>", "<result>\n42\n</result>", "It is 42."]
    assert (row["stop_reason"], row["num_turns"]) == ("terminated", 2)


def test_variables_stay_from_block_to_block(roll: Roll) -> None:
    assert contents(roll(["<code>x = 40</code>", "<code>x + 2</code>", "."]))[5] == "<result>\n42\n</result>"


def test_a_completion_stops_behind_the_code(roll: Roll) -> None:
    assert roll(["."])["client"].calls[0][1].stop == ("</code>",)


def test_a_users_own_stop_strings_are_kept(roll: Roll) -> None:
    row = roll(["."], config={"generation_kwargs": {"stop": ["###"]}})
    assert row["client"].calls[0][1].stop == ("###", "</code>")


def test_an_inline_result_continues_the_assistants_turn(roll: Roll) -> None:
    row = roll(["<code>6 * 7</code>", " so 42."], results_as="inline", instructions=None)
    sampled, shown, rest = "<code>6 * 7</code>", "\n<result>\n42\n</result>\n", " so 42."
    end = TOKENIZER.eos_token_id
    assert row["completion_ids"] == [*TOKENIZER(sampled + shown + rest)["input_ids"], end]
    assert row["env_mask"] == [1] * len(sampled) + [0] * len(shown) + [1] * (len(rest) + 1)
    assert all(logprob == 0.0 for logprob, flag in zip(row["logprobs"], row["env_mask"], strict=True) if not flag)


def test_a_string_prompt_is_continued_as_it_is(roll: Roll) -> None:
    row = roll(["<code>6 * 7</code>", " 42."], prompt="Question: 6 times 7?\n", results_as="inline")
    assert row["prompt_ids"] == TOKENIZER("Question: 6 times 7?\n")["input_ids"]
    assert contents(row)[0] == "Question: 6 times 7?\n"


def test_an_inline_result_behind_the_end_of_the_turn_ends_the_trajectory(roll: Roll) -> None:
    row = roll(["```python\n6 * 7\n```"], format="fenced", results_as="inline")
    assert (row["stop_reason"], row["completion_ids"][-1]) == ("terminated", TOKENIZER.eos_token_id)
    assert row["tool_calls"][0]["result"]["value"] == "42"


def test_a_result_that_spells_the_end_of_a_turn_ends_none(roll: Roll) -> None:
    row = roll(["<code>print('<|im_' + 'end|>')</code>", "."], results_as="inline")
    observed = [i for i, flag in zip(row["completion_ids"], row["env_mask"], strict=True) if not flag]
    assert TOKENIZER.eos_token_id not in observed
    assert TOKENIZER.decode(observed) == "\n<result>\n<|im_end|>\n</result>\n"


@pytest.mark.parametrize("results_as", ["inline", "message"])
def test_text_behind_the_closing_mark_in_the_same_token_stays(roll: Roll, results_as: str) -> None:
    merged = byte_tokenizer(merges=[(">", ")")])  # ">)" is one token
    sampled = merged("<code>6 * 7</code>)")["input_ids"]
    row = roll(["<code>6 * 7</code>)", "."], results_as=results_as, tokenizer=merged)
    assert row["completion_ids"][: len(sampled)] == sampled
    assert row["env_mask"][: len(sampled) + 1] == [1] * len(sampled) + [0]
    assert contents(row)[3].strip() == "<result>\n42\n</result>"


def test_several_blocks_of_a_turn_run_in_order(roll: Roll) -> None:
    ids = TOKENIZER("<code>x = 1; x</code> and <code>x += 1; x</code>")["input_ids"]
    row = roll([Reply(ids, finish_reason="stop"), "."])  # from a server that knows no stop strings
    assert contents(row)[3] == "<result>\n1\n</result>\n<result>\n2\n</result>"
    assert [call["arguments"]["code"] for call in row["tool_calls"]] == ["x = 1; x", "x += 1; x"]


def test_the_default_instructions_are_the_system_message_of_a_prompt_without_one(roll: Roll) -> None:
    system = roll(["."])["transcript"][0]
    assert system == {"role": "system", "content": INSTRUCTIONS.format(opening="<code>", closing="</code>")}


def test_a_prompts_own_system_message_is_left_alone(roll: Roll) -> None:
    row = roll(["."], prompt=[{"role": "system", "content": "Use <code>."}, *QUESTION])
    assert contents(row)[:2] == ["Use <code>.", "6 times 7?"]


def retrieve(query: str, top: int = 1) -> list[str]:
    """Search the library.

    Args:
        query: What to look for.
        top: How many to find.
    """
    if query == "nothing":
        raise LookupError("the library is closed")
    return [query.upper()] * top


def test_functions_are_listed_in_the_instructions(roll: Roll) -> None:
    system = contents(roll(["."], tools=[retrieve]))[0]
    assert system.endswith("- retrieve(query: str, top: int = 1) -> list[str]: Search the library.")


def test_code_calls_functions_of_the_host(roll: Roll) -> None:
    row = roll(["<code>retrieve('a', top=2)</code>", "."], tools=[retrieve])
    assert contents(row)[3] == "<result>\n['A', 'A']\n</result>"
    assert [(call["name"], call["arguments"], call["error"]) for call in row["tool_calls"]] == [
        ("python", {"code": "retrieve('a', top=2)"}, None),
        ("retrieve", {"query": "a", "top": 2}, None),
    ]


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("retrieve('nothing')", "exception", "LookupError: the library is closed"),
        ("retrieve()", "invalid_arguments", "retrieve needs the argument query."),
        ("retrieve(1, 2, 3)", "invalid_arguments", "too many positional arguments"),
        ("retrieve('a', top='many')", "invalid_arguments", "argument top="),
    ],
)
def test_a_functions_failure_is_an_exception_in_the_code(roll: Roll, code: str, kind: str, words: str) -> None:
    row = roll([f"<code>{code}</code>", "."], tools=[retrieve])
    assert words in contents(row)[3]
    assert [call["error"] for call in row["tool_calls"]] == ["exception", kind]


def test_a_function_that_hangs_is_given_up_and_does_not_use_up_the_blocks_time(roll: Roll) -> None:
    async def wait() -> str:
        """Wait."""
        await asyncio.sleep(60)
        return ""

    row = roll(["<code>wait()</code>", "<code>1</code>", "."], tools=[wait], timeout_s=0.2, tool_timeout_s=0.5)
    assert "wait took longer than 0.5 seconds" in contents(row)[3]
    assert contents(row)[5] == "<result>\n1\n</result>"


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("1 +", "exception", "SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\nf()", "exception", "line 2, in f\n    return 1 / 0"),
        ("import sys; sys.exit(3)", None, "SystemExit: 3"),
        ("while True: pass", "timeout", "Variables and files are kept."),
        ("import os; os._exit(0)", "died", "All variables and files are lost."),
        ("open('/etc/passwd')", "exception", "PermissionError"),
        ("import socket; socket.socket()", "exception", "PermissionError"),
        ("x = lambda: 1", None, "(no output)"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_block_runs(roll: Roll, code: str, error: str | None, words: str) -> None:
    row = roll([f"<code>{code}</code>", "<code>40 + 2</code>", "."], timeout_s=0.5)
    assert words in contents(row)[3]
    assert row["tool_calls"][0]["error"] == error
    assert contents(row)[5] == "<result>\n42\n</result>"
    assert row["rollout_error"] is None


@pytest.mark.parametrize("text", ["<code>6 * 7", "6 * 7</code>"])
def test_half_a_block_is_answered(roll: Roll, text: str) -> None:
    row = roll([text, "."])
    assert contents(row)[3] == (
        "<result>\nError: the code is not between <code> and </code>, so it was not run.\n</result>"
    )
    assert row["tool_calls"][0]["error"] == "parse_error"


def test_a_long_result_is_shown_without_its_middle(roll: Roll) -> None:
    row = roll(["<code>print('a' * 5000 + 'z')</code>", "."], max_result_tokens=100)
    shown = contents(row)[3]
    assert shown.startswith("<result>\naaa")
    assert "characters left out" in shown
    assert shown.endswith("aaaz\n</result>")
    assert len(shown) < 200


def test_code_in_thoughts_is_run_since_generation_stopped_there(roll: Roll) -> None:
    row = roll(["<think>Let me see. <code>6 * 7</code>", "."])
    assert contents(row)[3] == "<result>\n42\n</result>"


def test_trajectories_have_sessions_of_their_own(executor: LocalExecutor) -> None:
    client = ScriptedClient(
        lambda ids: (
            "." if TOKENIZER.decode(ids).count("<result>") == 2 else "<code>n = globals().get('n', 0) + 1; n</code>"
        ),
        tokenizer=TOKENIZER,
        max_model_len=None,
    )
    rollout = code_rollout(executor, client=client, instructions=None)
    batch = rollout([QUESTION] * 16, fake_trainer(TOKENIZER, max_completion_length=4000))
    rollout.close()
    for messages in batch["transcript"]:
        assert [m["content"] for m in messages if "result" in m["content"]] == [
            "<result>\n1\n</result>",
            "<result>\n2\n</result>",
        ]


def test_the_default_executor_is_closed_with_the_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    client = ScriptedClient(["<code>1</code>", "."], tokenizer=TOKENIZER, max_model_len=None)
    rollout = code_rollout(client=client)
    rollout([QUESTION], fake_trainer(TOKENIZER, max_completion_length=4000))
    assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["trl_rollouts"]
    rollout.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("<code>a</code>", ["a"]),
        ("<code>a</code><code>b</code>", ["a", "b"]),
        ("I use <code> tags. <code>a</code>", ["a"]),
        ("<code></code>", [""]),
        ("<code>a < b > c</code></code>", ["a < b > c"]),
        ("<code>\n    x = 1\n    x\n</code>", ["x = 1\nx"]),
        ("<code>\n```python\na\n```\n</code>", ["a"]),
        ("<code>```\na\n```</code>", ["a"]),
        ("no code", []),
    ],
)
def test_tags_enclose_code(text: str, blocks: list[str]) -> None:
    assert FORMATS["tags"].blocks(text) == blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("```python\na\n```", ["a"]),
        ("x\n```py\na\n```\n", ["a"]),
        ("```python\na\n```\nand\n```Python\nb\n```\n", ["a", "b"]),
        ("```json\n{}\n```\n```python\na\n```\n", ["a"]),
        ("```\nplain\n```\n```python\na\n```\n", ["a"]),
        ("```python\r\na\r\nb\r\n```\r\n", ["a\r\nb"]),
        ("Here: ```python\na\n```\nand\n```python\nb\n```\n", ["a", "b"]),
        ("```python3\na\n```\n", ["a"]),
        ("``` python\na\n```\n", ["a"]),
        ("```python title=x\na\n```\n", ["a"]),
        ("  ```python\n  a\n  ```\n", ["a"]),
        ("````python\n```\n````", ["```"]),
        ("~~~python\na\n~~~", ["a"]),
        ("```\nleft open\n\n```python\na\n```\n", ["a"]),
        ("say ```python``` inline", []),
        ("```pythonic\na\n```", []),
        ("```python\nprint('```')\n```\n", ["print('```')"]),
    ],
)
def test_fences_enclose_code(text: str, blocks: list[str]) -> None:
    assert FORMATS["fenced"].blocks(text) == blocks


def test_a_fence_left_open_is_a_problem_and_one_of_another_language_is_none() -> None:
    assert FORMATS["fenced"].problem("```python\na\n") is not None
    assert FORMATS["fenced"].problem("```json\n{}\n```") is None


def test_a_shown_result_has_output_then_value_then_stderrs_end_then_error() -> None:
    stderr = "".join(f"line {n}\n" for n in range(12))
    result = ExecResult(ExecStatus.ERROR, stdout="out\n", stderr=stderr, value="1", error="ValueError")
    assert shown_result(result).splitlines() == ["out", "1", *(f"line {n}" for n in range(2, 12)), "ValueError"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"format": "xml"}, 'format must be "tags" or "fenced"'),
        ({"results_as": "text"}, 'results_as "inline" or "message"'),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
        ({"tools": retrieve}, "tools must be a list of functions"),
        ({"tools": [lambda: 1]}, "The tool <lambda>"),
        ({"executor": "docker"}, "executor must be an Executor"),
        ({"executor": LocalExecutor}, "executor must be an Executor, such as LocalExecutor\\(\\)"),
        ({"tools": None}, "tools must be a list of functions"),
        ({"tools": [retrieve, retrieve]}, "cannot call functions by the names"),
        ({"instructions": 5}, "instructions must be a text"),
        ({"max_result_tokens": 0}, "max_result_tokens must be a number of tokens"),
        ({"temperature": 0.5}, "set GRPOConfig.temperature"),
        ({"timeout": 3}, "Did you mean timeout_s?"),
    ],
)
def test_an_argument_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        code_rollout(**options)


def test_generation_goes_on_behind_a_fence_of_another_language(roll: Roll) -> None:
    texts = ["See:\n```latex\nx\n```\n", "Final answer: 42"]
    row = roll(texts, format="fenced", instructions=None)
    assert row["completion_ids"] == [*TOKENIZER("".join(texts))["input_ids"], TOKENIZER.eos_token_id]
    assert row["env_mask"] == [1] * len(row["completion_ids"])
    assert (row["stop_reason"], contents(row)[1:]) == ("terminated", texts)


def test_a_block_that_calls_a_function_for_ever_is_stopped(roll: Roll) -> None:
    row = roll(["<code>while True:\n    try: retrieve('a')\n    except RuntimeError as e: last = e</code>", "."],
               tools=[retrieve], timeout_s=0.5)  # fmt: skip
    assert [call["name"] for call in row["tool_calls"]] == ["python", *["retrieve"] * 32]
    assert row["tool_calls"][0]["error"] in ("timeout", "killed")


def test_the_functions_of_a_block_share_one_time_limit(roll: Roll) -> None:
    async def wait() -> None:
        """Wait."""
        await asyncio.sleep(0.4)

    row = roll(["<code>for _ in range(3): wait()</code>", "."], tools=[wait], tool_timeout_s=1.0)
    assert [call["error"] for call in row["tool_calls"]] == ["exception", None, None, "timeout"]


def numbers(kind: str) -> Any:
    """Numbers.

    Args:
        kind: Of which kind.
    """
    import numpy as np

    return {"int64": np.int64(3), "array": np.arange(3), "set": {3}, "object": object()}[kind]


@pytest.mark.parametrize(
    ("code", "shown"), [("numbers('int64') * 2", "6"), ("numbers('array')", "[0, 1, 2]"), ("numbers('set')", "[3]")]
)
def test_what_a_function_returns_arrives_as_data(roll: Roll, code: str, shown: str) -> None:
    assert contents(roll([f"<code>{code}</code>", "."], tools=[numbers]))[3] == f"<result>\n{shown}\n</result>"


def test_a_function_that_returns_no_data_says_so(roll: Roll) -> None:
    row = roll(["<code>numbers('object')</code>", "."], tools=[numbers])
    assert (
        "numbers returned what is no plain data" in contents(row)[3] or "object, which is no plain" in contents(row)[3]
    )
    assert [call["error"] for call in row["tool_calls"]] == ["exception", "exception"]


def test_arguments_that_are_no_data_are_an_error_of_one_line(roll: Roll) -> None:
    shown = contents(roll(["<code>retrieve(object())</code>", "."], tools=[retrieve]))[3]
    assert "TypeError: retrieve takes plain data (numbers, texts, lists, dicts): object is none" in shown
    assert "json" not in shown


def test_a_system_message_that_hides_the_format_is_warned_of(roll: Roll, caplog: pytest.LogCaptureFixture) -> None:
    roll(["."], prompt=[{"role": "system", "content": "Be nice."}, *QUESTION], tools=[retrieve])
    assert "does not say <code>, retrieve" in caplog.text


@pytest.mark.parametrize(
    "text", ["`" * 100_000, "~" * 100_000, "```python " * 9_000, "<code>" * 9_000, "\n```x" * 9_000]
)
@pytest.mark.parametrize("name", ["tags", "fenced"])
def test_no_text_takes_long_to_read(name: str, text: str) -> None:
    started = time.process_time()
    FORMATS[name].blocks(text)
    FORMATS[name].problem(text)
    assert time.process_time() - started < 1.0


def test_code_that_spells_the_end_of_thoughts_is_run_as_it_was_written(roll: Roll) -> None:
    assert contents(roll(["<code>s = '</think>'; s</code>", "."]))[3] == "<result>\n'</think>'\n</result>"


def test_an_answer_without_code_is_read_without_its_thoughts(roll: Roll) -> None:
    row = roll(["<think>6 times 7</think>42"])
    assert (row["transcript"][-1]["content"], row["transcript"][-1]["reasoning_content"]) == ("42", "6 times 7")


def test_results_that_no_template_can_show_are_refused_before_anything_is_sampled(roll: Roll) -> None:
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(SetupError, match='results_as="inline"'):
        roll(["<code>1</code>", "."], prompt="Question: ", tokenizer=bare)


def test_a_given_executor_outlives_the_rollouts_that_share_it(roll: Roll, executor: LocalExecutor) -> None:
    for _ in range(2):
        assert contents(roll(["<code>1</code>", "."]))[3] == "<result>\n1\n</result>"
    assert executor._server is not None
    assert executor._server.is_alive


def test_more_blocks_than_are_run_are_told(roll: Roll) -> None:
    ids = TOKENIZER("<code>1</code>" * 9)["input_ids"]
    row = roll([Reply(ids, finish_reason="stop"), "."])
    assert contents(row)[3].count("\n1\n") == 8
    assert "only the first 8 pieces of code of a turn are run" in contents(row)[3]


def test_a_trajectory_that_runs_out_of_time_ends_its_session(executor: LocalExecutor) -> None:
    client = ScriptedClient(["<code>1</code>", "<code>while True: pass</code>"], tokenizer=TOKENIZER)
    rollout = code_rollout(executor, client=client, timeout_s=60.0, trajectory_timeout_s=1.0)
    batch = rollout([QUESTION], fake_trainer(TOKENIZER, max_completion_length=1000))
    rollout.close()
    assert (batch["stop_reason"], batch["num_turns"]) == (["timeout"], [1])
    assert executor._server is not None
    assert not [name for name in os.listdir(executor._server._base) if name.startswith("session")]
