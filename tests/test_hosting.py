"""What surrounds an environment: its time limits, its final reward, and how many there are at a time."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from trl_rollouts import Message, Rollout, RolloutError, SetupError, StepResult, env_rollout, with_task
from trl_rollouts.hosting import EnvLimits, HostedEnv
from trl_rollouts.testing import Reply, ScriptedClient, byte_tokenizer, fake_trainer

TOKENIZER = byte_tokenizer()
END = 258


class Echo:
    """Answers with the text in capitals, worth its length; ends when the text is "stop"."""

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        text = action["content"]
        return StepResult([{"role": "user", "content": text.upper()}], reward=len(text), terminated=text == "stop")

    def close(self) -> None:
        pass


def ask(text: str, **task: Any) -> list[Message]:
    return [{"role": "user", "content": text} | ({"task": task} if task else {})]


def roll(rollout: Rollout, *prompts: Any, **config: Any) -> dict[str, list[Any]]:
    try:
        return rollout(list(prompts), fake_trainer(TOKENIZER, **config))
    finally:
        rollout.close()


def stop() -> ScriptedClient:
    return ScriptedClient(lambda prompt: "stop")


def hanging(where: str, hang: Callable[[], Any], closed: list[str]) -> type[Echo]:
    """An environment whose method hangs for the prompt "q"."""

    class Hanging(Echo):
        def reset(self, prompt: list[Message]) -> Any:
            self.hangs = prompt[0]["content"] == "q"
            return hang() if self.hangs and where == "reset" else prompt

        def step(self, action: Message) -> Any:
            return hang() if self.hangs and where == "step" else super().step(action)

        def final_reward(self) -> Any:
            return hang() if self.hangs and where == "final_reward" else 0.5

        def close(self) -> Any:
            closed.append("q" if self.hangs else "p")

    return Hanging


# Time limits


@pytest.mark.parametrize("hang", [lambda: time.sleep(1.0), lambda: asyncio.sleep(60.0)], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("where", "limit", "said"),
    [
        ("reset", "reset_timeout_s", "env.reset did not come back within reset_timeout_s=0.2"),
        ("step", "step_timeout_s", "env.step did not come back within step_timeout_s=0.2"),
        ("final_reward", "step_timeout_s", "env.final_reward did not come back within step_timeout_s=0.2"),
    ],
)
def test_a_call_that_hangs_fails_its_own_row_at_its_own_limit(
    hang: Callable[[], Any], where: str, limit: str, said: str
) -> None:
    closed: list[str] = []
    rollout = env_rollout(hanging(where, hang, closed), client=stop(), **{limit: 0.2})  # type: ignore[arg-type]
    started = time.monotonic()
    batch = roll(rollout, ask("p"), ask("q"))
    assert time.monotonic() - started < 1.0
    assert batch["rollout_error"] == [None, f"EnvError: {said}"]
    assert (batch["env_reward"], batch["stop_reason"]) == ([4.5, None], ["terminated", "error"])
    assert sum(batch["env_mask"][1]) == 0
    for _ in range(100):  # a sync call that hangs is closed once it returns
        if len(closed) == 2:
            break
        time.sleep(0.02)
    assert sorted(closed) == ["p", "q"]


def test_the_limits_of_reset_and_step_are_not_each_others() -> None:
    class SlowReset(Echo):
        async def reset(self, prompt: list[Message]) -> list[Message]:  # type: ignore[override]
            await asyncio.sleep(0.3)
            return prompt

    batch = roll(env_rollout(SlowReset, step_timeout_s=0.1, client=stop()), ask("p"))
    assert batch["rollout_error"] == [None]


def test_a_step_that_catches_its_cancellation_fails_at_its_limit_as_well() -> None:
    class Stubborn(Echo):
        async def step(self, action: Message) -> StepResult:  # type: ignore[override]
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            return super().step(action)

    with pytest.raises(RolloutError, match="env.step did not come back within step_timeout_s=0.1"):
        roll(env_rollout(Stubborn, step_timeout_s=0.1, client=stop()), ask("p"))


def test_a_close_that_hangs_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Echo):
        async def close(self) -> None:  # type: ignore[override]
            await asyncio.sleep(60)

    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert roll(env_rollout(Stuck, close_timeout_s=0.1, client=stop()), ask("p"))["env_reward"] == [4.0]
    assert time.monotonic() - started < 5
    assert "env.close did not come back within close_timeout_s=0.1" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
def test_an_environment_that_is_made_too_late_is_closed_all_the_same(is_async: bool) -> None:
    events: list[tuple[str, int]] = []

    class Slow(Echo):
        def __init__(self) -> None:
            if not is_async:
                time.sleep(0.4)
            events.append(("made", threading.get_ident()))

        def close(self) -> None:
            events.append(("closed", threading.get_ident()))

    async def made_async() -> Slow:
        await asyncio.sleep(0.4)
        return Slow()

    factory: Any = made_async if is_async else Slow
    rollout = env_rollout(factory, reset_timeout_s=0.1, client=stop())
    said = "making the environment did not come back within reset_timeout_s=0.1"
    with pytest.raises(RolloutError, match=said):
        rollout([ask("p")], fake_trainer(TOKENIZER))
    time.sleep(0.6)
    rollout.close()
    assert [event for event, _ in events] == ([] if is_async else ["made", "closed"])
    assert len({thread for _, thread in events}) <= 1


@pytest.mark.parametrize("name", ["reset_timeout_s", "step_timeout_s", "close_timeout_s"])
def test_a_limit_must_be_positive(name: str) -> None:
    with pytest.raises(SetupError, match=f"{name} must be a positive number, not 0"):
        env_rollout(Echo, **{name: 0})  # type: ignore[arg-type]


# The final reward


class Judged(Echo):
    """Earns its turns at the end."""

    def reset(self, prompt: list[Message]) -> list[Message]:
        self.num_steps = 0
        return prompt

    def step(self, action: Message) -> StepResult:
        self.num_steps += 1
        return super().step(action)

    def final_reward(self) -> float:
        return 100.0 * self.num_steps


@pytest.mark.parametrize(
    ("replies", "options", "config", "stop_reason", "step_rewards"),
    [
        (["a", "stop"], {}, {}, "terminated", [1.0, 204.0]),
        (["a", "bb", "c"], {"max_turns": 2}, {}, "max_turns", [1.0, 202.0]),
        (["a", "bb", "c"], {}, {"max_completion_length": 16}, "length", [101.0]),
        (["a", Reply([END], delay_s=5.0)], {"trajectory_timeout_s": 0.3}, {}, "timeout", [101.0]),
    ],
)
def test_the_final_reward_counts_to_the_last_step_however_the_trajectory_ended(
    replies: list[Any], options: Any, config: Any, stop_reason: str, step_rewards: list[float]
) -> None:
    batch = roll(env_rollout(Judged, client=ScriptedClient(replies), **options), ask("p"), **config)
    assert (batch["stop_reason"], batch["step_rewards"]) == ([stop_reason], [step_rewards])
    assert batch["env_reward"] == [sum(step_rewards)]


def test_a_failed_trajectory_is_not_asked_for_its_final_reward() -> None:
    class Failing(Judged):
        def step(self, action: Message) -> StepResult:
            raise OSError("broken")

        def final_reward(self) -> float:
            raise AssertionError("asked")

    with pytest.raises(RolloutError, match="OSError: broken"):
        roll(env_rollout(Failing, client=stop()), ask("p"))


def test_a_final_reward_behind_a_step_that_hangs_is_not_waited_for() -> None:
    class Hung(Judged):
        def step(self, action: Message) -> StepResult:
            if action["content"] == "wait":
                time.sleep(1.0)
            return super().step(action)

    rollout = env_rollout(Hung, trajectory_timeout_s=0.3, client=ScriptedClient(["a", "wait"]))
    with pytest.raises(
        RolloutError, match="final_reward cannot be called: an earlier call of the environment has not"
    ):
        roll(rollout, ask("p"))


class Tensor:
    def __float__(self) -> float:
        return 1.0


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (None, "returned the reward None of type NoneType; it must be a number: float"),
        (Tensor(), "of type test_hosting.Tensor; it must be a number: float"),
        (float("nan"), "returned reward nan; it must be finite"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_a_sentence(reward: Any, said: str) -> None:
    class Odd(Echo):
        def step(self, action: Message) -> StepResult:
            return StepResult(terminated=True, reward=reward)

    class OddAtTheEnd(Echo):
        def final_reward(self) -> Any:
            return reward

    for kind, call in ((Odd, "env.step"), (OddAtTheEnd, "env.final_reward")):
        with pytest.raises(RolloutError, match=f"{call} .*{said}"):
            roll(env_rollout(kind, client=stop()), ask("p"))


# How many at a time, and which


def counted(capacity: int | None, peak: list[int]) -> type[Echo]:
    """Environments that count how many of them are open, and the most that ever were, in `peak`."""
    open_now = [0]

    class Counted(Echo):
        max_concurrency = capacity

        def __init__(self) -> None:
            open_now[0] += 1
            peak[0] = max(peak[0], open_now[0])

        async def close(self) -> None:  # type: ignore[override]
            open_now[0] -= 1

    return Counted


def test_there_are_never_more_environments_than_their_kind_allows() -> None:
    peak = [0]
    client = ScriptedClient(lambda prompt: Reply([*b"stop", END], delay_s=0.01))
    batch = roll(env_rollout(counted(3, peak), client=client), *[ask("p")] * 32)
    assert (peak, batch["env_reward"]) == ([3], [4.0] * 32)


def test_waiting_for_a_place_does_not_count_against_the_trajectorys_time() -> None:
    client = ScriptedClient(lambda prompt: Reply([*b"stop", END], delay_s=0.2))
    batch = roll(env_rollout(counted(1, [0]), trajectory_timeout_s=0.5, client=client), *[ask("p")] * 5)
    assert batch["stop_reason"] == ["terminated"] * 5


def test_a_kind_that_is_full_does_not_hold_up_another() -> None:
    slow, quick = [0], [0]
    kinds = {"slow": counted(1, slow), "quick": counted(None, quick)}
    client = ScriptedClient(lambda prompt: Reply([*b"stop", END], delay_s=0.05))
    prompts = [ask("p", environment="slow")] * 6 + [ask("p", environment="quick")] * 2
    batch = roll(env_rollout(kinds, max_concurrency=3, client=client), *prompts)
    assert (slow, quick, batch["env_reward"]) == ([1], [2], [4.0] * 8)


def test_a_row_names_its_environment() -> None:
    from datasets import Dataset

    class Shout(Echo):
        def step(self, action: Message) -> StepResult:
            return StepResult(terminated=True, reward=7.0)

    dataset = Dataset.from_list([{"prompt": ask("p"), "environment": name} for name in ("echo", "shout")])
    prompts = with_task(dataset, ["environment"])["prompt"]
    batch = roll(env_rollout({"echo": Echo, "shout": Shout}, client=stop()), *prompts)
    assert batch["env_reward"] == [4.0, 7.0]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (
            ask("p", environment="ehco"),
            "A row's environment is 'ehco', which is none of echo, lake. Did you mean echo",
        ),
        (ask("p", environment=["echo"]), r"A row's environment is \['echo'\], which is none of echo, lake"),
        (ask("p"), r'names no environment of echo, lake.* with_task\(dataset, \["environment"\]\)'),
        ("text", "names no environment of echo, lake"),
    ],
)
def test_a_row_without_a_known_environment_is_refused_before_anything_is_sampled(prompt: Any, said: str) -> None:
    client = stop()
    with pytest.raises(SetupError, match=said):
        roll(env_rollout({"echo": Echo, "lake": Echo}, client=client), ask("p", environment="echo"), prompt)
    assert client.calls == []


@pytest.mark.parametrize(
    ("env_factory", "said"),
    [
        ({}, "env_factory names no environment"),
        ({"echo": Echo()}, r"env_factory\['echo'\] must be callable without arguments"),
        (counted(0, [0]), "env_factory.max_concurrency must be a number of environments, or None, not 0"),
    ],
)
def test_a_factory_that_cannot_work_is_refused(env_factory: Any, said: str) -> None:
    with pytest.raises(SetupError, match=said):
        env_rollout(env_factory)


# From the outside in


def test_an_environment_that_is_made_in_the_moment_of_its_cancellation_is_closed() -> None:
    closed: list[int] = []

    class Counted(Echo):
        def close(self) -> None:
            closed.append(1)

    async def play(num_ticks: int) -> None:
        made = threading.Event()

        def factory() -> Echo:
            made.set()
            return Counted()

        env = HostedEnv(factory, EnvLimits())
        making = asyncio.create_task(env.make())
        while not made.is_set():
            await asyncio.sleep(0)
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        making.cancel()
        with suppress(asyncio.CancelledError):
            await making
        await env.close()
        for _ in range(100):
            if closed:
                return
            await asyncio.sleep(0.01)

    for num_ticks in range(6):
        closed.clear()
        asyncio.run(play(num_ticks))
        assert closed == [1], num_ticks


def test_a_row_without_the_column_that_reset_wants_is_told_what_it_has() -> None:
    class Wanting(Echo):
        def reset(self, prompt: list[Message]) -> list[Message]:
            self.secret = prompt[-1]["task"]["secret"]
            return prompt

    with pytest.raises(RolloutError, match=r"KeyError: 'task'. The row hands over no column; with_task\(dataset"):
        roll(env_rollout(Wanting, client=stop()), ask("p"))
    with pytest.raises(RolloutError, match="KeyError: 'secret'. The row hands over the columns level, answer;"):
        roll(env_rollout(Wanting, client=stop()), ask("p", level=1, answer="x"))


def test_async_code_that_blocks_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class Blocking(Echo):
        async def step(self, action: Message) -> StepResult:  # type: ignore[override]
            time.sleep(2.0)
            return super().step(action)

    with caplog.at_level(logging.WARNING):
        roll(env_rollout(Blocking, client=stop()), ask("p"))
    assert "held up all trajectories for" in caplog.text
    assert "make it a plain def, which gets a thread" in caplog.text


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_an_end_is_true_or_false(name: str) -> None:
    class Odd(Echo):
        def step(self, action: Message) -> StepResult:
            return StepResult(**{name: "no"})  # type: ignore[arg-type]

    with pytest.raises(RolloutError, match=f"env.step returned {name}='no'; it must be True or False"):
        roll(env_rollout(Odd, client=stop()), ask("p"))


def test_a_batch_of_which_no_turn_was_an_action_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Echo):
        def step(self, action: Message) -> StepResult:
            return StepResult([{"role": "user", "content": "no"}], info={"refused_action": "Say left or right."})

    trainer = fake_trainer(TOKENIZER)
    rollout = env_rollout(Refusing, max_turns=2, client=stop())
    with caplog.at_level(logging.WARNING):
        rollout([ask("p"), ask("q")], trainer)
    rollout.close()
    assert "refused all 4 actions of a batch. The first: Say left or right." in caplog.text
    assert trainer._metrics["train"]["rollout/refused_actions"] == [2.0]


def test_with_task_takes_a_dataset() -> None:
    with pytest.raises(ValueError, match="with_task takes a datasets.Dataset, not list"):
        with_task([{"prompt": ask("p")}], ["prompt"])
