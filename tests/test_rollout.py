"""Whole rollouts over a scripted client: what is sent, what comes back, on literal ids.

The byte tokenizer's ids are bytes; 257 is <|im_start|>, 258 <|im_end|>, 261 and 262 the tags of a tool call.
"""

import asyncio
import copy
import importlib.util
import itertools
import logging
import math
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trl_rollouts import (
    Completion,
    Message,
    RequestError,
    Rollout,
    RolloutError,
    ServerError,
    SetupError,
    StepResult,
    env_rollout,
    parse_hermes,
    tool_rollout,
)
from trl_rollouts.testing import Reply, ScriptedClient, byte_tokenizer, fake_trainer
from trl_rollouts.tokens import ChatTokenizer

TOKENIZER = byte_tokenizer()
START, END = 257, 258


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def call(a: int, b: int) -> str:
    return f'<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def bridged(text: str) -> list[int]:
    """What follows the end of a turn whose call was answered with `text`."""
    return ids(f"\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


class Echo:
    """Answers every turn with its text in capitals; ends when the text is "stop"."""

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        text = action["content"]
        return StepResult([{"role": "user", "content": text.upper()}], reward=len(text), terminated=text == "stop")

    def close(self) -> None:
        pass


def roll(rollout: Rollout, *prompts: Any, **config: Any) -> dict[str, list[Any]]:
    return rollout(list(prompts), fake_trainer(TOKENIZER, **config))


def test_a_call_its_answer_and_the_next_turn_are_one_row() -> None:
    client = ScriptedClient([call(7, 8), "56."])
    batch = roll(tool_rollout([multiply], client=client), ask("7 times 8?"))
    turn, answer, last = [*ids(call(7, 8)), END], bridged("56"), [*ids("56."), END]
    [prompt] = batch["prompt_ids"]
    assert b"multiply" in bytes(i for i in prompt if i < 256)
    assert batch["completion_ids"] == [turn + answer + last]
    assert batch["env_mask"] == [[1] * len(turn) + [0] * len(answer) + [1] * len(last)]
    assert [sent for sent, _ in client.calls] == [prompt, prompt + turn + answer]
    assert batch["logprobs"] == [
        [client.logprob(i) for i in turn] + [0.0] * len(answer) + [client.logprob(i) for i in last]
    ]


def test_reward_functions_get_the_true_messages_and_calls() -> None:
    batch = roll(tool_rollout([multiply], client=ScriptedClient([call(7, 8), "56."])), ask("7 times 8?"))
    [record] = batch["tool_calls"][0]
    assert record.pop("duration_s") >= 0
    assert record == {
        "name": "multiply", "arguments": {"a": 7, "b": 8}, "result": 56, "error": None, "content": "56"
    }  # fmt: skip
    assert [message["role"] for message in batch["transcript"][0]] == ["user", "assistant", "tool", "assistant"]
    assert batch["transcript"][0][2]["content"] == "56"
    assert (batch["stop_reason"], batch["num_turns"], batch["env_reward"]) == (["terminated"], [2], [0.0])


def test_a_single_step_call_is_run_and_nothing_is_fed_back() -> None:
    client = ScriptedClient([call(7, 8)])
    batch = roll(tool_rollout([multiply], max_turns=1, client=client), ask("7 times 8?"))
    assert batch["completion_ids"] == [[*ids(call(7, 8)), END]]
    assert batch["env_mask"] == [[1] * (len(ids(call(7, 8))) + 1)]
    assert [record["result"] for record in batch["tool_calls"][0]] == [56]
    assert batch["stop_reason"] == ["max_turns"]
    assert len(client.calls) == 1


def test_half_a_surrogate_pair_that_the_model_wrote_can_be_answered() -> None:
    client = ScriptedClient(['{"name": "multiply", "arguments": {"\\ud800": 1}}', "ok"])
    batch = roll(tool_rollout([multiply], client=client), ask("?"))
    assert batch["stop_reason"] == ["terminated"]
    assert batch["tool_calls"][0][0]["error"] == "invalid_arguments"


def test_a_parser_of_ones_own_needs_no_ids_and_may_leave_arguments_as_json() -> None:
    def parser(text: str) -> Message:
        calls = [{"function": {"name": "multiply", "arguments": '{"a": 6, "b": 7}'}}] if text == "go" else []
        return {"role": "assistant", "content": text, "tool_calls": calls}

    batch = roll(tool_rollout([multiply], parser=parser, client=ScriptedClient(["go", "42"])), ask("?"))
    assert batch["transcript"][0][2] == {
        "role": "tool",
        "tool_call_id": "call00000",
        "name": "multiply",
        "content": "42",
    }


def test_two_calls_of_a_turn_are_answered_in_order() -> None:
    client = ScriptedClient([call(2, 3) + "\n" + call(4, 5), "ok"])
    batch = roll(tool_rollout([multiply], client=client), ask("?"))
    assert [m["content"] for m in batch["transcript"][0] if m["role"] == "tool"] == ["6", "20"]


@pytest.mark.parametrize(
    "inner", ["{}", '{"name": 1}', "[]", "nonsense", '{"name": "f"}', '{"name": "multiply", "arguments": [1]}']
)
def test_a_bad_call_is_answered_and_the_model_goes_on(inner: str) -> None:
    client = ScriptedClient([f"<tool_call>{inner}</tool_call>", call(7, 8), "56."])
    batch = roll(tool_rollout([multiply], client=client), ask("?"))
    assert [record["error"] is None for record in batch["tool_calls"][0]] == [False, True]
    assert batch["transcript"][0][2]["content"].startswith("Error: ")
    assert batch["stop_reason"] == ["terminated"]


def test_as_many_rows_come_back_as_prompts_went_in_and_in_their_order() -> None:
    def reply(prompt: list[int]) -> Reply:
        question = next(i for i in (ord("p"), ord("q"), ord("r")) if i in prompt[prompt.index(10) :][:3])
        return Reply([question, END], delay_s={"p": 0.15, "q": 0.1, "r": 0.05}[chr(question)])

    batch = roll(env_rollout(Echo, max_turns=1, client=ScriptedClient(reply)), *map(ask, "ppqr"), num_generations=2)
    assert [row[0] for row in batch["completion_ids"]] == [ord("p"), ord("p"), ord("q"), ord("r")]
    assert {len(values) for values in batch.values()} == {4}


def test_no_prompts_are_no_rows() -> None:
    assert roll(env_rollout(Echo, client=ScriptedClient([])))["completion_ids"] == []


def test_members_of_a_group_keep_their_own_contexts() -> None:
    firsts = iter(["a", "b"])

    def reply(prompt: list[int]) -> str:
        return next(firsts) if prompt.count(START) == 2 else "stop"

    client = ScriptedClient(reply)
    batch = roll(env_rollout(Echo, client=client), ask("p"), ask("p"))
    assert batch["prompt_ids"][0] == batch["prompt_ids"][1]
    assert sorted(chr(row[0]) for row in batch["completion_ids"]) == ["a", "b"]
    for letter, row in ((chr(row[0]), row) for row in batch["completion_ids"]):
        answer = ids(f"{letter}<|im_end|>\n<|im_start|>user\n{letter.upper()}<|im_end|>\n<|im_start|>assistant\n")
        assert row == [*answer, *ids("stop"), END]


def test_sampled_ids_are_never_encoded_again() -> None:
    tokenizer = byte_tokenizer([("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")])
    he, llo, hello = (tokenizer.convert_tokens_to_ids(token) for token in ("he", "llo", "hello"))
    assert tokenizer("hello")["input_ids"] == [hello]
    client = ScriptedClient([[he, llo, END], "stop"], tokenizer=tokenizer)
    batch = env_rollout(Echo, client=client)([ask("p")], fake_trainer(tokenizer))
    assert batch["completion_ids"][0][:3] == [he, llo, END]
    assert client.calls[1][0][: len(batch["prompt_ids"][0]) + 3] == [*batch["prompt_ids"][0], he, llo, END]


def test_thoughts_of_earlier_turns_are_kept_under_a_template_that_drops_them() -> None:
    client = ScriptedClient(["<think>\none\n</think>\n\na", "<think>\ntwo\n</think>\n\nb", "stop"])
    trainer = fake_trainer(TOKENIZER)
    templates = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr, index]
    trainer.chat_template = (templates / "qwen3.jinja").read_text()
    batch = env_rollout(Echo, client=client)([ask("p")], trainer)
    contexts = [context for context, _ in client.calls]
    for earlier, later in itertools.pairwise(contexts):
        assert later[: len(earlier)] == earlier
    text = TOKENIZER.decode(batch["completion_ids"][0])
    assert [text.count(part) for part in ("one", "two", "stop")] == [1, 1, 1]
    assert batch["transcript"][0][1] == {"role": "assistant", "content": "a", "reasoning_content": "one"}


