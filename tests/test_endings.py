"""How trajectories end where an environment does not let go, the event loop is busy, or the run is over."""

import asyncio
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from trl_rollouts import Completion, Rollout, RolloutError, ServerError, SetupError, StepResult, env_rollout, episode
from trl_rollouts.testing import Reply, ScriptedClient, byte_tokenizer, fake_trainer

TOKENIZER = byte_tokenizer()


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def roll(rollout: Rollout, *prompts: str) -> dict[str, list[Any]]:
    return rollout([ask(prompt) for prompt in prompts], fake_trainer(TOKENIZER))


class Once:
    """One turn."""

    async def reset(self, prompt: Any) -> Any:
        self.asked = prompt[0]["content"]
        return prompt

    async def step(self, action: Any) -> StepResult:
        return StepResult(reward=1.0, terminated=True)

    async def close(self) -> None:
        pass


class FailingClient:
    """The n-th request finds the server gone."""

    max_model_len = None

    def __init__(self, number: int, busy_s: float = 0.0) -> None:
        self.left, self.busy_s = number, busy_s

    async def generate(self, token_ids: list[int], sampling: Any) -> Completion:
        self.left -= 1
        if self.left == 0:
            time.sleep(self.busy_s)  # holds the event loop up, as a busy machine does
            raise ServerError("gone")
        return Completion([97, 258], [-1.0, -1.0], "stop")

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("where", ["reset", "step", "close"])
def test_an_environment_that_catches_every_cancellation_holds_up_nobody(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "GRACE_S", 0.5)
    until = time.monotonic() + 6

    async def go_on(env: Once, method: str) -> None:
        while method == where and env.asked == "p" and time.monotonic() < until:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)

    class Stubborn(Once):
        async def reset(self, prompt: Any) -> Any:
            await super().reset(prompt)
            await go_on(self, "reset")
            return prompt

        async def step(self, action: Any) -> StepResult:
            await go_on(self, "step")
            return await super().step(action)

        async def close(self) -> None:
            await go_on(self, "close")

    limits: Any = {"reset_timeout_s": 0.2, "step_timeout_s": 0.2, "close_timeout_s": 0.2, "trajectory_timeout_s": 1.0}
    rollout = env_rollout(Stubborn, client=ScriptedClient(lambda ids: "a"), **limits)
    started = time.monotonic()
    batch = roll(rollout, "p", "q")
    assert time.monotonic() - started < 4
    assert batch["stop_reason"] == ["error", "terminated"]


def test_a_trajectory_whose_time_is_up_while_the_loop_is_busy_ends_with_its_turns() -> None:
    class Busy(Once):
        async def step(self, action: Any) -> StepResult:
            time.sleep(0.35)
            return StepResult([{"role": "user", "content": "go"}], reward=1.0)

    batch = roll(env_rollout(Busy, client=ScriptedClient(lambda ids: "a"), trajectory_timeout_s=0.3), "p")
    assert (batch["stop_reason"], batch["rollout_error"]) == (["timeout"], [None])


@pytest.mark.parametrize("end", ["limit", "run"])
def test_an_environment_that_is_made_at_the_moment_of_its_end_is_closed(end: str) -> None:
    log = []
    lock = threading.Lock()

    class Made(Once):
        def __init__(self) -> None:
            with lock:
                log.append("made")
                is_first = len(log) == 1
            time.sleep(0.0 if is_first else 0.05)

        async def reset(self, prompt: Any) -> Any:
            time.sleep(0.3 if end == "limit" else 0.0)  # the others' limit passes, and they are made
            return prompt

        async def close(self) -> None:
            log.append("closed")

    client: Any = ScriptedClient(lambda ids: "a") if end == "limit" else FailingClient(1, busy_s=0.2)
    rollout = env_rollout(Made, client=client, reset_timeout_s=0.2)
    with suppress(RolloutError):
        roll(rollout, *"abcdefgh" * 4)
    time.sleep(0.5)
    rollout.close()
    assert log.count("made") == log.count("closed")


