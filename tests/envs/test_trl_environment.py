"""Classes as TRL's `environment_factory` takes them, from their tools to the row, with scripted completions."""

import asyncio
import functools
import json
import logging
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from trl_rollouts import RolloutError, SetupError, env_reward, env_rollout
from trl_rollouts.env import EnvFactory
from trl_rollouts.envs.trl_environment import trl_environment
from trl_rollouts.rollout import Rollout
from trl_rollouts.testing import ScriptedClient, byte_tokenizer, fake_trainer

TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "user", "content": "Play."}]

Roll = Callable[..., dict[str, Any]]


class WordEnv:
    """In the shape of the word game in TRL's guide: a reward that grows, and an error once the game is over."""

    def __init__(self) -> None:
        self.reward = 0.0
        self.done = True

    def reset(self, word: str = "crane", **kwargs: Any) -> str | None:
        self.reward, self.done, self._word = 0.0, False, word
        return f" The word has {len(word)} letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess in the game.

        Args:
            guess: The guessed word.

        Returns:
            The feedback of the game.
        """
        if self.done:
            raise ValueError("Game over.")
        self.reward = sum(a == b for a, b in zip(guess, self._word, strict=False)) / len(self._word)
        self.done = guess == self._word
        return "".join("G" if a == b else "X" for a, b in zip(guess, self._word, strict=False))


class CounterEnv:
    """In the shape of the environment in TRL's own tests, which owns its reward."""

    def reset(self, **kwargs: Any) -> None:
        self.row = kwargs
        self._count = 0

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self._count += step
        return self._count

    def get_reward(self) -> float:
        return float(self._count)


@pytest.fixture
def roll() -> Iterator[Roll]:
    rollouts: list[Rollout] = []

    def run(env_factory: EnvFactory, replies: list[str], *, prompt: Any = QUESTION, max_turns: int = 8) -> Any:
        client = ScriptedClient(replies, tokenizer=TOKENIZER, max_model_len=None)
        rollouts.append(env_rollout(env_factory, max_turns=max_turns, client=client))
        batch = rollouts[-1]([prompt], fake_trainer(TOKENIZER, max_completion_length=4000))
        return {name: column[0] for name, column in batch.items()} | {"batch": batch}

    yield run
    for rollout in rollouts:
        rollout.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def row_prompt(text: str = "Play.", **task: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text, "task": task}]


def contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["transcript"]]


def test_an_episode_of_an_unmodified_class_from_its_reset_to_its_reward(roll: Roll) -> None:
    row = roll(trl_environment(WordEnv), [call("guess", guess="crate"), call("guess", guess="crane"), "Done."])
    assert [(message["role"], message["content"]) for message in row["transcript"]] == [
        ("user", "Play. The word has 5 letters."),
        ("assistant", ""),
        ("tool", "GGGXG"),
        ("assistant", ""),
        ("tool", "GGGGG"),
        ("assistant", "Done."),
    ]
    assert (row["stop_reason"], row["env_reward"], row["step_rewards"]) == ("terminated", 1.0, [0.0, 0.0, 1.0])
    assert env_reward(**row["batch"]) == [1.0]


def test_the_columns_of_the_row_reach_reset(roll: Roll) -> None:
    row = roll(trl_environment(WordEnv), [call("guess", guess="tea"), "Done."], prompt=row_prompt(word="tea"))
    assert (contents(row)[0], row["env_reward"]) == ("Play. The word has 3 letters.", 1.0)


def test_reset_gets_the_prompt_as_the_dataset_has_it(roll: Roll) -> None:
    made: list[CounterEnv] = []

    class Recorded(CounterEnv):
        def __init__(self) -> None:
            made.append(self)

    roll(trl_environment(Recorded), ["Done."], prompt=row_prompt(level=3))
    assert made[0].row == {"prompt": QUESTION, "level": 3}


def test_get_reward_is_the_reward_of_a_class_that_has_it(roll: Roll) -> None:
    assert (
        roll(trl_environment(CounterEnv), [call("increment", step=3), call("increment", step=4), "."])["env_reward"]
        == 7.0
    )