def repeat(times: int) -> str:
    """Repeat.

    Args:
        times: How often.
    """
    return "word " * times


def test_a_long_result_is_shown_without_its_middle_and_reported_whole() -> None:
    asked = '<tool_call>{"name": "repeat", "arguments": {"times": 100}}</tool_call>'
    client = ScriptedClient([asked, "ok"])
    batch = roll(tool_rollout([repeat], max_result_tokens=10, client=client), ask("p"))
    shown = "word \n[... 490 characters left out ...]\nword "
    assert batch["transcript"][0][2]["content"] == shown
    assert bridged(shown) == batch["completion_ids"][0][len(ids(asked)) + 1 : -len(ids("ok")) - 1]
    assert batch["tool_calls"][0][0]["content"] == "word " * 100


def test_a_stop_tool_ends_the_row_with_the_models_own_end_of_turn() -> None:
    client = ScriptedClient([call(6, 7)])
    batch = roll(tool_rollout([multiply], stop_tools=["multiply"], client=client), ask("p"))
    assert len(client.calls) == 1
    assert batch["completion_ids"] == [[*ids(call(6, 7)), END]]
    assert batch["stop_reason"] == ["terminated"]
    assert batch["tool_calls"][0][0]["result"] == 42


def test_a_rows_own_tools_are_the_ones_in_its_prompt() -> None:
    prompts = [[{**ask("p")[0], "task": {"tool_names": names}}] for names in (["multiply"], ["repeat"], [])]
    batch = roll(tool_rollout([multiply, repeat], client=ScriptedClient(["ok"] * 3)), *prompts)
    texts = [TOKENIZER.decode(prompt_ids) for prompt_ids in batch["prompt_ids"]]
    assert [("multiply" in text, "repeat" in text) for text in texts] == [(True, False), (False, True), (False, False)]


def test_a_tool_that_the_prompts_author_describes_need_not_be_in_the_template() -> None:
    trainer = fake_trainer(TOKENIZER)
    trainer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    described = ask("Call multiply with a and b. Multiply two integers. What is 6 times 7?")
    rollout = tool_rollout([multiply], max_turns=1, parser=parse_hermes, client=ScriptedClient([call(6, 7)]))
    assert rollout([described], trainer)["tool_calls"][0][0]["result"] == 42


@pytest.mark.parametrize("num_turns", [2, 8, 32, 128])
def test_what_a_turn_encodes_depends_on_its_new_messages_only(monkeypatch: pytest.MonkeyPatch, num_turns: int) -> None:
    num_chars: list[int] = []
    encode = ChatTokenizer.encode

    def counted(self: ChatTokenizer, text: str, **kwargs: Any) -> list[int]:
        num_chars.append(len(text))
        return encode(self, text, **kwargs)

    monkeypatch.setattr(ChatTokenizer, "encode", counted)
    rollout = env_rollout(Echo, max_turns=num_turns + 1, client=ScriptedClient(["a"] * (num_turns + 1)))
    roll(rollout, ask("p"), max_completion_length=100_000)
    tail = "<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\n"
    assert num_chars[-num_turns:] == [len(tail)] * num_turns
    assert len(num_chars) == num_turns + 3  # with the prompt, and the proofs of the tokenizer and the template


