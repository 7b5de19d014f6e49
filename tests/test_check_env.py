"""`check_env` lets a right environment pass, and says of each wrong one what is wrong with it."""

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trl_rollouts import SetupError, StepResult
from trl_rollouts.testing import check_env
from trl_rollouts.testing.env_checks import CHECKS
from trl_rollouts.tools import Tool, ToolEnv

ACTIONS = ("one", "two", "three")


class CountEnv:
    """Counts the model's turns, and ends with the third."""

    def reset(self, prompt: list[Any]) -> Any:
        self.count = 0
        return [{"role": "system", "content": "Count."}, *prompt] if "is_rendered" not in prompt[0] else prompt

    def step(self, action: Any) -> Any:
        self.count += 1
        return StepResult([{"role": "user", "content": str(self.count)}], reward=0.5, terminated=self.count >= 3)

    def close(self) -> None:
        pass


class AsyncEnv(CountEnv):
    async def reset(self, prompt: list[Any]) -> Any:
        return super().reset(prompt)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0.2)
        return super().step(action)

    async def close(self) -> None:
        pass


def failures_of(env_factory: Callable[[], Any], **options: Any) -> dict[str, str]:
    """What is said, by the name of the check."""
    with pytest.raises(AssertionError) as caught:
        check_env(env_factory, **{"actions": ACTIONS} | options)
    first, *lines = str(caught.value).splitlines()
    assert f"fails {len(lines)} of" in first
    return dict(line.strip().split(": ", 1) for line in lines)


def stepping(result: Callable[[], Any]) -> type[CountEnv]:
    """An environment whose step returns this, and which is right otherwise."""

    class Stepping(CountEnv):
        def step(self, action: Any) -> Any:
            return result()

    return Stepping


def say(**fields: Any) -> StepResult:
    return StepResult([{"role": "user", "content": "go on"}], **fields)


# Right ones


def test_a_right_environment_passes_every_check() -> None:
    names = [check.__name__ for check in CHECKS if check.__name__ != "no_async_method_holds_the_event_loop"]
    assert check_env(CountEnv, actions=ACTIONS) == names


def test_a_right_async_environment_passes_every_check() -> None:
    assert check_env(AsyncEnv, actions=ACTIONS[:1])[-1] == "close_works_without_a_reset"
    assert "no_async_method_holds_the_event_loop" in check_env(AsyncEnv, actions=ACTIONS[:1])


