"""Servers that go away and come back in the middle of a run, on fake servers that are really stopped and started.

The fake server tells a process from the next as vLLM does, by the start of its process, and keeps what it was sent.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from trl_rollouts import Rollout, RolloutError, ServerError, SetupError, StepResult, env_rollout
from trl_rollouts.clients import http
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
        threading.Timer(1.5, server.start).start()

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
    with pytest.raises(ServerError, match="was restarted during this rollout, and no request missed it"):
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


def test_weights_that_are_not_to_be_found_are_an_error(server: Server, trainer: Any, tmp_path: Path) -> None:
    def lose() -> None:
        for folder in (tmp_path / "rollout_weights").iterdir():
            folder.rename(tmp_path / folder.name)
        lost(server)()

    trainer.args.vllm_server_timeout = 30.0
    with pytest.raises(RolloutError, match=f"No weights for {server.base_url}, which was started anew"):
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
