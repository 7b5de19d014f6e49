"""Both protocols over a real socket: what is sent, what is refused, what is retried.

The fake server is copied from what vLLM 0.31's and TRL 1.10.0's were seen to do; tests/server asks the real ones.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from trl_rollouts import Rollout, RolloutError, ServerError, SetupError, StepResult, env_rollout
from trl_rollouts.serving import free_port
from trl_rollouts.testing import (
    BrokenBody,
    FakeServer,
    NoLogprobs,
    NoTokenIds,
    NullLogprob,
    Reply,
    Reset,
    Silence,
    Status,
    WrongCount,
    WrongPromptIds,
    byte_tokenizer,
    fake_trainer,
)

TOKENIZER = byte_tokenizer()
START, END = 257, 258
PROTOCOLS = pytest.mark.parametrize("protocol", ["vllm", "trl"])


class Once:
    """One turn. Async, so that what is ready together does not hang on threads."""

    async def reset(self, prompt: Any) -> Any:
        return prompt

    async def step(self, action: Any) -> StepResult:
        return StepResult(reward=1.0, terminated=True)

    async def close(self) -> None:
        pass


class Twice(Once):
    """Two turns."""

    def __init__(self) -> None:
        self.turns = 0

    async def step(self, action: Any) -> StepResult:
        self.turns += 1
        return StepResult([{"role": "user", "content": "again"}], terminated=self.turns == 2)


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def roll(
    server: FakeServer, *prompts: str, env: Callable[[], Any] = Once, options: Any = None, **config: Any
) -> dict[str, list[Any]]:
    rollout = env_rollout(env, base_url=server.base_url, weight_sync=None, **(options or {}))
    try:
        return call(rollout, *prompts, **config)
    finally:
        rollout.close()


def call(rollout: Rollout, *prompts: str, **config: Any) -> dict[str, list[Any]]:
    return rollout([ask(text) for text in prompts], fake_trainer(TOKENIZER, vllm_server_timeout=0.0, **config))


@PROTOCOLS
def test_both_servers_give_the_same_rows(protocol: Any) -> None:
    with FakeServer(lambda prompt: f"answer {len(prompt)}", protocol=protocol) as server:
        batch = roll(server, "p", "qq", env=Twice)
    with FakeServer(lambda prompt: f"answer {len(prompt)}") as reference:
        expected = roll(reference, "p", "qq", env=Twice)
    for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs", "stop_reason"):
        assert batch[name] == expected[name]


def test_a_request_leaves_nothing_for_vllm_to_fill_in() -> None:
    with FakeServer(["a"]) as server:
        roll(server, "p", temperature=0.7, generation_kwargs={"stop": ["x"]}, max_completion_length=32)
        body = server.bodies("/v1/completions")[-1]
    assert body == {
        "model": "fake",
        "prompt": server.prompts[0],
        "max_tokens": 32,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop": ["x"],
        "include_stop_str_in_output": True,
        "stop_token_ids": [258],
        "n": 1,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_a_request_leaves_nothing_for_trls_server_to_fill_in() -> None:
    with FakeServer(["a"], protocol="trl") as server:
        roll(server, "p", temperature=0.7, generation_kwargs={"stop": ["x"], "foo": 1}, max_completion_length=32)
        body = server.bodies("/generate/")[-1]
    assert body == {
        "prompts": server.prompts,
        "max_tokens": 32,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "logprobs": 0,
        "generation_kwargs": {"stop": ["x"], "include_stop_str_in_output": True, "stop_token_ids": [258], "foo": 1},
    }


def test_contexts_that_are_ready_together_travel_to_trls_server_as_one_request() -> None:
    with FakeServer(lambda prompt: "a", protocol="trl") as server:
        roll(server, *"0123456789", env=Twice)
        sizes = [len(body["prompts"]) for body in server.bodies("/generate/")[1:]]
    assert sizes == [10, 10]


def test_contexts_that_become_ready_during_a_request_travel_with_the_next() -> None:
    def reply(prompt: list[int]) -> Reply:
        return Reply([97, END], delay_s=0.3 if ord("s") in prompt[:15] else 0.0)

    with FakeServer(reply, protocol="trl") as server:
        roll(server, "s", "p", "q", env=Twice, options={"max_concurrency": 2})
        sizes = [len(body["prompts"]) for body in server.bodies("/generate/")[1:]]
    assert sum(sizes) == 6
    assert max(sizes) == 2


def test_each_row_of_a_common_request_is_cut_to_its_own_budget() -> None:
    class Uneven(Twice):
        async def step(self, action: Any) -> StepResult:
            self.turns += 1
            text = "x" * 20 if self.asked == "p" else "x"
            return StepResult([{"role": "user", "content": text}], terminated=self.turns == 2)

        async def reset(self, prompt: Any) -> Any:
            self.asked = prompt[0]["content"]
            return prompt

    with FakeServer(lambda prompt: [97] * 99 if prompt.count(START) > 2 else "a", protocol="trl") as server:
        batch = roll(server, "p", "q", env=Uneven, max_completion_length=80)
        last = server.bodies("/generate/")[-1]
    assert [len(row) for row in batch["completion_ids"]] == [80, 80]
    assert batch["stop_reason"] == ["length", "length"]
    assert len(last["prompts"]) == 2
    assert last["max_tokens"] == 57  # "q" has used 2 for "a" and its end, and 21 for the observation


@pytest.mark.parametrize(
    ("reply", "reason"),
    [("a", "terminated"), ([97] * 99, "length"), ([97, 98, 99, END], "terminated"), ([97, 98, 99], "terminated")],
)
def test_why_trls_server_stopped_follows_from_length_and_last_id(reply: Any, reason: str) -> None:
    with FakeServer([reply], protocol="trl") as server:
        assert roll(server, "p", max_completion_length=4)["stop_reason"] == [reason]


def test_trajectories_share_vllm_at_once() -> None:
    with FakeServer(lambda prompt: Reply([97, END], delay_s=0.1)) as server:
        roll(server, *"0123456789abcdef")
        assert server.max_in_flight == 16


def test_several_servers_share_the_trajectories() -> None:
    def reply(prompt: list[int]) -> Reply:
        return Reply([97, END], delay_s=0.1)

    with FakeServer(reply) as one, FakeServer(reply) as two:
        rollout = env_rollout(Once, base_url=[one.base_url, two.base_url], weight_sync=None)
        call(rollout, *"01234567")
        rollout.close()
        assert (len(one.prompts), len(two.prompts)) == (4, 4)


# Set-ups that cannot be trained on are refused at the first call.


def test_raw_logprobs_are_refused_with_the_flag_to_add() -> None:
    with (
        FakeServer(["a"], logprobs_mode="raw_logprobs") as server,
        pytest.raises(SetupError, match="--logprobs-mode processed_logprobs"),
    ):
        roll(server, "p")
    assert server.prompts == []


@PROTOCOLS
def test_another_vocabulary_is_refused(protocol: Any) -> None:
    other = byte_tokenizer([("C", "o"), ("m", "p")])
    with (
        FakeServer(["a"], protocol=protocol, tokenizer=other) as server,
        pytest.raises(SetupError, match="another vocabulary than the trainer's"),
    ):
        roll(server, "p")


def test_a_server_too_short_for_the_completion_is_refused_with_both_numbers() -> None:
    with (
        FakeServer(["a"], max_model_len=64) as server,
        pytest.raises(SetupError, match="max_model_len=64.*max_completion_length=64.*--max-model-len"),
    ):
        roll(server, "p", max_completion_length=64)


def test_trls_server_is_never_sent_a_prompt_beyond_the_models_length() -> None:
    with FakeServer(["a"], protocol="trl", max_model_len=100) as server:
        batch = roll(server, "p" * 200, "p", max_completion_length=8, vllm_max_model_length=100)
    assert batch["stop_reason"] == ["error", "terminated"]
    assert len(server.prompts) == 1


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (NoTokenIds(), r"returned no token ids.*vLLM >= 0.10.2"),
        (NoLogprobs(), r"returned no logprobs.*--max-logprobs -1"),
        (WrongCount(), "without exactly one choice"),
        (WrongPromptIds(), "completed another prompt"),
    ],
)
def test_an_answer_that_breaks_the_protocol_is_raised_with_what_to_do(fault: Any, said: str) -> None:
    with FakeServer(["a"], faults=[fault]) as server, pytest.raises(ServerError, match=said):
        roll(server, "p")


def test_a_completion_that_the_server_gave_up_is_no_turn() -> None:
    aborted = Reply([97], finish_reason="abort")  # type: ignore[arg-type]
    with (
        FakeServer([aborted]) as server,
        pytest.raises(RolloutError, match="gave a completion up: finish_reason='abort'"),
    ):
        roll(server, "p")


def test_another_server_in_the_config_is_another_connection() -> None:
    with FakeServer(["a"]) as one, FakeServer(["b"]) as two:
        rollout = env_rollout(Once, weight_sync=None)
        rows = [call(rollout, "p", vllm_server_base_url=server.base_url)["completion_ids"][0] for server in (one, two)]
        rollout.close()
    assert rows == [[97, END], [98, END]]


def test_a_connection_that_was_refused_is_not_replaced_by_an_older_one() -> None:
    with FakeServer(["a"]) as one, FakeServer(["b"], max_model_len=50) as two:
        rollout = env_rollout(Once, weight_sync=None)
        call(rollout, "p", vllm_server_base_url=one.base_url, max_completion_length=64)
        for _ in range(2):
            with pytest.raises(SetupError, match="max_model_len=50"):
                call(rollout, "p", vllm_server_base_url=two.base_url, max_completion_length=64)
        rollout.close()


@pytest.mark.parametrize("fault", [NoTokenIds(), NoLogprobs(), WrongCount(), WrongPromptIds()])
def test_a_broken_answer_of_trls_server_is_raised_too(fault: Any) -> None:
    with FakeServer(["a"], protocol="trl", faults=[fault]) as server, pytest.raises(ServerError):
        roll(server, "p")


@pytest.mark.parametrize("protocol", ["trl"])
def test_one_context_that_breaks_trls_server_costs_its_own_row_only(protocol: Any) -> None:
    def fault(body: Any) -> Status | None:
        rows = body["prompts"]
        return Status(500, "oops") if isinstance(rows[0], list) and any(ord("p") in row[:8] for row in rows) else None

    with FakeServer(lambda prompt: "a", protocol=protocol, faults=fault) as server:
        batch = roll(server, "p", "q", "r")
    assert [error is None for error in batch["rollout_error"]] == [False, True, True]


@PROTOCOLS
def test_a_null_logprob_unmasks_its_token_and_nothing_else(protocol: Any) -> None:
    with FakeServer(["abc"], protocol=protocol, faults=[NullLogprob(1)]) as server:
        batch = roll(server, "p")
    assert batch["completion_ids"] == [[97, 98, 99, END]]
    assert batch["env_mask"] == [[1, 0, 1, 1]]
    assert batch["logprobs"][0][1] == 0.0


# A server that is not there, not one, or goes away.


def test_a_server_that_is_absent_is_a_sentence_in_bounded_time() -> None:
    started = time.monotonic()
    rollout = env_rollout(Once, base_url=f"127.0.0.1:{free_port()}", weight_sync=None)
    with pytest.raises(ServerError, match=r"cannot be reached.*trl-rollouts serve MODEL.*check host and port"):
        call(rollout, "p")
    assert time.monotonic() - started < 5


def test_a_server_that_is_still_starting_is_waited_for() -> None:
    server = FakeServer(["a"])
    with server:
        url = server.base_url
    trainer = fake_trainer(TOKENIZER, vllm_server_timeout=20.0)
    import threading

    threading.Timer(0.5, server.start).start()
    try:
        batch = env_rollout(Once, base_url=url, weight_sync=None)([ask("p")], trainer)
        assert batch["stop_reason"] == ["terminated"]
    finally:
        server.stop()


def test_something_else_at_the_address_is_named_by_what_it_answers() -> None:
    with (
        FakeServer(["a"], model="") as server,
        pytest.raises(ServerError, match="answers 404 to /v1/models and 404 to /get_world_size/"),
    ):
        roll_url(server.base_url + "/elsewhere")


def roll_url(url: str) -> dict[str, list[Any]]:
    return call(env_rollout(Once, base_url=url, weight_sync=None), "p")


@PROTOCOLS
def test_a_server_that_dies_in_the_middle_is_raised_in_bounded_time(protocol: Any) -> None:
    with FakeServer(lambda prompt: "a", protocol=protocol) as server:

        class Killing(Twice):
            async def step(self, action: Any) -> StepResult:
                if self.turns == 0:
                    await asyncio.to_thread(server.stop)
                return await super().step(action)

        started = time.monotonic()
        with pytest.raises(ServerError, match="cannot be reached.*after 4 attempts.*did not come back within 0 s"):
            roll(server, "p", "q", env=Killing)
        assert time.monotonic() - started < 30


@PROTOCOLS
def test_a_server_that_never_answers_is_a_sentence_with_address_and_seconds(protocol: Any) -> None:
    with FakeServer(["a"], protocol=protocol, faults=[Silence()]) as server:
        started = time.monotonic()
        with pytest.raises(RolloutError, match=r"http://127.0.0.1:\d+/\S+ did not answer within \d+\.\d s"):
            roll(server, "p", options={"request_timeout_s": 0.5})
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("fault", [Status(503), Status(502), Status(429), Reset(), BrokenBody()])
def test_a_passing_failure_is_retried(fault: Any) -> None:
    with FakeServer(lambda prompt: "a", faults=[fault]) as server:
        assert roll(server, "p")["stop_reason"] == ["terminated"]
        assert len(server.prompts) == 2


def test_a_server_that_is_always_busy_gets_exactly_the_attempts() -> None:
    with FakeServer(["a"], faults=[Status(503)] * 9) as server:
        with pytest.raises(RolloutError, match="answered 503"):
            roll(server, "p")
        assert len(server.prompts) == 4


def for_p(fault: Status) -> Callable[[Any], Status | None]:
    """The fault for the trajectory that was asked "p"."""
    return lambda body: fault if isinstance(body["prompt"], list) and ord("p") in body["prompt"][:8] else None


@pytest.mark.parametrize("code", [400, 404, 422])
def test_a_refusal_is_not_retried_and_fails_its_row_with_the_servers_words(code: int) -> None:
    refusal = Status(code, {"error": {"message": "no such thing"}})
    with FakeServer(lambda prompt: "a", faults=for_p(refusal)) as server:
        batch = roll(server, "p", "q")
        assert len(server.prompts) == 2
    assert batch["rollout_error"][0].startswith("RequestError: ")
    assert f"answered {code}: no such thing" in batch["rollout_error"][0]
    assert batch["rollout_error"][1] is None


def test_a_nan_that_the_server_cannot_serialise_is_retried_once_and_costs_one_row() -> None:
    fault = Status(500, "Out of range float values are not JSON compliant")
    with FakeServer(lambda prompt: "a", faults=for_p(fault)) as server:
        batch = roll(server, "p", "q")
        assert len(server.prompts) == 3
    assert batch["env_reward"] == [None, 1.0]
