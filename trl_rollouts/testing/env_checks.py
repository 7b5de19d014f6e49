"""The checks of `check_env`, one function each. Its name says what is owed."""

import json
import math
import numbers
from collections.abc import Callable, Iterator
from typing import Any

from ..env import StepResult, checked_opening
from ..errors import EnvError
from .env_plays import NOT_BACK, RENDERED, Play, Plays

MAX_LAG_S = 0.1
"""An async method that keeps the event loop for longer delays every other trajectory."""

Check = Callable[[Plays], None]


class NotSeenError(Exception):
    """The episodes did not come to what is checked."""


# That it can be played


def it_can_be_made_without_arguments(plays: Plays) -> None:
    if plays.hang is not None:
        raise NotSeenError
    error = next((play.failed_to_make for play in plays.all if play.failed_to_make), None)
    _owe(error is None, f"env_factory() failed: {error}. Give a class or a function that needs no argument.")


def it_has_reset_step_and_close(plays: Plays) -> None:
    env, missing = _made(plays).env, _made(plays).missing
    _owe(not missing, f"{type(env).__name__} has no method {', '.join(missing)}. An Env has reset, step and close.")


def every_trajectory_has_an_instance_of_its_own(plays: Plays) -> None:
    if plays.alone.env is None or plays.again.env is None:
        raise NotSeenError
    _owe(
        plays.alone.env is not plays.again.env,
        "env_factory() returned one instance twice, which trajectories at the same time would share. Make a new one "
        "in it, or give the class.",
    )


def every_call_comes_back(plays: Plays) -> None:
    _owe(
        plays.hang is None,
        f"{plays.hang}, so nothing was tried after it. Give what the method waits for a time limit of its own.",
    )


def reset_and_step_do_not_raise(plays: Plays) -> None:
    played = [play for play in plays.all if play is not plays.rendered]
    calls = [call for play in played for call in play.calls if call.name != "close"]
    for call in (call for call in calls if call.error not in (None, NOT_BACK)):
        given = f" at the action {call.given!r:.200}" if call.name == "step" else ""
        _owe(False, f"{call.name} raised {call.error}{given}. A trajectory whose environment raises trains nothing.")
    _played(plays)


def no_async_method_holds_the_event_loop(plays: Plays) -> None:
    lags: dict[str, list[float]] = {}
    for play in plays.all:
        for name in {call.name for call in play.calls if call.is_async}:
            lags.setdefault(name, []).append(max(call.lag_s for call in play.calls if call.name == name))
    lasting = {name: min(seen) for name, seen in lags.items() if len(seen) > 1}
    if not lasting:
        raise NotSeenError
    for (
        name,
        lag_s,
    ) in lasting.items():  # the smallest of several plays: a first import, or a busy machine, is no fault
        _owe(
            lag_s < MAX_LAG_S,
            f"async def {name} kept the event loop for {lag_s:.2f} s, in which no other trajectory moves. Await what "
            f"it waits for, or write it as a plain def {name}, which runs in a thread.",
        )


# What reset gives


def reset_gives_the_opening_messages(plays: Plays) -> None:
    for opening in _openings(plays):
        try:
            checked_opening(opening)
        except EnvError as error:
            _owe(False, f"{error} An env that adds nothing returns prompt.")


def the_opening_leaves_the_turn_to_the_model(plays: Plays) -> None:
    opening = checked_opening(_openings(plays)[0])
    added = opening[-1] not in plays.alone.prompt
    _owe(
        opening[-1]["role"] != "assistant" or not added,
        f"reset ends with a message of role assistant, {opening[-1]!r:.200}, which the model would go on with instead "
        'of answering. What the environment says is of role "user" or "system".',
    )


def reset_leaves_its_prompt_as_it_was(plays: Plays) -> None:
    for play in _reset(plays):
        left = play.calls[0].given
        _owe(
            left == play.prompt,
            f"reset changed the prompt it was given, from {play.prompt!r:.200} to {left!r:.200}. Return a new list: "
            "[*prompt, message], and {**message, ...} for a message.",
        )