def test_the_tool_environment_passes_with_calls_as_actions() -> None:
    def double(number: int) -> int:
        """Double.

        Args:
            number: Which one.
        """
        return 2 * number

    function = {"name": "double", "arguments": {"number": 2}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    passed = check_env(lambda: ToolEnv([Tool(double)], timeout_s=5.0), actions=[call, "It is 4."])
    assert len(passed) == len(CHECKS)


def test_what_the_episodes_did_not_come_to_is_not_among_the_names() -> None:
    assert "an_episode_that_has_ended_does_not_go_on" not in check_env(CountEnv, actions=ACTIONS[:2])


def test_it_works_where_an_event_loop_runs() -> None:
    async def cell() -> list[str]:
        return check_env(CountEnv)

    assert asyncio.run(cell())


def test_an_environment_that_refuses_strings_or_says_its_own_is_right() -> None:
    class Own(CountEnv):
        def reset(self, prompt: list[Any]) -> Any:
            super().reset(prompt)
            return [{"role": "user", "content": "Begin."}]

    class Refusing(CountEnv):
        def reset(self, prompt: list[Any]) -> Any:
            if "is_rendered" in prompt[0]:
                raise ValueError("messages, please")
            return super().reset(prompt)

    for env_factory in (Own, Refusing):
        assert "a_prompt_that_is_a_string_is_returned_as_it_is" not in check_env(env_factory)


def test_an_environment_that_is_random_on_purpose_is_not_compared() -> None:
    def roll() -> Any:
        return say(reward=random.random())

    assert "the_same_actions_give_the_same_episode" in failures_of(stepping(roll))
    passed = check_env(stepping(roll), actions=ACTIONS, is_deterministic=False)
    assert "the_same_actions_give_the_same_episode" not in passed


# Making


def test_a_factory_that_needs_arguments_is_told() -> None:
    said = failures_of(lambda: (lambda size: size)())  # type: ignore[misc]
    assert list(said) == ["it_can_be_made_without_arguments"]
    assert "missing 1 required positional argument: 'size'" in said["it_can_be_made_without_arguments"]


def test_missing_methods_are_named() -> None:
    class Only:
        def reset(self, prompt: Any) -> Any:
            return prompt

    said = failures_of(Only)
    assert said == {"it_has_reset_step_and_close": "Only has no method step, close. An Env has reset, step and close."}


def test_one_instance_for_all_trajectories_is_told() -> None:
    env = CountEnv()
    said = failures_of(lambda: env)
    assert "one instance twice" in said["every_trajectory_has_an_instance_of_its_own"]


@pytest.mark.parametrize(("factory", "actions"), [("CountEnv", ["a"]), (CountEnv, "a"), (CountEnv(), ["a"])])
def test_an_argument_that_cannot_work_is_refused(factory: Any, actions: Any) -> None:
    with pytest.raises(SetupError):
        check_env(factory, actions=actions)


# Coming back


def test_a_step_that_raises_is_told_with_its_action() -> None:
    class Raising(CountEnv):
        def step(self, action: Any) -> Any:
            if action["content"] == "two":
                raise KeyError("no such move")
            return super().step(action)

    said = failures_of(Raising)
    assert list(said) == ["reset_and_step_do_not_raise"]
    assert said["reset_and_step_do_not_raise"].startswith("step raised KeyError: 'no such move' (test_check_env.py:")


def test_an_observation_with_the_models_role_is_told_where_it_is_made() -> None:
    said = failures_of(stepping(lambda: StepResult([{"role": "assistant", "content": "me"}])))
    assert 'a message with role "assistant"; only the model' in said["reset_and_step_do_not_raise"]


def test_an_observation_with_the_models_role_is_told_where_it_is_added_later() -> None:
    def spoilt() -> Any:
        result = say()
        result.messages.append({"role": "assistant", "content": "me"})
        return result

    said = failures_of(stepping(spoilt))
    assert list(said) == ["observations_are_messages_and_not_the_models"]


def test_a_step_that_hangs_is_told_and_hangs_nobody() -> None:
    started_at = time.monotonic()
    said = failures_of(stepping(lambda: time.sleep(3)), timeout_s=0.3)
    assert list(said) == ["every_call_comes_back"]
    assert "step did not come back within timeout_s=0.3" in said["every_call_comes_back"]
    assert time.monotonic() - started_at < 2


def test_an_async_step_that_blocks_the_event_loop_for_good_is_told_and_hangs_nobody() -> None:
    class Blocking(CountEnv):
        async def step(self, action: Any) -> Any:
            time.sleep(3)

    said = failures_of(Blocking, timeout_s=0.3)
    assert "step blocks the event loop" in said["every_call_comes_back"]


def test_an_async_method_that_sleeps_without_await_is_told() -> None:
    class Sleeping(CountEnv):
        async def reset(self, prompt: list[Any]) -> Any:
            time.sleep(0.3)
            return super().reset(prompt)

    said = failures_of(Sleeping)
    assert list(said) == ["no_async_method_holds_the_event_loop"]
    assert "async def reset kept the event loop for 0." in said["no_async_method_holds_the_event_loop"]


def test_an_async_method_that_is_slow_only_once_is_not_told() -> None:
    warm = []

    class Importing(AsyncEnv):
        async def reset(self, prompt: list[Any]) -> Any:
            if not warm:
                time.sleep(0.3)
                warm.append(True)
            return await super().reset(prompt)

    assert "no_async_method_holds_the_event_loop" in check_env(Importing)


# What reset gives


def opening_with(make: Callable[[list[Any]], Any]) -> dict[str, str]:
    class Opening(CountEnv):
        def reset(self, prompt: list[Any]) -> Any:
            super().reset(prompt)
            return make(prompt)

    return failures_of(Opening)


@pytest.mark.parametrize("opening", [None, [], "Begin.", [{"content": "no role"}]])
def test_an_opening_that_is_no_messages_is_told(opening: Any) -> None:
    said = opening_with(lambda prompt: opening)
    assert list(said) == ["reset_gives_the_opening_messages"]
    assert "env.reset must return the opening messages" in said["reset_gives_the_opening_messages"]


def test_an_opening_that_ends_with_the_models_words_is_told() -> None:
    said = opening_with(lambda prompt: [{"role": "assistant", "content": "Hello!"}])
    assert list(said) == ["the_opening_leaves_the_turn_to_the_model"]


def test_a_prompt_that_is_changed_is_told() -> None:
    class Changing(CountEnv):
        def reset(self, prompt: list[Any]) -> Any:
            prompt[0].pop("task", None)
            return super().reset(prompt)

    said = failures_of(Changing, prompt=[{"role": "user", "content": "3?", "task": {"answer": 3}}])
    assert list(said) == ["reset_leaves_its_prompt_as_it_was"]


def test_a_string_that_is_added_to_is_told() -> None:
    said = opening_with(lambda prompt: [{"role": "system", "content": "Count."}, *prompt])
    assert list(said) == ["a_prompt_that_is_a_string_is_returned_as_it_is"]


# What step gives


@pytest.mark.parametrize("result", [None, "text", {"messages": []}, ([], 1.0, True, {})])
def test_a_step_that_is_no_step_result_is_told(result: Any) -> None:
    said = failures_of(stepping(lambda: result))
    assert said["step_gives_a_step_result"].startswith(f"step returned {type(result).__name__}, ")


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (float("nan"), "the reward nan"),
        (float("inf"), "the reward inf"),
        (None, "type NoneType"),
        ("1.0", "type str"),
        (np.array(1.0), "type numpy.ndarray"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_told(reward: Any, words: str) -> None:
    said = failures_of(stepping(lambda: say(reward=reward)))
    assert list(said) == ["rewards_are_finite_numbers"]
    assert words in said["rewards_are_finite_numbers"]


def test_a_final_reward_that_is_no_finite_number_or_raises_is_told() -> None:
    class Unscored(CountEnv):
        def final_reward(self) -> Any:
            return None

    class Judged(CountEnv):
        def final_reward(self) -> float:
            raise LookupError("no judge")

    said = failures_of(Unscored)
    assert list(said) == ["rewards_are_finite_numbers"]
    assert "final_reward returned a reward of type NoneType" in said["rewards_are_finite_numbers"]
    said = failures_of(Judged)
    assert "final_reward raised LookupError: no judge (test_check_env.py:" in said["reset_and_step_do_not_raise"]


def test_a_reward_that_is_a_tensor_is_told() -> None:
    torch = pytest.importorskip("torch")
    said = failures_of(stepping(lambda: say(reward=torch.tensor(1.0))))
    assert "a reward of type torch.Tensor" in said["rewards_are_finite_numbers"]


@pytest.mark.parametrize("reward", [1, True, np.float32(1.0), np.float64(1.0)])
def test_any_number_is_a_reward(reward: Any) -> None:
    assert "rewards_are_finite_numbers" in check_env(stepping(lambda: say(reward=reward)))


def test_a_step_without_message_and_end_is_told() -> None:
    assert list(failures_of(stepping(StepResult))) == ["a_step_ends_the_episode_or_says_something"]


@pytest.mark.parametrize("info", [{"tool_calls": [{"result": object()}]}, {"tool_calls": {"name": "f"}}, None])
def test_an_info_that_no_transcript_can_hold_is_told(info: Any) -> None:
    assert list(failures_of(stepping(lambda: say(info=info)))) == ["info_is_a_dict_and_its_tool_calls_are_plain_data"]


@pytest.mark.parametrize(
    "tools", [[print], "search", [{"type": "function"}], [{"name": "f", "parameters": {1: set()}}]]
)
def test_tools_that_are_no_schemas_are_told(tools: Any) -> None:
    class Offering(CountEnv):
        def reset(self, prompt: list[Any]) -> Any:
            self.tools = tools
            return super().reset(prompt)

    assert list(failures_of(Offering)) == ["tools_are_schemas"]


def test_an_episode_that_goes_on_after_its_end_is_told() -> None:
    class Exact(CountEnv):
        def step(self, action: Any) -> Any:
            result = super().step(action)
            result.terminated = self.count == 3
            return result

    said = failures_of(Exact)
    assert list(said) == ["an_episode_that_has_ended_does_not_go_on"]


# Several episodes


def test_state_that_an_instance_leaves_behind_is_told() -> None:
    class Remembering(CountEnv):
        seen: list[Any] = []  # noqa: RUF012 (the fault)

        def reset(self, prompt: list[Any]) -> Any:
            self.seen.append(prompt)
            return [*super().reset(prompt)[:1], {"role": "user", "content": f"game {len(self.seen)}"}]

    said = failures_of(Remembering)
    assert "reset gave" in said["the_same_actions_give_the_same_episode"]
    assert "game 2" in said["the_same_actions_give_the_same_episode"]


def test_a_global_random_generator_is_told_though_it_is_seeded() -> None:
    class Seeding(CountEnv):
        def reset(self, prompt: list[Any]) -> Any:
            random.seed(0)
            return super().reset(prompt)

        def step(self, action: Any) -> Any:
            return say(reward=random.random())

    said = failures_of(Seeding)
    assert list(said) == ["episodes_at_the_same_time_do_not_touch_each_other"]
    assert "random.Random(seed)" in said["episodes_at_the_same_time_do_not_touch_each_other"]


# Close


class Held:
    def __init__(self) -> None:
        self.is_open = True

    def release(self) -> None:
        if not self.is_open:
            raise RuntimeError("released twice")
        self.is_open = False


def test_a_close_that_raises_is_told() -> None:
    class Failing(CountEnv):
        def close(self) -> None:
            raise OSError("busy")

    assert failures_of(Failing)["close_does_not_raise"].startswith("close raised OSError: busy (test_check_env.py:")


def test_a_close_that_works_once_only_is_told() -> None:
    class Once(CountEnv):
        def __init__(self) -> None:
            self.held = Held()

        def close(self) -> None:
            self.held.release()

    assert list(failures_of(Once)) == ["close_may_be_called_twice"]


def test_a_close_that_needs_a_reset_is_told() -> None:
    class Late(CountEnv):
        def close(self) -> None:
            self.count += 1

    assert list(failures_of(Late)) == ["close_works_without_a_reset"]


def test_every_check_is_listed_once_under_a_name_that_says_what_is_owed() -> None:
    from trl_rollouts.testing import env_checks

    written = [
        one
        for name, one in vars(env_checks).items()
        if callable(one) and not name.startswith("_") and getattr(one, "__annotations__", {}).get("plays")
    ]
    assert written == CHECKS


def test_an_environment_of_which_there_may_be_one_at_a_time_is_not_played_beside_another() -> None:
    taken = []

    class Single(CountEnv):
        max_concurrency = 1

        def reset(self, prompt: list[Any]) -> Any:
            assert not taken, "there are two"
            taken.append(self)
            return super().reset(prompt)

        def close(self) -> None:
            if self in taken:
                taken.remove(self)

    assert "episodes_at_the_same_time_do_not_touch_each_other" not in check_env(Single, actions=ACTIONS)


def test_what_raised_is_told_with_its_place() -> None:
    class Raising(CountEnv):
        def step(self, action: Any) -> Any:
            raise ZeroDivisionError("nothing")

    said = failures_of(Raising)["reset_and_step_do_not_raise"]
    assert "step raised ZeroDivisionError: nothing (test_check_env.py:" in said
    assert " in step)" in said
