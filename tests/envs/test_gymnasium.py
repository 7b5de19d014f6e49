"""Gymnasium's own environments, from their first observation to the row, with scripted completions."""

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium")

from trl_rollouts import SetupError, env_reward, env_rollout  # noqa: E402
from trl_rollouts.env import EnvFactory  # noqa: E402
from trl_rollouts.envs.gymnasium import gymnasium_env  # noqa: E402
from trl_rollouts.rollout import Rollout  # noqa: E402
from trl_rollouts.testing import ScriptedClient, byte_tokenizer, fake_trainer  # noqa: E402

TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "user", "content": "Play.", "task": {"seed": 0}}]
NAMES = ["left", "down", "right", "up"]
LAKE = {"render_mode": "ansi", "is_slippery": False}

Roll = Callable[..., dict[str, Any]]


@pytest.fixture
def roll() -> Iterator[Roll]:
    rollouts: list[Rollout] = []

    def run(env_factory: EnvFactory, replies: list[str], *, prompt: Any = QUESTION) -> Any:
        client = ScriptedClient(replies, tokenizer=TOKENIZER, max_model_len=None)
        rollouts.append(env_rollout(env_factory, max_turns=len(replies), client=client))
        batch = rollouts[-1]([prompt], fake_trainer(TOKENIZER, max_completion_length=4000))
        return {name: column[0] for name, column in batch.items()} | {"batch": batch}

    yield run
    for rollout in rollouts:
        rollout.close()


def contents(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["transcript"]]


def hand(observation: Any, info: dict[str, Any]) -> str:
    return f"You hold {observation[0]}, the dealer shows {observation[1]}."


def opening(roll: Roll, text: str = "Play.", **task: Any) -> str:
    """What a game of Blackjack begins with."""
    prompt = [{"role": "user", "content": text, "task": task}]
    return contents(roll(gymnasium_env("Blackjack-v1", to_text=hand), ["0"], prompt=prompt))[0]


def test_frozen_lake_is_drawn_and_walked_by_the_names_of_its_actions(roll: Roll) -> None:
    walk = ["I go down.", "Not left: DOWN", "right", "down", "Right.", "right"]
    row = roll(gymnasium_env("FrozenLake-v1", action_names=NAMES, **LAKE), walk)
    assert [(message["role"], message["content"]) for message in row["transcript"]][:5] == [
        ("user", "Play.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"),
        ("assistant", "I go down."),
        ("user", "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"),
        ("assistant", "Not left: DOWN"),
        ("user", "  (Down)\nSFFF\nFHFH\n[F]FFH\nHFFG"),
    ]
    assert (row["stop_reason"], row["num_turns"]) == ("terminated", 6)
    assert (row["step_rewards"], env_reward(**row["batch"])) == ([0.0, 0.0, 0.0, 0.0, 0.0, 1.0], [1.0])
    assert row["transcript"][-1]["role"] == "assistant"


def test_blackjack_is_played_by_the_last_integer_of_the_text(roll: Roll) -> None:
    row = roll(gymnasium_env("Blackjack-v1", to_text=hand), ["With 11 to go, 1.", "I stick: 0"])
    env = gymnasium.make("Blackjack-v1")
    first, _ = env.reset(seed=0)
    second, *_ = env.step(1)
    _, reward, *_ = env.step(0)
    assert contents(row)[0] == f"Play.\n\n{hand(first, {})}"
    assert contents(row)[2] == hand(second, {})
    assert row["env_reward"] == reward


def test_cart_pole_is_played_by_a_view_and_actions_of_ones_own(roll: Roll) -> None:
    def to_text(observation: Any, info: dict[str, Any]) -> str:
        return f"The pole leans {'left' if observation[2] < 0 else 'right'}."

    def to_action(text: str, space: Any) -> int:
        return int("right" in text)

    row = roll(gymnasium_env("CartPole-v1", to_text=to_text, to_action=to_action), ["left", "right"])
    assert contents(row)[0] in ("Play.\n\nThe pole leans left.", "Play.\n\nThe pole leans right.")
    assert (row["step_rewards"], row["stop_reason"]) == ([1.0, 1.0], "max_turns")


def test_an_end_by_gymnasiums_time_limit_is_truncated(roll: Roll) -> None:
    row = roll(gymnasium_env("FrozenLake-v1", action_names=NAMES, max_episode_steps=2, **LAKE), ["left", "left"])
    assert (row["stop_reason"], row["env_reward"]) == ("truncated", 0.0)


@pytest.mark.parametrize(
    ("text", "options", "answer"),
    [
        ("Hmm.", {}, "the actions are the integers from 0 to 3."),
        ("I wait 2.5 seconds in a1.", {}, "the actions are the integers from 0 to 3."),
        ("4", {}, "the actions are the integers from 0 to 3."),
        ("9" * 30, {}, "the actions are the integers from 0 to 3."),
        ("upwards", {"action_names": NAMES}, "the actions are left, down, right, up."),
        ("x", {"to_action": lambda text, space: int(text)}, "invalid literal for int() with base 10: 'x'"),
        ("7", {"to_action": lambda text, space: int(text)}, "7 is not in Discrete(4)."),
        ("x", {"to_action": lambda text, space: 1 if text == "1" else None}, "None is not in Discrete(4)."),
    ],
)
def test_an_action_that_cannot_be_taken_is_answered_and_changes_nothing(
    roll: Roll, text: str, options: Any, answer: str
) -> None:
    row = roll(
        gymnasium_env("FrozenLake-v1", **options, **LAKE), [text, "down" if "action_names" in options else "1", "."]
    )
    assert row["transcript"][2] == {"role": "user", "content": f"Error: no action was taken: {answer}"}
    assert contents(row)[4] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"