def test_a_turn_that_a_limit_of_its_own_cut_gets_one_end_that_is_not_trained() -> None:
    client = ScriptedClient([[*b"abcdef"], "stop"])
    config = {"generation_kwargs": {"max_tokens": 4}}
    batch = roll(env_rollout(Echo, client=client), ask("p"), **config)
    row, mask = batch["completion_ids"][0], batch["env_mask"][0]
    assert row[:6] == [*b"abcd", END, 10]
    assert mask[:6] == [1, 1, 1, 1, 0, 0]
    assert batch["logprobs"][0][4] == 0.0


def test_every_sampled_token_is_trained_and_no_other() -> None:
    client = ScriptedClient(["a", "b", "stop"])
    batch = roll(env_rollout(Echo, client=client), ask("p"))
    assert sum(batch["env_mask"][0]) == len("a") + len("b") + len("stop") + 3
    assert all(lp != 0.0 or m == 0 for lp, m in zip(batch["logprobs"][0], batch["env_mask"][0], strict=True))


# Budgets: max_completion_length is the whole trajectory, observations included.


def test_a_turn_may_use_what_the_turns_and_observations_before_it_left() -> None:
    client = ScriptedClient(["a" * 9, "stop"])
    roll(env_rollout(Echo, client=client), ask("p"), max_completion_length=100)
    observed = len(ids("\n<|im_start|>user\nAAAAAAAAA<|im_end|>\n<|im_start|>assistant\n"))
    assert [sampling.max_tokens for _, sampling in client.calls] == [100, 100 - 10 - observed]


def test_an_observation_that_leaves_no_room_is_left_out_whole() -> None:
    client = ScriptedClient(["a" * 30])
    batch = roll(env_rollout(Echo, client=client), ask("p"), max_completion_length=50)
    assert batch["completion_ids"] == [[97] * 30 + [END]]
    assert batch["stop_reason"] == ["length"]
    assert len(client.calls) == 1


def test_a_completion_that_is_cut_has_exactly_the_budget_and_ends_the_row() -> None:
    batch = roll(env_rollout(Echo, client=ScriptedClient([[97] * 99])), ask("p"), max_completion_length=16)
    assert batch["completion_ids"] == [[97] * 16]
    assert batch["stop_reason"] == ["length"]
    assert batch["env_reward"] == [16.0]


def test_the_servers_context_limits_a_request() -> None:
    prompt_len = len(ids("<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n"))
    client = ScriptedClient([[97] * 99], max_model_len=prompt_len + 7)
    batch = roll(env_rollout(Echo, client=client), ask("p"), max_completion_length=64)
    assert client.calls[0][1].max_tokens == 7
    assert batch["completion_ids"] == [[97] * 7]
    assert batch["stop_reason"] == ["length"]


def test_a_prompt_that_is_too_long_fails_its_row_and_is_not_sent() -> None:
    client = ScriptedClient(["stop"], max_model_len=60)
    batch = roll(env_rollout(Echo, client=client), ask("p" * 100), ask("p"), max_completion_length=8)
    assert len(client.calls) == 1
    assert batch["env_reward"] == [None, 4.0]
    assert "tokens and the server's max_model_len is 60" in batch["rollout_error"][0]
    assert batch["env_mask"] == [[0], [1] * 5]


def test_nearly_everything_cut_by_length_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    rollout = env_rollout(Echo, client=ScriptedClient(lambda prompt: [97] * 99))
    with caplog.at_level(logging.WARNING):
        roll(rollout, ask("p"), ask("q"), max_completion_length=4)
        roll(rollout, ask("p"), ask("q"), max_completion_length=4)
    assert caplog.text.count("2 of 2 trajectories were cut by length (max_completion_length=4") == 1


def test_a_stop_string_inside_a_token_keeps_the_whole_token() -> None:
    tokenizer = byte_tokenizer([("!", "x")])
    bang_x = tokenizer.convert_tokens_to_ids("!x")
    client = ScriptedClient([[97, bang_x, 98]], tokenizer=tokenizer)
    trainer = fake_trainer(tokenizer, generation_kwargs={"stop": ["!"]})
    batch = env_rollout(Echo, max_turns=1, client=client)([ask("p")], trainer)
    assert batch["completion_ids"] == [[97, bang_x]]
    assert batch["transcript"][0][-1]["content"] == "a!x"


# Failures: data ends its row, infra is raised.


class Fragile(Echo):
    def step(self, action: Message) -> StepResult:
        if action["content"] == "boom":
            raise KeyError("boom")
        return super().step(action)


def test_a_step_that_raises_ends_its_row_with_its_tokens_and_no_reward() -> None:
    def reply(prompt: list[int]) -> str:
        return "boom" if ord("3") in prompt else "stop"

    batch = roll(env_rollout(Fragile, client=ScriptedClient(reply)), *map(ask, "01234567"))
    assert batch["env_reward"] == [4.0, 4.0, 4.0, None, 4.0, 4.0, 4.0, 4.0]
    assert batch["completion_ids"][3] == [*b"boom", END]
    assert (batch["env_mask"][3], batch["logprobs"][3]) == ([0] * 5, [0.0] * 5)
    assert batch["rollout_error"][3] == "EnvError: env.step failed: KeyError: 'boom'"
    assert batch["rollout_error"][0] is None