def test_get_reward_may_be_async_and_is_called_once(roll: Roll) -> None:
    num_calls = []

    class Judged(CounterEnv):
        async def get_reward(self) -> float:
            num_calls.append(1)
            return 0.5

    assert roll(trl_environment(Judged), [call("increment", step=3), "."])["env_reward"] == 0.5
    assert len(num_calls) == 1


def test_public_methods_are_the_tools_in_trls_order(roll: Roll) -> None:
    class Several(CounterEnv):
        def again(self) -> int:
            """Count again."""
            return self.increment(1)

        @staticmethod
        def rules() -> str:
            """Read the rules."""
            return "none"

        def _hidden(self) -> None: ...

    names = [tool["function"]["name"] for tool in trl_environment(Several)().tools]
    assert names == ["again", "increment", "rules"]
    row = roll(trl_environment(Several), [call("again") + call("rules"), "."])
    assert contents(row)[2:4] == ["1", "none"]


def test_the_prompt_is_the_one_that_trl_renders(roll: Roll) -> None:
    env = WordEnv()
    text = "Play." + str(env.reset(prompt=QUESTION, word="tea"))
    rendered = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": text}], tools=[env.guess], add_generation_prompt=True, return_dict=False
    )
    assert roll(trl_environment(WordEnv), ["."], prompt=row_prompt(word="tea"))["prompt_ids"] == rendered


def test_trls_own_harbor_environment_works_as_it_is(roll: Roll) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        harbor = pytest.importorskip("trl.experimental.harbor._env")

    class Shell:
        async def exec(self, command: str, timeout_sec: int) -> Any:
            return SimpleNamespace(stdout=f"{command}: ok", stderr="", return_code=0)

        async def stop(self, delete: bool) -> None: ...

    class WithoutContainers(harbor.HarborBashEnv):
        async def _start(self, task_dir: str) -> str:
            self._env = Shell()
            return f"Solve {task_dir}."

        async def _verify(self) -> float:
            return 0.25

    row = roll(
        trl_environment(WithoutContainers), [call("bash", command="ls"), "."], prompt=row_prompt("", task_dir="t1")
    )
    assert contents(row)[0].startswith("Solve t1.\n\nYou have a single `bash` tool")
    assert (contents(row)[2], row["env_reward"]) == ("ls: ok", 0.25)


def test_an_observation_of_text_parts_follows_a_text(roll: Roll) -> None:
    class Parts(CounterEnv):
        def reset(self, **kwargs: Any) -> Any:
            super().reset()
            return [{"type": "text", "text": " Now."}]

    assert contents(roll(trl_environment(Parts), ["."]))[0] == "Play. Now."


def test_an_error_of_a_method_is_told_to_the_model(roll: Roll) -> None:
    guess = call("guess", guess="crane")
    row = roll(trl_environment(WordEnv), [guess, guess, call("guess", gues="x"), call("peek"), "."])
    assert contents(row)[4] == "Error: ValueError: Game over."
    assert contents(row)[6].startswith("Error: guess has no argument gues.")
    assert contents(row)[8].startswith("Error: there is no tool 'peek'.")
    assert [report["error"] for report in row["tool_calls"]] == [
        None,
        "exception",
        "invalid_arguments",
        "unknown_tool",
    ]


class SlowEnv(CounterEnv):
    def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        self._count += 1
        time.sleep(seconds)
        return f"{self._count}"

    async def sleep(self, seconds: float) -> str:
        """Sleep.

        Args:
            seconds: How long.
        """
        self._count += 1
        await asyncio.sleep(seconds)
        return f"{self._count}"


def test_sync_methods_of_a_turn_run_one_after_the_other_in_order(roll: Roll) -> None:
    row = roll(
        trl_environment(SlowEnv),
        [call("wait", seconds=0.02) + call("wait", seconds=0.01) + call("wait", seconds=0.0), "."],
    )
    assert contents(row)[2:5] == ["1", "2", "3"]


