"""What follows from each fault of the fake server: through a real client, in the rows of a rollout.

Faults that the clients' own tests go through (status codes, resets, silence, missing fields) are not repeated here.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import requests

from trl_rollouts import RolloutError, ServerError, StepResult, env_rollout
from trl_rollouts.testing import (
    CutOff,
    FakeServer,
    ForeignTokenId,
    Garbage,
    Late,
    LongTokenIds,
    NaNLogprob,
    Reordered,
    Reset,
    Restart,
    SeededFaults,
    Silence,
    Status,
    Trickle,
    WrongIndex,
    byte_tokenizer,
    fake_trainer,
)

TOKENIZER = byte_tokenizer()
END = 258
PROTOCOLS = pytest.mark.parametrize("protocol", ["vllm", "trl"])


class Once:
    """One turn."""

    async def reset(self, prompt: Any) -> Any:
        return prompt

    async def step(self, action: Any) -> StepResult:
        return StepResult(reward=1.0, terminated=True)

    async def close(self) -> None:
        pass


def echo(prompt_ids: list[int]) -> list[int]:
    """A completion that tells which prompt it is of: its text's first letter."""
    return [prompt_ids[6], 97, END]


def row(letter: str) -> list[int]:
    return [ord(letter), 97, END]


def roll(
    server: FakeServer, prompts: str = "pqr", env: Callable[[], Any] = Once, **options: Any
) -> dict[str, list[Any]]:
    """One row a letter."""
    trainer = fake_trainer(TOKENIZER, vllm_server_timeout=20.0)
    trainer.model.config.vocab_size = len(TOKENIZER)
    rollout = env_rollout(env, base_url=server.base_url, weight_sync=None, **options)
    try:
        return rollout([[{"role": "user", "content": letter}] for letter in prompts], trainer)
    finally:
        rollout.close()


# An answer's bytes and their time


@PROTOCOLS
def test_a_connection_that_closes_in_the_middle_of_an_answer_is_another_attempt(protocol: Any) -> None:
    with FakeServer(echo, protocol=protocol, faults=[CutOff()]) as server:
        batch = roll(server, "p")
        assert len(server.prompts) == 2
    assert batch["completion_ids"] == [row("p")]


@PROTOCOLS
def test_an_answer_that_trickles_is_waited_for_within_the_requests_limit(protocol: Any) -> None:
    with FakeServer(echo, protocol=protocol, faults=[Trickle(over_s=0.5)]) as server:
        started = time.monotonic()
        assert roll(server)["completion_ids"] == [row(letter) for letter in "pqr"]
        assert time.monotonic() - started >= 0.5


@PROTOCOLS
def test_an_answer_that_trickles_beyond_the_limit_is_given_up_though_no_read_waits_long(protocol: Any) -> None:
    with FakeServer(echo, protocol=protocol, faults=[Trickle(over_s=30.0)]) as server:
        started = time.monotonic()
        with pytest.raises(RolloutError, match="did not answer within .* \\(request_timeout_s=0.5\\)"):
            roll(server, "p", request_timeout_s=0.5)
        assert time.monotonic() - started < 10
        assert len(server.prompts) == 1


def test_an_answer_after_its_row_was_given_up_reaches_nobody() -> None:
    """TRL's server works on, and its answer is still to come when the next request is sent."""
    with FakeServer(echo, protocol="trl", faults=[Late(0.8)]) as server:
        batch = roll(server, "pq", request_timeout_s=0.6, max_concurrency=1)
    assert batch["stop_reason"] == ["error", "terminated"]
    assert batch["completion_ids"] == [[END], row("q")]
    assert "did not answer within" in batch["rollout_error"][0]


def test_an_answer_of_vllm_after_its_row_was_given_up_reaches_nobody() -> None:
    with FakeServer(echo, faults=[Late(0.8)]) as server:
        batch = roll(server, "pq", request_timeout_s=0.5, max_concurrency=1)
    assert batch["stop_reason"] == ["error", "terminated"]
    assert batch["completion_ids"] == [[END], row("q")]