def test_a_batch_without_a_survivor_is_raised_with_counts_and_the_first_cause() -> None:
    rollout = env_rollout(Fragile, client=ScriptedClient(lambda prompt: "boom"))
    with pytest.raises(RolloutError, match=r"All 2 trajectories failed \(2 EnvError\).*KeyError: 'boom'"):
        roll(rollout, ask("p"), ask("q"))


def test_where_rows_come_one_at_a_time_a_failed_one_is_a_row_and_eight_in_a_row_are_raised() -> None:
    rollout = env_rollout(Fragile, client=ScriptedClient(lambda prompt: "stop" if prompt == [ord("s")] else "boom"))
    for _ in range(2):
        for _ in range(7):
            assert roll(rollout, ask("p"), mode="eval")["env_reward"] == [None]
        assert roll(rollout, "s", mode="eval")["env_reward"] == [4.0]
    for _ in range(7):
        roll(rollout, ask("p"), mode="eval")
    with pytest.raises(RolloutError, match="The last 8 trajectories failed"):
        roll(rollout, ask("p"), mode="eval")


def test_a_request_that_the_server_refuses_fails_alone() -> None:
    def reply(prompt: list[int]) -> str:
        if ord("q") in prompt:
            raise RequestError("answered 400: no")
        return "stop"

    batch = roll(env_rollout(Echo, client=ScriptedClient(reply)), ask("p"), ask("q"))
    assert batch["rollout_error"] == [None, "RequestError: answered 400: no"]


def test_a_server_that_is_gone_is_raised_and_the_other_trajectories_are_closed() -> None:
    closed = []

    class Closing(Echo):
        def close(self) -> None:
            closed.append(1)

    def reply(prompt: list[int]) -> Reply:
        if ord("q") in prompt:
            raise ServerError("gone")
        return Reply([END], delay_s=30.0)

    started = time.monotonic()
    with pytest.raises(ServerError, match="gone"):
        roll(env_rollout(Closing, client=ScriptedClient(reply)), ask("p"), ask("q"))
    assert time.monotonic() - started < 5
    assert closed == [1, 1]


def test_a_trajectory_that_is_stuck_ends_at_its_limit_with_the_turns_it_has() -> None:
    class Stuck(Echo):
        async def step(self, action: Message) -> StepResult:  # type: ignore[override]
            if action["content"] == "wait":
                await asyncio.sleep(60)
            return super().step(action)

    client = ScriptedClient(lambda prompt: "wait" if prompt.count(START) > 2 else "a")
    batch = roll(env_rollout(Stuck, trajectory_timeout_s=0.5, client=client), ask("p"))
    assert batch["stop_reason"] == ["timeout"]
    assert batch["completion_ids"] == [[97, END]]
    assert [message["role"] for message in batch["transcript"][0]] == ["user", "assistant"]
    assert batch["env_reward"] == [1.0]
    assert batch["env_mask"][0][-1] == 1


def test_a_trajectory_that_is_stuck_before_its_first_step_is_over_has_failed() -> None:
    class Hung(Echo):
        async def step(self, action: Message) -> StepResult:  # type: ignore[override]
            if action["content"] == "wait":
                await asyncio.sleep(60)
            return super().step(action)

    client = ScriptedClient(lambda prompt: "wait" if ord("q") in prompt[5:8] else "stop")
    batch = roll(env_rollout(Hung, trajectory_timeout_s=0.5, client=client), ask("p"), ask("q"))
    assert batch["stop_reason"] == ["terminated", "error"]
    assert batch["env_mask"][1] == [0] * 5
    assert "no turn was finished within trajectory_timeout_s=0.5" in batch["rollout_error"][1]


def test_a_slow_close_changes_nothing_of_what_had_happened() -> None:
    class SlowClose(Fragile):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(0.6)

    client = ScriptedClient(lambda prompt: "boom" if ord("q") in prompt[5:8] else "stop")
    batch = roll(env_rollout(SlowClose, trajectory_timeout_s=0.4, client=client), ask("p"), ask("q"))
    assert batch["stop_reason"] == ["terminated", "error"]
    assert batch["env_reward"] == [4.0, None]
    assert "KeyError" in batch["rollout_error"][1]


def test_a_sync_environment_lives_in_one_thread_and_is_closed_after_a_step_that_hangs() -> None:
    events: list[tuple[str, int]] = []

    class Sqlite(Echo):
        def __init__(self) -> None:
            events.append(("init", threading.get_ident()))

        def step(self, action: Message) -> StepResult:
            time.sleep(0.6)
            events.append(("step", threading.get_ident()))
            return super().step(action)

        def close(self) -> None:
            events.append(("close", threading.get_ident()))

    started = time.monotonic()
    rollout = env_rollout(Sqlite, trajectory_timeout_s=0.3, client=ScriptedClient(["a"]))
    assert roll(rollout, ask("p"), mode="eval")["stop_reason"] == ["error"]
    assert time.monotonic() - started < 0.6
    time.sleep(0.6)
    assert [name for name, _ in events] == ["init", "step", "close"]
    assert len({thread for _, thread in events}) == 1


def cancelled(action: Message) -> StepResult:
    raise asyncio.CancelledError


async def cancelled_inside(action: Message) -> StepResult:
    task = asyncio.create_task(asyncio.sleep(10))
    task.cancel()
    await task
    raise AssertionError


def stops(action: Message) -> StepResult:
    raise StopIteration


def exits(action: Message) -> StepResult:
    raise SystemExit(3)


def exits_later(action: Message) -> Any:
    async def later() -> StepResult:
        raise SystemExit(3)

    return later()