def test_async_methods_of_a_turn_run_at_the_same_time(roll: Roll) -> None:
    row = roll(trl_environment(SlowEnv), [call("sleep", seconds=0.02) + call("sleep", seconds=0.02), "."])
    assert contents(row)[2:4] == ["2", "2"]


def test_a_call_given_up_while_it_waited_is_not_run(roll: Roll) -> None:
    row = roll(
        trl_environment(SlowEnv, tool_timeout_s=0.6),
        [call("wait", seconds=0.9) + call("increment", step=100), "."],
    )
    assert [report["error"] for report in row["tool_calls"]] == ["timeout", "timeout"]
    assert contents(row)[2] == "Error: wait took longer than 0.6 seconds and was given up."
    assert row["env_reward"] == 1.0  # read behind the first, without the second


def test_an_instance_stays_in_the_thread_that_made_it(roll: Roll) -> None:
    class Database:
        def __init__(self) -> None:
            self._rows = sqlite3.connect(":memory:")

        def reset(self, **kwargs: Any) -> None: ...

        def query(self, text: str) -> str:
            """Query.

            Args:
                text: The SQL.
            """
            return str(self._rows.execute(text).fetchone()[0])

        def get_reward(self) -> float:
            return float(self.query("select 2"))

    row = roll(trl_environment(Database), [call("query", text="select 1"), "."])
    assert (contents(row)[2], row["env_reward"]) == ("1", 2.0)


def test_an_instance_is_made_once_and_reset_often(roll: Roll) -> None:
    made = []

    class Counted(CounterEnv):
        def __init__(self) -> None:
            made.append(self)

    factory = trl_environment(Counted)
    assert [roll(factory, [call("increment", step=step), "."])["env_reward"] for step in (1, 2)] == [1.0, 2.0]
    assert len(made) == 1


