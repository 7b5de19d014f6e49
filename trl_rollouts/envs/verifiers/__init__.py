"""An environment of verifiers, as it is: its tasks, its tools, its users and its rewards, around our sampling.

    dataset = verifiers_dataset("gsm8k-v1")
    rollout_func = env_rollout(verifiers_env("gsm8k-v1"))
    trainer = GRPOTrainer(..., train_dataset=dataset, reward_funcs=env_reward, rollout_func=rollout_func)

Control is inverted: verifiers plays an episode in the background and takes us for its model. What it asks of its model
is what ours sees next, and the turn that was sampled is the answer. Its tools run on its side, and what its rewards
make of the finished trace is the trajectory's reward; also where a limit has cut it, which verifiers sees as its own
limit `max_turns`.

One agent of the environment is the policy. Where its configuration asks for no harness and no runtime it is played by
verifiers' chat loop (its harness "null"), without a sandbox and a shell: the functions of the program that verifiers
would start for each episode are called here, which ties this module to verifiers 0.4. All episodes run in one thread,
as verifiers expects: what blocks there holds up the other episodes, but neither other environments nor time limits.

Not here: conversations that do not just grow (compaction, sub-agents, several attempts in an episode, `@vf.intercept`
of what the model wrote), limits in tokens, and retries, since what was sampled is not sampled again.
"""

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from ...env import EnvFactory, StepResult
from ...errors import SetupError
from ...trajectory import Message
from .episode import Episode, Shared
from .parts import load_environment, row_prompt

T = TypeVar("T")


def verifiers_dataset(environment: Any, *, size: int | None = None) -> Any:
    """The tasks of an environment, each with all that `verifiers_env` needs to play it.

    Args:
        environment: as `verifiers_env` takes it.
        size: the first so many tasks; None for all.

    Returns:
        `datasets.Dataset`: with the column `prompt`, messages. It says what the task says; what the model sees first
        is up to the environment.

    Raises:
        SetupError: no such environment, one whose tasks have no end and no `size`, or tasks that are no plain data.
    """
    if size is not None and (type(size) is not int or size < 1):
        raise SetupError(f"size must be a number of tasks, or None, not {size!r}.")
    env, _ = load_environment(environment, "verifiers_dataset")
    tasks = env.taskset if size is None else env.taskset.take(size)
    if not tasks.bounded:
        raise SetupError(f"{env.config.env_id} has tasks without end. Pass size=, the number of tasks.")
    if not (rows := [{"prompt": row_prompt(task, env)} for task in tasks]):
        raise SetupError(f"{env.config.env_id} has no task.")
    from datasets import Dataset

    return Dataset.from_list(rows)


def verifiers_env(environment: Any) -> EnvFactory:
    """What `env_rollout` takes, of an environment of verifiers, for the prompts of `verifiers_dataset`.

    Args:
        environment: the id of an installed taskset, such as "gsm8k-v1"; or the `[env]` block of a verifiers run, as a
            dict, `{"taskset": {"id": "gsm8k-v1", "split": "train"}, "agent": {"max_turns": 4}}`, or its `EnvConfig`;
            or an `Env`, of which only the configuration is used.

    An episode is scored within its last step, so `step_timeout_s` has to leave time for that. Its tool servers are
    processes: one an episode where a task declares them, one for all episodes of a batch where the taskset does.

    Raises:
        SetupError: verifiers is missing, there is no such environment, or its configuration cannot work here.
    """
    shared = Shared(*load_environment(environment, "verifiers_env"))
    return lambda: VerifiersEnv(shared)


class VerifiersEnv:
    """One episode. Its methods pass on to verifiers' thread, and back."""

    def __init__(self, shared: Shared) -> None:
        self._episode = Episode(shared)
        self.tools: list[Any] = []

    @property
    def answer_role(self) -> str:
        return "tool" if self.tools else "user"

    async def reset(self, prompt: list[Message]) -> list[Message]:
        opening, self.tools = await _there(self._episode.begin(prompt[-1].get("task")))
        return opening

    async def step(self, action: Message) -> StepResult:
        return await _there(self._episode.answer(action))

    async def final_reward(self) -> float:
        return await _there(self._episode.cut())

    async def close(self) -> None:
        _loop().call_soon_threadsafe(self._episode.end)  # also where nobody waits until it has ended
        await _there(self._episode.ended())


async def _there(work: Coroutine[Any, Any, T]) -> T:
    """In verifiers' thread."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


def _loop() -> asyncio.AbstractEventLoop:
    return _loop_of(os.getpid())  # a forked child has the loop, and not its thread


@functools.cache
def _loop_of(pid: int) -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # of a task's code, which ends its own episode only
                loop.run_forever()

    threading.Thread(target=run, name="trl_rollouts:verifiers", daemon=True).start()
    return loop
