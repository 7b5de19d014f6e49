"""Servers that go away and come back in the middle of a run, on fake servers that are really stopped and started.

The fake server tells a process from the next as vLLM does, by the start of its process, and keeps what it was sent.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from trl_rollouts import (
    Completion,
    Rollout,
    RolloutError,
    Sampling,
    ServerError,
    SetupError,
    StepResult,
    WeightSyncError,
    env_rollout,
    weights,
)
from trl_rollouts.clients import http
from trl_rollouts.clients.pool import PoolClient
from trl_rollouts.errors import ServerGoneError
from trl_rollouts.testing import FakeServer, Reply, Status, byte_tokenizer, fake_trainer, tiny_model
from trl_rollouts.testing.dialect import Refusal

TOKENIZER = byte_tokenizer()
END = 258
SYNC = ["/collective_rpc", "/reset_prefix_cache"]


class Turns:
    """Three turns, each answered with its number; a function may be run in the middle of one."""

    at: dict[int, Callable[[], Any]] = {}  # noqa: RUF012

    def reset(self, prompt: Any) -> Any:
        self.turns = 0
        return prompt

    def step(self, action: Any) -> StepResult:
        self.turns += 1
        if event := self.at.pop(self.turns, None):
            event()
        text = str(self.turns)
        return StepResult([{"role": "user", "content": text}], reward=1.0, terminated=self.turns == 3)

    def close(self) -> None:
        pass


def turns(**at: Callable[[], Any]) -> type[Turns]:
    """`turns(first=f)`: f is called once, in the first step that is taken."""
    return type("Turns", (Turns,), {"at": {["first", "second"].index(name) + 1: event for name, event in at.items()}})


class Server(FakeServer):
    """Answers everything with "a"."""

    def __init__(self) -> None:
        super().__init__(lambda prompt: Reply([97, END], delay_s=self.delay_s))
        self.delay_s = 0.0
        self.starting: list[threading.Timer] = []


@pytest.fixture(autouse=True)
def _few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request gives up sooner than in a run: within half a second."""
    monkeypatch.setattr(http, "MAX_ATTEMPTS", 2)


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    both = [Server() for _ in range(2)]
    for server in both:
        server.start()
    yield both
    for server in both:
        for timer in server.starting:
            timer.cancel()
            timer.join()
        server.stop()


@pytest.fixture
def server(servers: list[Server]) -> Server:
    return servers[0]


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """A stand-in for the trainer, around a real model, so that its weights can be saved."""
    trainer = fake_trainer(TOKENIZER, vllm_server_timeout=5.0, output_dir=str(tmp_path))
    trainer.model = trainer.model_wrapped = tiny_model(TOKENIZER)
    trainer.accelerator = Accelerator(cpu=True)
    return trainer


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def roll(rollout: Rollout, trainer: Any, *prompts: str) -> dict[str, list[Any]]:
    try:
        return rollout([ask(text) for text in prompts or ("p",)], trainer)
    finally:
        rollout.close()


def paths(server: Server) -> list[str]:
    """What changes or asks the model, in order; proofs by text left out."""
    return [
        path
        for path, body in server.requests
        if path in SYNC or (path == "/v1/completions" and not isinstance(body["prompt"], str))
    ]


def lost(server: Server) -> Callable[[], None]:
    """Stopped now, and started again a while later, when its requests have been missed."""

    def lose() -> None:
        server.stop()
        server.starting.append(threading.Timer(1.5, server.start))
        server.starting[-1].start()

    return lose


def test_a_trajectory_goes_on_where_it_was_once_its_server_is_back_with_the_weights(
    server: Server, trainer: Any
) -> None:
    trainer.args.vllm_server_timeout = 30.0
    rollout = env_rollout(turns(first=lost(server)), base_url=server.base_url)
    batch = roll(rollout, trainer)
    assert (batch["stop_reason"], batch["num_turns"], batch["rollout_error"]) == (["terminated"], [3], [None])
    turn = [97, END]
    observations = [[10, 257, *f"user\n{n}".encode(), END, 10, 257, *b"assistant\n"] for n in (1, 2)]
    assert batch["completion_ids"] == [turn + observations[0] + turn + observations[1] + turn]
    assert paths(server) == [*SYNC, "/v1/completions", *SYNC, "/v1/completions", "/v1/completions"]
    folders = [body["kwargs"]["weights_path"] for body in server.bodies("/collective_rpc")]
    assert len(folders) == 2
    assert len({*folders}) == 1  # the weights of the step, not newer ones