def a_prompt_that_is_a_string_is_returned_as_it_is(plays: Plays) -> None:
    opening, given = next(iter(plays.rendered.results("reset")), None), plays.rendered.prompt
    if RENDERED not in str(opening):  # it refuses such a prompt, or says its own in any case, which the loop refuses
        raise NotSeenError
    plain = [{key: value for key, value in message.items() if key != "is_rendered"} for message in given]
    _owe(
        opening in (given, plain),
        f"reset made {opening!r:.200} of a prompt that is a string. Such a prompt, a message with "
        '"is_rendered": True, has no roles to add to: return it unchanged, or raise an error that says that your '
        "environment needs messages.",
    )


# What step gives


def step_gives_a_step_result(plays: Plays) -> None:
    for step in _steps(plays, of_any_type=True):
        _owe(
            isinstance(step, StepResult),
            f"step returned {type(step).__name__}, {step!r:.200}. Return a trl_rollouts.StepResult(messages, "
            "reward=..., terminated=...).",
        )


def observations_are_messages_and_not_the_models(plays: Plays) -> None:
    for step in _steps(plays):
        try:
            step.check_messages()
        except ValueError as error:
            _owe(False, f'{error} An observation is such as {{"role": "user", "content": "..."}}.')


def rewards_are_finite_numbers(plays: Plays) -> None:
    rewards = [("step", step.reward) for step in _steps(plays)]
    rewards += [("final_reward", reward) for play in plays.all for reward in play.results("final_reward")]
    for name, reward in rewards:
        is_number = isinstance(reward, numbers.Real)
        kind = f"{type(reward).__module__}.{type(reward).__qualname__}".removeprefix("builtins.")
        _owe(is_number, f"{name} returned a reward of type {kind}, {reward!r:.100}. Return a float.")
        _owe(math.isfinite(reward), f"{name} returned the reward {reward}, from which nothing can be learned.")


def a_step_ends_the_episode_or_says_something(plays: Plays) -> None:
    for step in _steps(plays):
        _owe(
            bool(step.messages) or step.inline is not None or bool(step.terminated or step.truncated),
            f"step returned no message and no end, {step!r:.200}, so the model has nothing to answer. Return a "
            "message, or terminated=True.",
        )


def info_is_a_dict_and_its_tool_calls_are_plain_data(plays: Plays) -> None:
    for step in _steps(plays):
        _owe(isinstance(step.info, dict), f"step returned info={step.info!r:.200}. It must be a dict.")
        calls = step.info.get("tool_calls", [])
        is_plain = isinstance(calls, list) and all(isinstance(call, dict) for call in calls) and _is_json(calls)
        _owe(
            is_plain,
            f'step returned info["tool_calls"]={calls!r:.200}. It must be a list of dicts that JSON can hold (texts, '
            "numbers, lists, dicts), since it goes into transcripts and to reward functions.",
        )


def tools_are_schemas(plays: Plays) -> None:
    tools = next((play.tools for play in _reset(plays)), None)
    _owe(tools is None or isinstance(tools, list | tuple), f"tools is {tools!r:.200}. It must be a list of schemas.")
    for tool in tools or []:
        function = tool.get("function", tool) if isinstance(tool, dict) else {}
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        _owe(
            is_named and isinstance(function.get("parameters", {}), dict) and _is_json(tool),
            f"tools has {tool!r:.200}, which is no schema. transformers.utils.get_json_schema(function) makes one.",
        )


def an_episode_that_has_ended_does_not_go_on(plays: Plays) -> None:
    after = plays.again.after_the_end
    if after is None:
        raise NotSeenError
    step = after.result
    _owe(
        after.error is not None or bool(getattr(step, "terminated", 0) or getattr(step, "truncated", 0)),
        f"after the end, the same action once more gave {step!r:.200}, without an end. A condition such as "
        "turn == limit may have to be turn >= limit.",
    )


# Several episodes


def the_same_actions_give_the_same_episode(plays: Plays) -> None:
    difference = _difference(_played(plays), plays.again)
    _owe(
        difference is None,
        f"a second instance, given the same prompt and actions, differs from the first: {difference}. The members of "
        "a group have one prompt and are compared with each other, so they must face one task: make what is random "
        "from a seed in the row's task, and keep no state outside of the instance. If it is meant to be random: "
        "check_env(..., is_deterministic=False).",
    )