def test_trajectories_at_a_time_have_an_instance_each(roll: Roll) -> None:
    made: list[CounterEnv] = []

    class Counted(CounterEnv):
        def __init__(self) -> None:
            made.append(self)

    factory = trl_environment(Counted)

    async def two() -> list[float]:
        envs: list[Any] = [factory(), factory()]
        for env in envs:
            await env.reset(QUESTION)
        for env, step in zip(envs, (1, 2), strict=True):
            function = {"name": "increment", "arguments": {"step": step}}
            await env.step({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
        rewards = [await env.final_reward() for env in envs]
        for env in envs:
            await env.close()
        return rewards

    assert asyncio.run(two()) == [1.0, 2.0]
    assert len(made) == 2


def test_an_instance_with_a_call_that_was_given_up_is_not_used_again(roll: Roll) -> None:
    made = []

    class Counted(SlowEnv):
        def __init__(self) -> None:
            made.append(self)

    factory = trl_environment(Counted, tool_timeout_s=0.05)
    for seconds in (0.2, 0.0):
        roll(factory, [call("sleep", seconds=seconds), "."])
    assert len(made) == 2


def test_an_instances_thread_ends_with_the_factory(roll: Roll) -> None:
    threads = []

    class Threaded(CounterEnv):
        def __init__(self) -> None:
            threads.append(threading.current_thread())

    factory: Any = trl_environment(Threaded)

    async def one(factory: Any) -> None:
        env = factory()
        await env.reset(QUESTION)
        await env.close()

    asyncio.run(one(factory))
    assert threads[0].is_alive()
    del factory
    threads[0].join(5)
    assert not threads[0].is_alive()


def test_a_trajectory_that_a_limit_cuts_short_has_the_reward_that_it_earned(roll: Roll) -> None:
    steps = [call("increment", step=3), call("increment", step=-1)]
    row = roll(trl_environment(CounterEnv), steps, max_turns=2)
    assert (row["stop_reason"], row["step_rewards"], row["env_reward"]) == ("max_turns", [0.0, 2.0], 2.0)


def test_a_reward_behind_a_call_that_hangs_fails_its_trajectory_in_time(roll: Roll) -> None:
    started = time.monotonic()
    with pytest.raises(RolloutError, match="the reward of SlowEnv could not be read within tool_timeout_s=0.2"):
        roll(trl_environment(SlowEnv, tool_timeout_s=0.2), [call("wait", seconds=2.0), "."])
    assert time.monotonic() - started < 1.5


def test_a_class_without_a_reward_gives_none_and_that_is_said(roll: Roll, caplog: pytest.LogCaptureFixture) -> None:
    class Echo:
        def reset(self, **kwargs: Any) -> None: ...

        def echo(self, message: str) -> str:
            """Echo.

            Args:
                message: What to say.
            """
            return message

    with caplog.at_level(logging.WARNING):
        assert roll(trl_environment(Echo), [call("echo", message="hi"), "."])["env_reward"] == 0.0
    assert "Echo has neither get_reward() nor an attribute reward" in caplog.text


def test_a_reward_that_cannot_be_read_fails_its_trajectory(roll: Roll) -> None:
    class Judged(CounterEnv):
        def get_reward(self) -> float:
            raise LookupError("no judge")

    with pytest.raises(RolloutError, match="the reward of Judged cannot be read: LookupError: no judge"):
        roll(trl_environment(Judged), ["."])


def test_columns_that_reset_needs_and_does_not_get_stop_the_run_with_their_names(roll: Roll) -> None:
    class Strict(CounterEnv):
        def reset(self, prompt: Any, secret: str) -> None:
            super().reset()

    with pytest.raises(SetupError, match=r"cannot be called with the row's prompt: missing .* 'secret'"):
        roll(trl_environment(Strict), ["."])
    assert roll(trl_environment(Strict), ["."], prompt=row_prompt(secret="x"))["env_reward"] == 0.0


def test_a_reset_that_returns_no_text_is_an_error_with_what_it_returned(roll: Roll) -> None:
    class Wrong(CounterEnv):
        def reset(self, **kwargs: Any) -> Any:
            return 5

    with pytest.raises(RolloutError, match="reset returned 5; it must return a text, or None"):
        roll(trl_environment(Wrong), ["."])


def test_an_observation_for_a_prompt_that_is_a_string_is_refused(roll: Roll) -> None:
    with pytest.raises(SetupError, match="Use prompts that are lists of messages"):
        roll(trl_environment(WordEnv), ["."], prompt="Play.")


class NoReset:
    def guess(self) -> None:
        """Guess."""


class NoMethod:
    def reset(self, **kwargs: Any) -> None: ...


class NoHints(NoMethod):
    def guess(self, word) -> str:
        """Guess.

        Args:
            word: A word.
        """
        return str(word)


class NoDocstring(NoMethod):
    def close(self) -> None: ...


def broken() -> None:
    raise OSError("no server")


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (WordEnv(), "takes a class, or a function without arguments .* not <.*WordEnv object"),
        (NoReset, "NoReset has no method reset"),
        (NoMethod, "NoMethod has no public method"),
        (NoHints, "NoHints: The tool guess cannot be described to the model: .* word .* type hint"),
        (NoDocstring, "NoDocstring: The tool close cannot be described.* docstring.*begins with _"),
        (functools.partial(NoMethod), "NoMethod has no public method"),
        (broken, "environment_factory failed: OSError: no server"),
    ],
)
def test_what_cannot_work_is_refused_at_once(factory: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        trl_environment(factory)


def test_the_capacity_of_the_class_is_that_of_the_rollout() -> None:
    class Few(CounterEnv):
        max_concurrency = 3

    assert getattr(trl_environment(Few), "max_concurrency", None) == 3


def test_a_reward_that_is_none_fails_its_trajectory(roll: Roll) -> None:
    class Unsure(CounterEnv):
        def get_reward(self) -> None:  # type: ignore[override]
            return None

    with pytest.raises(RolloutError, match=r"Unsure gave no reward \(None\)"):
        roll(trl_environment(Unsure), ["."])