def test_the_weights_of_a_server_that_are_meant_to_stay_are_left_alone(server: Server, trainer: Any) -> None:
    trainer.args.vllm_server_timeout = 30.0
    environment = turns(first=lost(server))
    batch = roll(env_rollout(environment, base_url=server.base_url, weight_sync=None), trainer)
    assert batch["num_turns"] == [3]
    assert paths(server) == ["/v1/completions"] * 3


def test_of_two_servers_the_other_carries_on(servers: list[Server], trainer: Any) -> None:
    rollout = env_rollout(turns(first=servers[0].stop), base_url=[server.base_url for server in servers])
    batch = roll(rollout, trainer, *"pqrs")
    assert (batch["num_turns"], batch["rollout_error"]) == ([3] * 4, [None] * 4)
    assert batch["env_reward"] == [3.0] * 4


def test_a_server_that_is_back_gets_the_weights_before_it_takes_its_share(servers: list[Server], trainer: Any) -> None:
    for server in servers:
        server.delay_s = 0.5
    rollout = env_rollout(turns(first=servers[0].stop), base_url=[server.base_url for server in servers])
    rollout([ask(text) for text in "pqrs"], trainer)
    servers[0].start()
    servers[0].requests.clear()
    roll(rollout, trainer, *"pqrs")
    assert paths(servers[0])[:3] == [*SYNC, "/v1/completions"]
    assert len(servers[1].prompts) > len(servers[0].prompts)


def test_a_new_step_reaches_the_servers_that_are_there(servers: list[Server], trainer: Any) -> None:
    rollout = env_rollout(Turns, base_url=[server.base_url for server in servers])
    rollout([ask("p")], trainer)
    servers[0].stop()
    trainer.state.global_step += 1
    with torch.no_grad():
        next(iter(trainer.model.parameters())).add_(1.0)
    assert roll(rollout, trainer, *"pq")["num_turns"] == [3, 3]
    assert len({body["kwargs"]["weights_path"] for body in servers[1].bodies("/collective_rpc")}) == 2


def test_a_server_that_does_not_come_back_is_an_error_within_the_limit(server: Server, trainer: Any) -> None:
    trainer.args.vllm_server_timeout = 1.0
    started = time.monotonic()
    rollout = env_rollout(turns(first=server.stop), base_url=server.base_url)
    said = "after 2 attempts.* It did not come back within 1 s"
    with pytest.raises(ServerError, match=said):
        roll(rollout, trainer, *"pq")
    assert time.monotonic() - started < 20


def test_a_server_whose_weights_are_trls_to_sync_is_not_waited_for(server: Server, trainer: Any) -> None:
    trainer.args.vllm_server_timeout = 60.0
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer.args.vllm_mode, trainer.args.vllm_server_base_url = "server", server.base_url
    started = time.monotonic()
    with pytest.raises(ServerError, match="start the training again from its last checkpoint"):
        roll(env_rollout(turns(first=server.stop)), trainer)
    assert time.monotonic() - started < 20


def test_a_server_that_was_restarted_between_two_calls_gets_the_weights_first(server: Server, trainer: Any) -> None:
    rollout = env_rollout(Turns, base_url=server.base_url)
    rollout([ask("p")], trainer)
    server.restart()
    server.requests.clear()
    assert roll(rollout, trainer)["num_turns"] == [3]
    assert paths(server) == [*SYNC, *["/v1/completions"] * 3]


def test_a_restart_between_two_calls_that_trl_cannot_make_up_for_is_an_error(server: Server, trainer: Any) -> None:
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer.args.vllm_mode, trainer.args.vllm_server_base_url = "server", server.base_url
    rollout = env_rollout(Turns)
    rollout([ask("p")], trainer)
    server.restart()
    with pytest.raises(ServerError, match="was restarted since the last call"):
        roll(rollout, trainer)


def test_a_restart_that_no_request_missed_is_an_error(server: Server, trainer: Any) -> None:
    rollout = env_rollout(turns(second=server.restart), base_url=server.base_url)
    with pytest.raises(ServerError, match="restarted during this rollout, and no request missed it"):
        roll(rollout, trainer)