def episodes_at_the_same_time_do_not_touch_each_other(plays: Plays) -> None:
    if _difference(_played(plays), plays.again) is not None:
        raise NotSeenError
    if not plays.one.calls:  # its kind allows one at a time
        raise NotSeenError
    for play in (plays.one, plays.other):
        difference = _difference(plays.alone, play)
        _owe(
            difference is None,
            f"an instance differs when another one is stepped in turns with it: {difference}. They share something, "
            "such as an attribute of the class, a global, Python's or NumPy's global random generator, or what a "
            "second close gave back once more. Keep it in self, and draw from random.Random(seed).",
        )


# Close


def close_does_not_raise(plays: Plays) -> None:
    error = _closed(plays.alone, 1)
    _owe(error is None, f"close raised {error}. What the episode holds may then stay open, once a trajectory.")


def close_may_be_called_twice(plays: Plays) -> None:
    _closed(plays.alone, 1)
    error = _closed(plays.alone, 2)
    _owe(error is None, f"close raised {error} when it was called a second time. Let that do nothing.")


def close_works_without_a_reset(plays: Plays) -> None:
    error = _closed(plays.unused, 1)
    _owe(error is None, f"close raised {error} before any reset. It is called as well when reset has failed.")


CHECKS: list[Check] = [
    it_can_be_made_without_arguments,
    it_has_reset_step_and_close,
    every_trajectory_has_an_instance_of_its_own,
    every_call_comes_back,
    reset_and_step_do_not_raise,
    no_async_method_holds_the_event_loop,
    reset_gives_the_opening_messages,
    the_opening_leaves_the_turn_to_the_model,
    reset_leaves_its_prompt_as_it_was,
    a_prompt_that_is_a_string_is_returned_as_it_is,
    step_gives_a_step_result,
    observations_are_messages_and_not_the_models,
    rewards_are_finite_numbers,
    a_step_ends_the_episode_or_says_something,
    info_is_a_dict_and_its_tool_calls_are_plain_data,
    tools_are_schemas,
    an_episode_that_has_ended_does_not_go_on,
    the_same_actions_give_the_same_episode,
    episodes_at_the_same_time_do_not_touch_each_other,
    close_does_not_raise,
    close_may_be_called_twice,
    close_works_without_a_reset,
]
COMPARISONS: list[Check] = [the_same_actions_give_the_same_episode, episodes_at_the_same_time_do_not_touch_each_other]


def _owe(is_so: bool, sentence: str) -> None:
    if not is_so:
        raise AssertionError(sentence)


def _made(plays: Plays) -> Play:
    if plays.alone.env is None:
        raise NotSeenError
    return plays.alone


def _reset(plays: Plays) -> list[Play]:
    played = [play for play in (plays.alone, plays.again, plays.one, plays.other) if play.results("reset")]
    if not played:
        raise NotSeenError
    return played


def _openings(plays: Plays) -> list[Any]:
    return [play.results("reset")[0] for play in _reset(plays)]


def _steps(plays: Plays, of_any_type: bool = False) -> Iterator[Any]:
    steps = [step for play in plays.all for step in play.results("step")]
    steps = [step for step in steps if of_any_type or isinstance(step, StepResult)]
    if not steps:
        raise NotSeenError
    yield from steps


def _played(plays: Plays) -> Play:
    """The first play, where there is a whole one."""
    if plays.hang or not plays.alone.results("reset") or any(play.failed_to_make for play in plays.all):
        raise NotSeenError
    return plays.alone


def _closed(play: Play, count: int) -> str | None:
    """What the first or second call of close raised."""
    calls = [call for call in play.calls if call.name == "close"]
    if len(calls) < count:
        raise NotSeenError
    return calls[count - 1].error


def _difference(one: Play, other: Play) -> str | None:
    """The first call of which they did not give the same."""
    pairs = zip(one.calls, other.calls, strict=False)
    for index, (mine, theirs) in enumerate((a, b) for a, b in pairs if a.name == b.name != "close"):
        seen = [call.error or _said(call.result) for call in (mine, theirs)]
        if seen[0] != seen[1]:
            which = f"step {index}" if mine.name == "step" else mine.name
            return f"{which} gave {seen[1]:.200} after {seen[0]:.200}"
    return None


def _said(result: Any) -> str:
    if isinstance(result, StepResult):
        result = {name: getattr(result, name) for name in ("messages", "reward", "terminated", "truncated", "inline")}
    return json.dumps(result, default=str)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