@pytest.mark.parametrize(("text", "action"), [("0-3", 3), ("first 3, then 2.", 2), ("(1)", 1), ("Action: 2!", 2)])
def test_the_last_integer_counts(roll: Roll, text: str, action: int) -> None:
    row = roll(gymnasium_env("FrozenLake-v1", **LAKE), [text, "."])
    assert contents(row)[2].splitlines()[0] == f"  ({NAMES[action].capitalize()})"


def test_actions_that_do_not_begin_at_0_are_read_by_name_and_number(roll: Roll) -> None:
    class Shifted(gymnasium.Env[int, int]):
        observation_space = gymnasium.spaces.Discrete(100)
        action_space = gymnasium.spaces.Discrete(2, start=5)

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return 0, {}

        def step(self, action: int) -> Any:
            return action, float(action), False, False, {}

    def to_text(observation: Any, info: Any) -> str:
        return str(observation)

    named = gymnasium_env(Shifted, to_text=to_text, action_names=["stop", "stop all"])
    assert roll(named, ["stop all", "stop"])["step_rewards"] == [6.0, 5.0]
    assert roll(gymnasium_env(Shifted, to_text=to_text), ["5", "1"])["step_rewards"] == [5.0, 0.0]


def test_the_seed_of_the_row_begins_the_same_episode(roll: Roll) -> None:
    assert opening(roll, seed=3) == opening(roll, seed=3)
    assert len({opening(roll, seed=seed) for seed in range(5)}) > 1


def test_without_a_seed_it_is_the_checksum_of_the_prompts_text(roll: Roll, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        # zlib.crc32(b"Play.")
        assert opening(roll) == opening(roll, seed=3841924618)
    assert "Rows for Blackjack-v1 have no seed" in caplog.text


def test_a_seed_that_is_none_is_refused(roll: Roll) -> None:
    with pytest.raises(SetupError, match="has seed='3'; it must be an integer, 0 or above"):
        opening(roll, seed="3")


def test_a_first_observation_is_a_message_of_its_own_behind_a_system_message(roll: Roll) -> None:
    row = roll(gymnasium_env("FrozenLake-v1", **LAKE), ["0"], prompt=[{"role": "system", "content": "Walk."}])
    assert [message["role"] for message in row["transcript"][:2]] == ["system", "user"]
    assert contents(row)[1] == "[S]FFF\nFHFH\nFFFH\nHFFG"


def test_a_prompt_that_is_a_string_is_refused(roll: Roll) -> None:
    with pytest.raises(SetupError, match="use prompts that are lists of messages"):
        roll(gymnasium_env("FrozenLake-v1", **LAKE), ["0"], prompt="Play.")


def test_each_environment_is_closed_once(roll: Roll) -> None:
    closed: list[Any] = []

    class Closing(gymnasium.Wrapper[Any, Any, Any, Any]):
        def close(self) -> None:
            closed.append(self)
            super().close()

    factory = gymnasium_env(lambda: Closing(gymnasium.make("FrozenLake-v1", **LAKE)))
    assert len(closed) == 1  # the one tried out
    roll(factory, ["0"])
    assert len(closed) == len({id(env) for env in closed}) == 2


@pytest.mark.parametrize(
    ("make", "options", "words"),
    [
        ("FrozenLak-v1", LAKE, "Environment `FrozenLak` doesn't exist.*Ids near it: FrozenLake-v1"),
        ("FrozenLake-v9", LAKE, "version `v9`.*Ids near it: FrozenLake-v1"),
        ("Nothing-like-it-v0", {}, r"gymnasium.pprint_registry\(\) lists all ids"),
        ("FrozenLake-v1", {"is_slipery": True}, "cannot be made: TypeError.*is_slipery"),
        ("FrozenLake-v1", {}, 'draws no text. Pass to_text, or render_mode="ansi"'),
        ("Taxi-v4", {"render_mode": "ansi"}, "draws in several colours"),
        ("Pendulum-v1", {"to_text": hand}, "The action space is Box.* Pass to_action"),
        ("FrozenLake-v1", {**LAKE, "action_names": ["a", "b"]}, r"Discrete\(4\) has 4 actions; action_names"),
        ("FrozenLake-v1", {**LAKE, "action_names": "abcd"}, "action_names must be a list of names"),
        ("FrozenLake-v1", {"to_action": int, "action_names": NAMES}, "Pass to_action or action_names, not both"),
        ("FrozenLake-v1", {"to_text": "ansi"}, "to_text and to_action must be functions"),
        ("FrozenLake-v1", {"to_text": lambda observation, info: 5}, "TypeError: to_text returned 5, not a text"),
        (5, {}, "takes an id or a function"),
        (lambda: None, {"is_slippery": True}, "is_slippery: what a function makes takes no options here"),
        (
            lambda: gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"),
            {"to_text": hand},
            "is vectorized",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_once(make: Any, options: Any, words: str) -> None:
    with pytest.raises(SetupError, match=words):
        gymnasium_env(make, **options)


def test_without_gymnasium_its_installation_is_named() -> None:
    script = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "from trl_rollouts.envs.gymnasium import gymnasium_env\n"
        "gymnasium_env('FrozenLake-v1')"
    )
    failed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "SetupError: gymnasium_env needs Gymnasium: pip install 'trl-rollouts[gymnasium]'." in failed.stderr


def test_a_misspelt_option_of_ours_is_not_gymnasiums() -> None:
    with pytest.raises(SetupError, match="no option 'to_txt'. Did you mean to_text"):
        gymnasium_env("CartPole-v1", to_txt=str, to_action=lambda text, space: 0)