def test_a_close_that_is_under_way_when_the_run_ends_is_let_finish() -> None:
    log = []

    class Slow(Once):
        def reset(self, prompt: Any) -> Any:  # type: ignore[override]  # a thread of its own
            self.asked = prompt[0]["content"]
            return prompt

        async def step(self, action: Any) -> StepResult:
            await asyncio.sleep(0.3 if self.asked == "p" else 0.0)
            return StepResult([{"role": "user", "content": "go"}], terminated=self.asked == "q")

        async def close(self) -> None:
            await asyncio.sleep(0.6 if self.asked == "q" else 0.0)
            log.append(self.asked)

    rollout = env_rollout(Slow, client=FailingClient(3))
    with pytest.raises(ServerError):
        roll(rollout, "p", "q")
    time.sleep(0.1)
    rollout.close()
    assert sorted(log) == ["p", "q"]
    assert not [thread for thread in threading.enumerate() if thread.name == "trl_rollouts:worker"]


def test_an_environment_is_begun_stepped_and_closed_in_one_task() -> None:
    """As anyio's scopes, and so MCP's sessions, ask for."""
    tasks = set()

    class Scoped(Once):
        async def reset(self, prompt: Any) -> Any:
            tasks.add(asyncio.current_task())
            return await super().reset(prompt)

        async def step(self, action: Any) -> StepResult:
            tasks.add(asyncio.current_task())
            return await super().step(action)

        async def close(self) -> None:
            tasks.add(asyncio.current_task())

    rollout = env_rollout(Scoped, client=ScriptedClient(lambda ids: "a"))
    roll(rollout, "p")
    rollout.close()
    assert len(tasks) == 1


def test_an_environment_whose_own_task_group_cancels_it_fails_its_own_row() -> None:
    class Grouped(Once):
        async def reset(self, prompt: Any) -> Any:
            async def die() -> None:
                await asyncio.sleep(0.05)
                raise OSError("the connection is gone")

            self.group = await asyncio.TaskGroup().__aenter__()
            if prompt[0]["content"] == "p":
                self.group.create_task(die())
            return await super().reset(prompt)

        async def close(self) -> None:
            await self.group.__aexit__(None, None, None)

    client = ScriptedClient(lambda ids: Reply([97, 258], delay_s=0.3))
    rollout = env_rollout(Grouped, client=client)
    batch = roll(rollout, "p", "q")
    rollout.close()
    assert batch["stop_reason"] == ["error", "terminated"]
    assert "cancelled its own trajectory" in batch["rollout_error"][0]


def test_a_step_that_catches_its_cancellation_is_not_called_again_when_the_run_has_ended() -> None:
    steps = []

    class Deaf(Once):
        async def step(self, action: Any) -> StepResult:
            if self.asked == "q":
                raise SetupError("this cannot work")
            steps.append(1)
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.2)
            return StepResult([{"role": "user", "content": "go"}])

    rollout = env_rollout(Deaf, client=ScriptedClient(lambda ids: "a"))
    with pytest.raises(SetupError, match="this cannot work"):
        roll(rollout, "p", "q")
    rollout.close()
    assert len(steps) <= 1


@pytest.mark.parametrize("problem", [AssertionError("no"), SystemExit(3)])
def test_a_property_that_raises_fails_its_row(problem: BaseException) -> None:
    class Odd(Once):
        @property
        def tools(self) -> Any:
            if self.asked == "p":
                raise problem
            return None

    rollout = env_rollout(Odd, client=ScriptedClient(lambda ids: "a"))
    assert roll(rollout, "p", "q")["stop_reason"] == ["error", "terminated"]
    rollout.close()


def test_tools_that_are_no_list_are_a_sentence() -> None:
    class Odd(Once):
        def tools(self) -> None: ...

    rollout = env_rollout(Odd, client=ScriptedClient(lambda ids: "a"))
    with pytest.raises(RolloutError, match="env.tools is .* it must be a list of schemas"):
        roll(rollout, "p")
    rollout.close()