def test_a_server_that_comes_back_with_another_context_is_refused(server: Server, trainer: Any) -> None:
    def other() -> None:
        server.stop()
        server._dialect._max_model_len = 16  # type: ignore[attr-defined]
        server.start()

    rollout = env_rollout(Turns, base_url=server.base_url)
    rollout([ask("p")], trainer)
    other()
    with pytest.raises(SetupError, match="max_model_len=16"):
        roll(rollout, trainer)


def test_weights_that_a_server_cannot_read_any_more_are_an_error(server: Server, trainer: Any) -> None:
    def refuse(body: Any, query: Any) -> Any:
        raise Refusal(500, {"error": {"message": "no such folder"}})

    def lose() -> None:
        server._dialect.routes["POST", "/collective_rpc"] = refuse
        lost(server)()

    trainer.args.vllm_server_timeout = 30.0
    with pytest.raises(RolloutError, match="/collective_rpc answered 500.*no such folder.*No other server is left"):
        roll(env_rollout(turns(first=lose), base_url=server.base_url), trainer)


def test_a_server_whose_engine_has_died_is_gone_although_it_answers(server: Server, trainer: Any) -> None:
    def dead(body: Any, query: Any) -> Any:
        raise Refusal(503, {"error": "EngineDeadError"})

    def die() -> None:
        server._faults = lambda body: Status(500)
        server._dialect.routes["GET", "/health"] = dead

    trainer.args.vllm_server_timeout = 0.5
    with pytest.raises(ServerError, match="/v1/completions answered 500.*And .*/health answers 503"):
        roll(env_rollout(turns(first=die), base_url=server.base_url, weight_sync=None), trainer)