@pytest.mark.parametrize("step", [cancelled, cancelled_inside, stops, exits, exits_later])
def test_code_of_a_user_that_exits_or_is_cancelled_fails_its_row_only(step: Callable[[Message], Any]) -> None:
    class Leaving(Echo):
        def __init__(self) -> None:
            if next(made) == 0:
                self.step = step  # type: ignore[method-assign]

    made = itertools.count()
    started = time.monotonic()
    rollout = env_rollout(Leaving, client=ScriptedClient(lambda prompt: "stop"), max_concurrency=1)
    batch = roll(rollout, ask("p"), ask("q"))
    assert time.monotonic() - started < 5
    assert batch["stop_reason"] == ["error", "terminated"]
    assert "RuntimeError" in batch["rollout_error"][0]


def test_a_parser_that_exits_fails_its_row_only() -> None:
    def parser(text: str) -> Message:
        if text != "stop":
            raise SystemExit
        return {"role": "assistant", "content": text}

    client = ScriptedClient(lambda prompt: "stop" if ord("p") in prompt[5:8] else "x")
    batch = roll(env_rollout(Echo, parser=parser, client=client), ask("p"), ask("q"))
    assert batch["stop_reason"] == ["terminated", "error"]


def test_an_environment_may_use_its_messages_again_and_may_not_turn_them_into_the_models() -> None:
    class Reusing(Echo):
        message: Message = {"role": "user", "content": ""}  # noqa: RUF012

        def step(self, action: Message) -> StepResult:
            result = StepResult([self.message], terminated=action["content"] == "stop")
            self.message["content"] = action["content"].upper()
            if action["content"] == "cheat":
                self.message["role"] = "assistant"
            return result

    batch = roll(env_rollout(Reusing, client=ScriptedClient(["a", "b", "stop"])), ask("p"))
    assert [m["content"] for m in batch["transcript"][0]] == ["p", "a", "A", "b", "B", "stop"]
    with pytest.raises(RolloutError, match="only the model speaks"):
        roll(env_rollout(Reusing, client=ScriptedClient(["cheat"])), ask("p"))


def test_an_environment_is_closed_once_whatever_happened() -> None:
    events: list[str] = []

    class Counting(Fragile):
        def reset(self, prompt: list[Message]) -> list[Message]:
            events.append("reset")
            if prompt[0]["content"] == "bad":
                raise ValueError("no such level")
            return prompt

        def close(self) -> None:
            events.append("close")
            raise OSError("cannot close")

    client = ScriptedClient(lambda prompt: "boom" if ord("x") in prompt else "stop")
    batch = roll(env_rollout(Counting, client=client), ask("bad"), ask("x"), ask("y"))
    assert sorted(events) == ["close"] * 3 + ["reset"] * 3
    assert [error is None for error in batch["rollout_error"]] == [False, False, True]


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "env.step returned NoneType, None; it must return a trl_rollouts.StepResult"),
        (StepResult([{"role": "user", "content": "x"}], reward=math.nan), "returned reward nan; it must be finite"),
        (StepResult([]), "returned no message and did not end the episode"),
        (StepResult(info=None), "env.step returned info=None; it must be a dict"),  # type: ignore[arg-type]
        (StepResult(info={"tool_calls": ["f"]}), 'its "tool_calls" dicts'),
    ],
)
def test_a_step_that_returns_the_wrong_thing_is_a_sentence(result: Any, said: str) -> None:
    class Wrong(Echo):
        def step(self, action: Message) -> Any:
            return result

    with pytest.raises(RolloutError, match=said.replace("(", r"\(")):
        roll(env_rollout(Wrong, client=ScriptedClient(["a"])), ask("p"))


def test_an_observation_is_made_of_messages() -> None:
    with pytest.raises(ValueError, match="must be messages"):
        StepResult(["text"])  # type: ignore[list-item]


def test_only_the_model_speaks_as_the_assistant() -> None:
    with pytest.raises(ValueError, match="only the model speaks"):
        StepResult([{"role": "assistant", "content": "x"}])


def test_what_reset_returns_is_what_the_model_sees() -> None:
    class Door(Echo):
        def reset(self, prompt: list[Message]) -> list[Message]:
            return [{"role": "system", "content": "TASK: open door 3"}, *prompt]

    batch = roll(env_rollout(Door, max_turns=1, client=ScriptedClient(["a"])), ask("p"))
    assert b"TASK: open door 3" in bytes(i for i in batch["prompt_ids"][0] if i < 256)
    assert batch["completion_ids"] == [[97, END]]


def test_a_rows_data_reaches_its_environment_and_not_the_model() -> None:
    class Task(Echo):
        def reset(self, prompt: list[Message]) -> list[Message]:
            self.answer = prompt[-1]["task"]["answer"]
            return prompt

        def step(self, action: Message) -> StepResult:
            return StepResult(reward=self.answer, terminated=True)

    prompts = [[{"role": "user", "content": "same", "task": {"answer": answer}}] for answer in (1, 2)]
    batch = roll(env_rollout(Task, client=ScriptedClient(lambda prompt: "a")), *prompts)
    assert batch["env_reward"] == [1.0, 2.0]
    assert batch["prompt_ids"][0] == batch["prompt_ids"][1]
    assert batch["transcript"][0][0] == {"role": "user", "content": "same"}


def test_string_and_message_prompts_become_the_same_ids() -> None:
    text = "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n"
    rollout = env_rollout(Echo, max_turns=1, client=ScriptedClient(lambda prompt: "a"))
    batch = roll(rollout, text, ask("p"), [{"role": "user", "content": [{"type": "text", "text": "p"}]}])
    assert batch["prompt_ids"] == [ids(text)] * 3


# Scheduling.


def test_a_slow_trajectory_delays_no_other() -> None:
    arrivals: list[tuple[float, int]] = []
    started = time.monotonic()

    def reply(prompt: list[int]) -> Reply:
        arrivals.append((time.monotonic() - started, prompt.count(START)))
        slow = ord("z") in prompt
        return Reply([*ids("stop" if slow or prompt.count(START) == 6 else "a"), END], delay_s=1.0 if slow else 0.05)

    batch = roll(env_rollout(Echo, client=ScriptedClient(reply)), ask("z"), ask("p"))
    assert batch["num_turns"] == [1, 3]
    assert max(arrived for arrived, turn in arrivals if turn > 2) < 0.9