def test_a_row_that_shares_a_request_with_one_that_was_given_up_gets_its_own() -> None:
    """The first row's time is over while TRL's server works; that of the last, which began later, is not."""

    class Slow(Once):
        async def reset(self, prompt: Any) -> Any:
            await asyncio.sleep({"p": 1.4, "q": 1.0, "r": 0.4}[prompt[0]["content"]])
            return prompt

    with FakeServer(echo, protocol="trl", faults=[None, Late(1.0)]) as server:
        batch = roll(server, "pqr", env=Slow, trajectory_timeout_s=2.0, max_concurrency=2)
        assert sorted(chr(ids[6]) for ids in server.prompts) == ["p", "q", "r"]
    assert batch["completion_ids"] == [[END], row("q"), row("r")]
    assert "no turn was finished within trajectory_timeout_s=2" in batch["rollout_error"][0]


# An answer's content


@PROTOCOLS
def test_a_logprob_that_is_spelled_nan_unmasks_its_token_and_nothing_else(protocol: Any) -> None:
    with FakeServer(echo, protocol=protocol, faults=[NaNLogprob(1)]) as server:
        batch = roll(server, "p")
        known = server.logprob(ord("p")), server.logprob(END)
    assert batch["completion_ids"] == [row("p")]
    assert batch["env_mask"] == [[1, 0, 1]]
    assert batch["logprobs"] == [[known[0], 0.0, known[1]]]


@PROTOCOLS
def test_more_ids_than_logprobs_stop_the_run(protocol: Any) -> None:
    with (
        FakeServer(echo, protocol=protocol, faults=[LongTokenIds()]) as server,
        pytest.raises(ServerError, match="6 (tokens|ids)"),
    ):
        roll(server, "p")


@PROTOCOLS
def test_an_id_that_is_none_of_the_models_stops_the_run(protocol: Any) -> None:
    with (
        FakeServer(echo, protocol=protocol, faults=[ForeignTokenId(token_id=265)]) as server,
        pytest.raises(ServerError, match=r"has the ids \[265\].*vocab_size=265.*Serve the model that is trained"),
    ):
        roll(server, "p")


def test_rows_in_another_order_stop_the_run_rather_than_reach_another_row() -> None:
    with (
        FakeServer(echo, protocol="trl", faults=[Reordered()]) as server,
        pytest.raises(ServerError, match="completed other prompts than it was sent"),
    ):
        roll(server)


def test_the_members_of_a_group_may_come_in_any_order() -> None:
    with FakeServer(echo, protocol="trl", faults=[Reordered()]) as server:
        assert roll(server, "ppp")["completion_ids"] == [row("p")] * 3


def test_a_choice_is_known_by_its_prompt_and_not_by_its_number() -> None:
    with FakeServer(echo, faults=[WrongIndex(), Reordered(), WrongIndex()]) as server:
        assert roll(server)["completion_ids"] == [row(letter) for letter in "pqr"]


# The server's process


@PROTOCOLS
def test_what_a_restart_dropped_is_asked_again(protocol: Any) -> None:
    with FakeServer(echo, protocol=protocol, faults=[None, Restart(down_s=0.2)]) as server:
        batch = roll(server, "pqrs", max_concurrency=1)
        assert [chr(ids[6]) for ids in server.prompts][:3] == ["p", "q", "q"]
    assert batch["completion_ids"] == [row(letter) for letter in "pqrs"]


def test_a_restarted_server_is_another_process_at_the_same_address() -> None:
    def started(server: FakeServer) -> str:
        return requests.get(f"{server.base_url}/metrics", timeout=5).text

    with FakeServer(echo, faults=[Restart(down_s=0.1)]) as server:
        assert started(server) == "process_start_time_seconds 1.0\n"
        assert roll(server, "p")["completion_ids"] == [row("p")]
        assert started(server) == "process_start_time_seconds 2.0\n"