def test_a_server_that_missed_the_new_weights_is_not_sampled_before_it_has_them(
    servers: list[Server], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    post, failures = weights._post, iter([ServerGoneError("a cable was pulled")])

    def flaky(base_url: str, path: str, body: Any) -> Any:
        if base_url == servers[1].base_url and (failure := next(failures, None)):
            raise failure
        return post(base_url, path, body)

    monkeypatch.setattr(weights, "_post", flaky)
    rollout = env_rollout(Turns, base_url=[server.base_url for server in servers])
    assert roll(rollout, trainer, *"pqrs")["num_turns"] == [3] * 4
    sampled = paths(servers[1])
    assert sampled == [] or sampled[:2] == SYNC


def test_the_weights_of_trls_own_server_are_never_left_as_they_are(server: Server, trainer: Any) -> None:
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    trainer.args.vllm_mode, trainer.args.vllm_server_base_url = "server", server.base_url
    rollout = env_rollout(turns(first=lost(server)), weight_sync=None)
    with pytest.raises(ServerError, match="start the training again from its last checkpoint"):
        roll(rollout, trainer)


def test_a_batch_that_ran_out_of_time_for_want_of_a_server_is_an_error(server: Server, trainer: Any) -> None:
    trainer.args.vllm_server_timeout = 30.0
    rollout = env_rollout(turns(first=server.stop), base_url=server.base_url, trajectory_timeout_s=2.0)
    with pytest.raises(ServerError, match="It did not come back in time"):
        roll(rollout, trainer, *"pq")


class Scripted:
    """A client of a server whose processes are numbered, for what no real server does on cue."""

    base_url, max_model_len = "http://scripted", 512

    def __init__(self, generate: Callable[[], Any], process: int = 0) -> None:
        self._generate, self._process = generate, process
        self.is_closed = False

    async def generate(self, token_ids: list[int], sampling: Any) -> Completion:
        completion: Completion = await self._generate()
        return completion

    async def instance(self) -> str:
        return str(self._process)

    async def close(self) -> None:
        self.is_closed = True


SAMPLING = Sampling(max_tokens=8)


def pool_of(clients: list[Scripted], restore: Any = lambda base_url: None, wait_s: float = 5.0) -> PoolClient:
    """A pool of one address, at which these are found one after the other."""
    found = iter(clients)

    async def reach(base_url: str) -> Any:
        return next(found)

    return PoolClient(["http://scripted"], reach, restore, wait_s=wait_s)


def sampled(token_id: int) -> Completion:
    return Completion([token_id], [-1.0], "stop")


def test_what_comes_from_a_server_that_was_lost_meanwhile_is_not_used() -> None:
    async def play() -> list[Completion]:
        answers, lost = iter([0, 1]), asyncio.Event()

        async def first() -> Completion:
            if next(answers) == 0:
                await lost.wait()
                return sampled(1)  # from the next process at the address, by a second attempt of its client
            lost.set()
            raise ServerGoneError("gone")

        async def second() -> Completion:
            return sampled(2)

        pool = pool_of([Scripted(first), Scripted(second, process=1)])
        await pool.join()
        return await asyncio.gather(pool.generate([5], SAMPLING), pool.generate([5], SAMPLING))

    assert asyncio.run(play()) == [sampled(2), sampled(2)]


def test_a_request_that_kills_its_servers_is_given_up() -> None:
    async def play() -> None:
        async def kill() -> Completion:
            raise ServerGoneError("gone")

        pool = pool_of([Scripted(kill, process=number) for number in range(9)])
        await pool.join()
        await pool.generate([5] * 7, SAMPLING)

    with pytest.raises(ServerError, match="5 servers were lost with a request of 7 tokens, max_tokens=8"):
        asyncio.run(play())


def test_the_context_of_a_server_that_is_gone_is_still_known() -> None:
    async def play() -> int | None:
        pool = pool_of([Scripted(lambda: None)], restore=None)
        await pool.join()
        await pool.lose(["http://scripted"])
        return pool.max_model_len

    assert asyncio.run(play()) == 512


def test_a_server_that_dies_while_it_gets_its_weights_is_looked_for_again() -> None:
    losses = [ServerGoneError("gone again"), None]

    def restore(base_url: str) -> None:
        if error := losses.pop(0):
            raise error

    async def play() -> tuple[Completion, list[bool]]:
        async def answer() -> Completion:
            return sampled(2)

        clients = [Scripted(answer, process=number) for number in range(3)]
        pool = pool_of(clients, restore)
        await pool.join()
        await pool.lose(["http://scripted"])
        completion = await pool.generate([5], SAMPLING)
        await pool.rest()
        return completion, [client.is_closed for client in clients]

    assert asyncio.run(play()) == (sampled(2), [True, True, False])


def test_a_restore_that_hangs_holds_up_neither_the_end_of_a_call_nor_an_interruption() -> None:
    is_free = threading.Event()

    async def play() -> tuple[float, float]:
        pool = pool_of([Scripted(lambda: None), Scripted(lambda: None, process=1)], lambda base_url: is_free.wait(5))
        await pool.join()
        await pool.lose(["http://scripted"])
        waiting = asyncio.create_task(pool.generate([5], SAMPLING))
        await asyncio.sleep(0.1)
        waiting.cancel()
        started = time.monotonic()
        await pool.rest()
        rested = time.monotonic()
        asyncio.get_running_loop().call_later(0.5, is_free.set)
        await pool.roll_call()  # after which weights may be sent
        return rested - started, time.monotonic() - rested

    rest_s, roll_call_s = asyncio.run(play())
    assert rest_s < 0.3
    assert roll_call_s > 0.4


def test_a_batch_of_which_one_trajectory_ran_out_of_time_while_the_server_was_away_is_kept(
    server: Server, trainer: Any
) -> None:
    class Short(Turns):
        def reset(self, prompt: Any) -> Any:
            self.is_short = prompt[0]["content"] == "p"
            return super().reset(prompt)

        def step(self, action: Any) -> StepResult:
            if self.is_short:
                return StepResult(reward=1.0, terminated=True)
            time.sleep(0.3)
            server.stop()
            return super().step(action)

    trainer.args.vllm_server_timeout = 30.0
    rollout = env_rollout(Short, base_url=server.base_url, trajectory_timeout_s=2.0)
    batch = roll(rollout, trainer, "p", "q")
    assert batch["stop_reason"] == ["terminated", "timeout"]


def test_whatever_keeps_weights_from_being_brought_is_told() -> None:
    def restore(base_url: str) -> None:
        raise PermissionError("weights.safetensors")

    async def play() -> None:
        pool = pool_of([Scripted(lambda: None)] * 2, restore)
        await pool.join()
        await pool.lose(["http://scripted"])
        await pool.generate([5], SAMPLING)

    with pytest.raises(WeightSyncError, match="could not be brought to .*PermissionError: weights.safetensors"):
        asyncio.run(play())