def test_trajectories_run_at_once_up_to_the_limit() -> None:
    def reply(prompt: list[int]) -> Reply:
        return Reply([*ids("stop" if prompt.count(START) == 6 else "a"), END], delay_s=0.05)

    client = ScriptedClient(reply)
    started = time.monotonic()
    roll(env_rollout(Echo, client=client), *map(ask, "0123456789abcdef"))
    assert time.monotonic() - started < 1.0  # 16 times 3 turns of 0.05 s would be 2.4 s
    assert client.max_in_flight == 16
    narrow = ScriptedClient(reply)
    roll(env_rollout(Echo, client=narrow, max_concurrency=4), *map(ask, "01234567"))
    assert narrow.max_in_flight == 4


def test_a_blocking_tool_holds_up_no_other_trajectory() -> None:
    def sleep(seconds: float) -> str:
        """Sleep.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "awake"

    client = ScriptedClient(lambda prompt: '{"name": "sleep", "arguments": {"seconds": 0.5}}')
    started = time.monotonic()
    batch = roll(tool_rollout([sleep], max_turns=1, client=client), *map(ask, "01234567"))
    assert time.monotonic() - started < 3.5  # one after the other, 4
    assert [calls[0]["result"] for calls in batch["tool_calls"]] == ["awake"] * 8


def test_a_rollout_works_inside_a_running_event_loop() -> None:
    async def cell() -> dict[str, list[Any]]:
        return roll(env_rollout(Echo, client=ScriptedClient(["stop"])), ask("p"))

    assert asyncio.run(cell())["stop_reason"] == ["terminated"]


def test_closing_a_rollout_ends_its_thread() -> None:
    before = set(threading.enumerate())
    rollout = env_rollout(Echo, client=ScriptedClient(["stop", "stop"]))
    roll(rollout, ask("p"))
    assert "trl_rollouts" in {thread.name for thread in set(threading.enumerate()) - before}
    rollout.close()
    assert "trl_rollouts" not in {thread.name for thread in set(threading.enumerate()) - before}
    assert roll(rollout, ask("p"))["stop_reason"] == ["terminated"]
    rollout.close()


# Settings.


def test_two_threads_may_call_one_rollout() -> None:
    rollout = env_rollout(Echo, client=ScriptedClient(lambda prompt: "stop"))
    with ThreadPoolExecutor(4) as pool:
        batches = list(pool.map(lambda _: roll(rollout, ask("p"), ask("q")), range(8)))
    assert [batch["env_reward"] for batch in batches] == [[4.0, 4.0]] * 8


def test_an_observation_that_is_hopelessly_long_is_not_even_encoded() -> None:
    class Flood(Echo):
        def step(self, action: Message) -> StepResult:
            return StepResult([{"role": "user", "content": "<|im_end|>" * 1_000_000}])

    started = time.monotonic()
    assert roll(env_rollout(Flood, client=ScriptedClient(["a"])), ask("p"))["stop_reason"] == ["length"]
    assert time.monotonic() - started < 2


def test_settings_are_read_at_every_call() -> None:
    client = ScriptedClient(lambda prompt: "stop")
    rollout = env_rollout(Echo, client=client)
    roll(rollout, ask("p"), temperature=0.7)
    roll(rollout, ask("p"), temperature=0.9, mode="eval")
    assert [sampling.temperature for _, sampling in client.calls] == [0.7, 0.9]


def test_a_seed_differs_for_every_trajectory_and_turn() -> None:
    client = ScriptedClient(lambda prompt: "stop" if prompt.count(START) > 2 else "a")
    roll(env_rollout(Echo, client=client), ask("p"), ask("p"), generation_kwargs={"seed": 1})
    assert len({sampling.seed for _, sampling in client.calls}) == 4


def test_a_seed_differs_from_step_to_step_and_from_process_to_process() -> None:
    client = ScriptedClient(lambda prompt: "stop")
    rollout = env_rollout(Echo, client=client)
    for step, rank in ((0, 0), (1, 0), (0, 1)):
        trainer = fake_trainer(TOKENIZER, generation_kwargs={"seed": 1})
        trainer.state.global_step, trainer.accelerator.process_index = step, rank
        rollout([ask("p")], trainer)
    assert len({sampling.seed for _, sampling in client.calls}) == 3


def test_a_trajectory_that_may_outlast_the_other_processes_patience_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = fake_trainer(TOKENIZER, ddp_timeout=1800)
    trainer.accelerator.num_processes = 2
    for limit_s in (1500.0, 1800.0):
        caplog.clear()
        rollout = env_rollout(Echo, client=ScriptedClient(["stop"]), trajectory_timeout_s=limit_s)
        with caplog.at_level(logging.WARNING):
            rollout([ask("p")], trainer)
        assert ("is not below ddp_timeout=1800" in caplog.text) is (limit_s == 1800.0)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: env_rollout(Echo, max_turns=0), "max_turns must be a positive number, not 0"),
        (lambda: env_rollout(Echo, max_turns="3"), "max_turns must be a positive number, not '3'"),  # type: ignore[arg-type]
        (lambda: env_rollout(Echo, base_url=[]), "base_url names no server"),
        (lambda: env_rollout(Echo, weight_sync="none"), "weight_sync must be"),  # type: ignore[arg-type]
        (lambda: env_rollout(Echo, transcript_dir=__file__), "is a file; it must be a folder"),
        (lambda: tool_rollout(multiply), "tools must be a list of functions"),  # type: ignore[arg-type]
        (lambda: tool_rollout([multiply], tool_timeout_s=-1), "tool_timeout_s must be a positive number"),
        (lambda: env_rollout(Echo(), max_turns=1), "env_factory must be callable"),
        (lambda: env_rollout(Echo, max_turn=1), "no option 'max_turn'. Did you mean max_turns?"),  # type: ignore[call-arg]
        (lambda: env_rollout(Echo, temperature=1), "set GRPOConfig.temperature"),  # type: ignore[call-arg]
        (lambda: env_rollout(Echo, base_url="x", client=ScriptedClient([])), "base_url or client, not both"),
    ],
)
def test_arguments_that_cannot_work_are_refused_when_they_are_passed(make: Callable[[], Rollout], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        make()


def test_a_template_that_cannot_show_a_tools_answer_is_refused_before_anything_is_sent() -> None:
    client = ScriptedClient([])
    trainer = fake_trainer(TOKENIZER)
    trainer.chat_template = (
        "{{ tools }}{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(SetupError, match="use a template that shows these roles"):
        tool_rollout([multiply], client=client, parser=parse_hermes)([ask("p")], trainer)
    assert client.calls == []


def test_tools_on_the_trainer_too_are_refused_with_what_to_do() -> None:
    trainer = fake_trainer(TOKENIZER)
    trainer.tools = [multiply]
    with pytest.raises(SetupError, match="Remove tools= from the trainer"):
        tool_rollout([multiply], client=ScriptedClient([]))([ask("p")], trainer)


def test_without_a_server_the_error_says_how_to_start_one() -> None:
    with pytest.raises(SetupError, match="trl-rollouts serve MODEL.*base_url="):
        roll(env_rollout(Echo), ask("p"))


def test_n_in_generation_kwargs_is_refused_before_anything_is_sent() -> None:
    client = ScriptedClient([])
    with pytest.raises(SetupError, match=r"generation_kwargs holds \['n'\]"):
        roll(env_rollout(Echo, client=client), ask("p"), generation_kwargs={"n": 8})
    assert client.calls == []


def test_tools_under_a_template_whose_call_format_is_unknown_are_refused_before_anything_is_sent() -> None:
    client = ScriptedClient([])
    trainer = fake_trainer(TOKENIZER)
    trainer.chat_template = "{{ tools }}{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(SetupError, match="Pass parser="):
        tool_rollout([multiply], client=client)([ask("p")], trainer)
    assert client.calls == []


def test_a_cut_distribution_under_the_importance_sampling_correction_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rollout = env_rollout(Echo, client=ScriptedClient(lambda prompt: "stop"), weight_sync=None)
    with caplog.at_level(logging.WARNING):
        roll(rollout, ask("p"), use_vllm=True, top_p=0.8)
    assert "top_p=0.8" in caplog.text


def test_figures_reach_the_trainers_log() -> None:
    trainer = fake_trainer(TOKENIZER)
    tool_rollout([multiply], client=ScriptedClient([call(1, 2), "2."]))([ask("p")], trainer)
    logged = trainer._metrics["train"]
    assert logged["rollout/num_turns"] == [2]
    assert logged["rollout/tool_calls"] == [1.0]
    assert logged["rollout/stop/terminated"] == [1.0]
    assert logged["rollout/sampled_tokens"] == [len(ids(call(1, 2))) + 1 + 3]


@pytest.mark.parametrize(
    ("url", "refused"), [("localhost:8000", False), ("http://127.0.0.1:8000/", False), ("gpu7:8000", True)]
)
def test_a_server_that_trl_does_not_sync_is_refused_and_its_own_is_known_by_any_name(url: str, refused: bool) -> None:
    trainer = fake_trainer(TOKENIZER, use_vllm=True, vllm_mode="server")
    rollout = env_rollout(Echo, base_url=url)
    if refused:
        with pytest.raises(SetupError, match="TRL syncs its weights to its own vLLM"):
            rollout._sync_for(trainer, rollout._urls(trainer))
    else:
        assert rollout._sync_for(trainer, rollout._urls(trainer)) is None


def test_the_templates_arguments_and_the_models_ends_of_turn_come_from_the_trainer() -> None:
    trainer = fake_trainer(TOKENIZER, chat_template_kwargs={"enable_thinking": False})
    trainer.model.generation_config.eos_token_id = [END, 256]
    client = ScriptedClient([[97, 256], "stop"])
    batch = env_rollout(Echo, client=client)([ask("p")], trainer)
    assert batch["prompt_ids"][0][-6:] == [259, 10, 10, 260, 10, 10]
    assert batch["transcript"][0][1]["content"] == "a"


def test_a_dataset_column_with_the_name_of_a_field_is_refused() -> None:
    trainer = fake_trainer(TOKENIZER)
    trainer.train_dataset = SimpleNamespace(column_names=["prompt", "tool_calls"])
    with pytest.raises(SetupError, match=r"columns \['tool_calls'\].*Rename them"):
        env_rollout(Echo, client=ScriptedClient([]))([ask("p")], trainer)


def test_an_environment_without_a_method_is_refused() -> None:
    class Endless:
        def reset(self, prompt: list[Message]) -> list[Message]:
            return prompt

    with pytest.raises(SetupError, match="Endless has no method step, close"):
        roll(env_rollout(Endless, client=ScriptedClient([])), ask("p"))  # type: ignore[arg-type]


def test_an_observation_that_is_no_text_is_a_sentence() -> None:
    class Number(Echo):
        def step(self, action: Message) -> StepResult:
            return StepResult([{"role": "user", "content": 5}])

    with pytest.raises(RolloutError, match="a text as content"):
        roll(env_rollout(Number, client=ScriptedClient(["a"])), ask("p"))


def test_a_step_that_catches_its_cancellation_does_not_outlive_the_limit() -> None:
    class Stubborn(Echo):
        async def step(self, action: Message) -> StepResult:  # type: ignore[override]
            with suppress(BaseException):
                await asyncio.sleep(1)
            return super().step(action)

    started = time.monotonic()
    rollout = env_rollout(Stubborn, trajectory_timeout_s=0.3, client=ScriptedClient(lambda prompt: "a"))
    assert roll(rollout, ask("p"))["stop_reason"] == ["timeout"]
    assert time.monotonic() - started < 2


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "system", "content": "s"}, *ask("p")],
        "<|im_start|>user\np<|im_end|>\n<|im_start|>assistant\n<think>\n",
        [*ask("p"), {"role": "assistant", "content": "<think>\n"}],
    ],
)
def test_thoughts_that_the_rows_own_prompt_opened_are_thoughts(prompt: Any) -> None:
    trainer = fake_trainer(TOKENIZER)
    trainer.chat_template = THINKING
    client = ScriptedClient(["hm <tool_call>"])
    batch = env_rollout(Echo, max_turns=1, client=client)([prompt], trainer)
    assert batch["transcript"][0][-1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm <tool_call>",
    }


@pytest.mark.parametrize("prompt", ["p\n<think>\n\n</think>\n\n", "p"])
def test_an_answer_to_a_prompt_that_opened_no_thoughts_is_an_answer(prompt: str) -> None:
    trainer = fake_trainer(TOKENIZER)
    trainer.chat_template = THINKING
    batch = env_rollout(Echo, max_turns=1, client=ScriptedClient(["yes"]))([prompt], trainer)
    assert batch["transcript"][0][-1] == {"role": "assistant", "content": "yes"}


def test_a_template_that_takes_ids_of_nine_letters_and_digits_takes_ours() -> None:
    trainer = fake_trainer(TOKENIZER)
    trainer.chat_template = (  # as Mistral's do
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }} {{ tools | tojson if tools else '' }}"
        "{% elif m.role == 'assistant' %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
        "{{ ', ' if not loop.last else '' }}{% endfor %}]<|im_end|>"
        "{% else %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
        "[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% endif %}{% endfor %}"
    )
    called = '[TOOL_CALLS] [{"name": "multiply", "arguments": {"a": 6, "b": 7}}]'
    batch = tool_rollout([multiply], client=ScriptedClient([called, "42"]))([ask("p")], trainer)
    assert TOKENIZER.decode(batch["completion_ids"][0]).endswith("[TOOL_RESULTS] 42[/TOOL_RESULTS]42<|im_end|>")


def test_what_was_proved_of_the_tokenizer_is_kept_from_call_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout, trainer = tool_rollout([multiply], client=ScriptedClient(["no"] * 2)), fake_trainer(TOKENIZER)
    rollout([ask("p")], trainer)
    monkeypatch.setattr(ChatTokenizer, "written_calls", None)  # what finds the format
    rollout([ask("p")], trainer)
    trainer.chat_template_kwargs = {"enable_thinking": False}
    with pytest.raises(RolloutError, match="not callable"):
        rollout([ask("p")], trainer)


def test_a_row_that_names_a_tool_there_is_none_of_stops_the_run() -> None:
    prompt = [{**ask("p")[0], "task": {"tool_names": ["multiplly"]}}]
    with pytest.raises(SetupError, match="tool_names="):
        roll(tool_rollout([multiply], client=ScriptedClient(["no"])), prompt, ask("p"))


@pytest.mark.parametrize(
    "returned",
    [None, "text", {"content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
)
def test_a_parser_that_returns_no_message_is_told_what_one_is(returned: Any) -> None:
    rollout = tool_rollout([multiply], parser=lambda text: returned, client=ScriptedClient(["a"]))
    with pytest.raises(RolloutError, match="The parser returned .*; it must return a message such as"):
        roll(rollout, ask("p"))


@pytest.mark.parametrize(
    ("ids", "logprobs", "said"),
    [
        ([97, 300], [-1.0, -1.0], r"the ids \[300\], which the trainer's model, of vocab_size=300, does not know"),
        ([-1], [-1.0], r"the ids \[-1\]"),
        ([True], [-1.0], r"the ids \[True\]"),
        ([97, 98], [-1.0], "2 ids and 1 logprobs"),
        ([], [], "0 ids and 0 logprobs"),
    ],
)
def test_a_completion_that_is_not_the_models_stops_the_run(ids: list[int], logprobs: list[float], said: str) -> None:
    class Wrong(ScriptedClient):
        async def generate(self, token_ids: list[int], sampling: Any) -> Completion:
            return Completion(ids, logprobs, "stop")

    trainer = fake_trainer(TOKENIZER)
    trainer.model.config.vocab_size = 300
    with pytest.raises(ServerError, match=said):
        env_rollout(Echo, client=Wrong([]))([ask("p")], trainer)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_batch_of_which_no_token_has_a_logprob_stops_the_training(mode: Any) -> None:
    class Unknown(ScriptedClient):
        async def generate(self, token_ids: list[int], sampling: Any) -> Completion:
            return Completion([*b"stop", END], [math.nan] * 5, "stop")

    rollout = env_rollout(Echo, client=Unknown([]))
    trainer = fake_trainer(TOKENIZER, mode=mode)
    if mode == "eval":
        assert rollout([ask("p"), ask("q")], trainer)["env_mask"] == [[0] * 5] * 2
        return
    with pytest.raises(RolloutError, match="Nothing of 2 trajectories can be trained: the server gave no logprobs"):
        rollout([ask("p"), ask("q")], trainer)


def test_a_rollout_is_not_pickled_or_copied() -> None:
    rollout = env_rollout(Echo, client=ScriptedClient(["stop"]))
    for copying in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or copied. Make one in each process"):
            copying(rollout)


def test_a_time_limit_without_end_is_none() -> None:
    with pytest.raises(SetupError, match="trajectory_timeout_s must be a positive number, not inf"):
        env_rollout(Echo, trajectory_timeout_s=math.inf)