def test_a_server_that_is_stopped_while_it_restarts_stays_stopped() -> None:
    before = set(threading.enumerate())
    with FakeServer(echo, faults=[Restart(down_s=60.0)]) as server:
        url, body = server.base_url, {"model": "fake", "prompt": [1] * 9, "return_token_ids": True}
        with pytest.raises(requests.ConnectionError):
            requests.post(f"{url}/v1/completions", json=body, timeout=5)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 5
        with pytest.raises(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=5)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("FakeServer")]


# Faults by a seed


def draw(faults: SeededFaults, number: int) -> list[Any]:
    return [faults({"prompt": [65]}) for _ in range(number)]


def test_the_same_seed_draws_the_same_faults_and_another_one_others() -> None:
    kinds = [Reset(), Status(503), CutOff()]
    drawn = draw(SeededFaults(1, 0.5, kinds), 200)
    assert drawn == draw(SeededFaults(1, 0.5, kinds), 200)
    assert drawn != draw(SeededFaults(2, 0.5, kinds), 200)


def test_the_rate_is_the_share_of_requests_that_meet_a_fault() -> None:
    faults = SeededFaults(1, 0.25, [Reset(), Reset(), Silence()])
    drawn = draw(faults, 4000)
    assert 0.22 < sum(fault is not None for fault in drawn) / 4000 < 0.28
    assert faults.drawn == {"Reset": drawn.count(Reset()), "Silence": drawn.count(Silence())}
    assert 1.5 < faults.drawn["Reset"] / faults.drawn["Silence"] < 2.5
    assert draw(SeededFaults(1, 0.0, [Reset()]), 99) == [None] * 99


def test_a_rate_that_changes_leaves_the_later_draws_where_they_were() -> None:
    one, other = SeededFaults(1, 0.5, [Reset()]), SeededFaults(1, 0.0, [Reset()])
    draw(one, 50)
    draw(other, 50)
    other.rate = 0.5
    assert draw(one, 50) == draw(other, 50)


@pytest.mark.parametrize("probe", [{"prompt": "text"}, {"prompts": ["text"]}])
def test_the_proofs_of_a_server_meet_no_fault_unless_they_are_meant_to(probe: Any) -> None:
    assert SeededFaults(1, 1.0, [Reset()])(probe) is None
    assert SeededFaults(1, 1.0, [Reset()], also_probes=True)(probe) == Reset()


def test_threads_may_draw_from_one() -> None:
    faults = SeededFaults(1, 0.5, [Reset()])
    threads = [threading.Thread(target=draw, args=(faults, 500)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults.drawn["Reset"] == draw(SeededFaults(1, 0.5, [Reset()]), 4000).count(Reset())


@PROTOCOLS
def test_a_rollout_survives_what_passes(protocol: Any) -> None:
    faults = SeededFaults(3, 0.3, [Status(429), Status(503), Reset(), CutOff(), Trickle(0.05), Late(0.05)])
    with FakeServer(echo, protocol=protocol, faults=faults) as server:
        batch = roll(server, "abcdefghijklmnop", max_concurrency=4)
    assert batch["completion_ids"] == [row(letter) for letter in "abcdefghijklmnop"]
    assert faults.drawn.total() >= 2


@pytest.mark.parametrize("protocol", ["vllm", "trl"])
def test_bytes_that_are_no_text_are_a_broken_body(protocol: Any) -> None:
    with FakeServer(lambda ids: "a", protocol=protocol, faults=[Garbage()]) as server:
        rollout = env_rollout(Once, base_url=server.base_url, weight_sync=None)
        batch = rollout([[{"role": "user", "content": "p"}]], fake_trainer(TOKENIZER))
        rollout.close()
    assert batch["rollout_error"] == [None]
