"""Problems of Reasoning Gym, from the data set to the reward, with the real library and scripted answers."""

import asyncio
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from trl_rollouts import ExecResult, ExecStatus, LocalExecutor, SandboxError, SetupError, env_reward, env_rollout
from trl_rollouts.envs.reasoning_gym import NO_ANSWER, WRONG, reasoning_gym_dataset, reasoning_gym_env
from trl_rollouts.testing import ScriptedClient, byte_tokenizer, check_env, fake_trainer

reasoning_gym = pytest.importorskip("reasoning_gym")

TOKENIZER = byte_tokenizer()
NAMES = ["leg_counting", "basic_arithmetic", "chain_sum"]


@pytest.fixture(scope="module")
def executor() -> Iterator[LocalExecutor]:
    shared = LocalExecutor(modules=["reasoning_gym", "trl_rollouts.envs.reasoning_gym"])
    yield shared
    asyncio.run(shared.close())


def roll(prompts: list[Any], replies: Any, *, max_attempts: int = 1, max_turns: int = 32) -> dict[str, list[Any]]:
    client = ScriptedClient(replies, tokenizer=TOKENIZER, max_model_len=None)
    rollout = env_rollout(reasoning_gym_env(max_attempts=max_attempts), client=client, max_turns=max_turns)
    batch = rollout(prompts, fake_trainer(TOKENIZER, max_completion_length=4000))
    rollout.close()
    return batch


def answered(answer: Any) -> str:
    return f"Let me see. <answer> {answer} </answer>"


@pytest.mark.parametrize("name", NAMES)
def test_the_right_answer_is_worth_one_and_a_wrong_one_less(name: str) -> None:
    row = reasoning_gym_dataset(name, size=1)[0]
    for answer, is_right in [(row["answer"], True), ("no idea", False)]:
        batch = roll([row["prompt"]], [answered(answer)])
        assert (env_reward(**batch)[0] == 1.0) is is_right
        assert (batch["stop_reason"], batch["num_turns"]) == (["terminated"], [1])


@pytest.mark.parametrize("name", NAMES)
def test_the_environment_keeps_to_the_contract(name: str) -> None:
    prompt = reasoning_gym_dataset(name, size=1)[0]["prompt"]
    passed = check_env(reasoning_gym_env(max_attempts=3), prompt=prompt, actions=["?", *["<answer>7</answer>"] * 2])
    assert "an_episode_that_has_ended_does_not_go_on" in passed


@pytest.mark.parametrize("name", NAMES)
def test_a_data_sets_problems_are_the_librarys(name: str) -> None:
    ours = reasoning_gym_dataset(name, size=3, seed=5)
    theirs = reasoning_gym.create_dataset(name, size=3, seed=5)
    assert [row["prompt"][-1]["content"] for row in ours] == [entry["question"] for entry in theirs]
    assert ours["answer"] == [entry["answer"] for entry in theirs]


def test_settings_reach_the_library() -> None:
    question = reasoning_gym_dataset("chain_sum", size=1, min_terms=20, max_terms=20)[0]["prompt"][-1]["content"]
    assert question.count(" + ") + question.count(" - ") == 19


def test_the_model_never_sees_the_problems_solution() -> None:
    row = reasoning_gym_dataset("leg_counting", size=1)[0]
    batch = roll([row["prompt"]], ["?"])
    assert [sorted(message) for message in batch["transcript"][0][:2]] == [["content", "role"]] * 2


def test_the_system_message_is_the_librarys_a_text_or_none() -> None:
    from reasoning_gym.utils import SYSTEM_PROMPTS

    def opening(system_prompt: str | None) -> list[Any]:
        prompt = reasoning_gym_dataset("chain_sum", size=1, system_prompt=system_prompt)[0]["prompt"]
        return [message["content"] for message in prompt[:-1]]

    assert opening("default") == [SYSTEM_PROMPTS["default"]]
    assert opening("DeepSeekZero") == [SYSTEM_PROMPTS["DeepSeekZero"]]
    assert opening("Write <answer>.") == ["Write <answer>."]
    assert opening(None) == []


# Attempts


def test_an_answer_that_is_not_right_is_told_and_tried_again() -> None:
    row = reasoning_gym_dataset("chain_sum", size=1)[0]
    batch = roll([row["prompt"]], ["Hm.", answered("x"), answered(row["answer"]), "never"], max_attempts=5)
    assert [message["content"] for message in batch["transcript"][0] if message["role"] == "user"][1:] == [
        NO_ANSWER,
        WRONG,
    ]
    assert (batch["num_turns"], batch["env_reward"]) == ([3], [1.0])


def test_the_last_attempt_ends_the_episode() -> None:
    prompt = reasoning_gym_dataset("chain_sum", size=1)[0]["prompt"]
    batch = roll([prompt], [answered("x")] * 3, max_attempts=2)
    assert (batch["num_turns"], batch["stop_reason"], batch["env_reward"]) == ([2], ["terminated"], [0.0])


def test_the_rewards_add_up_to_the_score_of_the_last_answer() -> None:
    row = reasoning_gym_dataset("leg_counting", size=1)[0]
    partly, score = row["answer"] + " legs", len(row["answer"]) / len(row["answer"] + " legs")
    better_then_worse = roll([row["prompt"]], [answered(partly), answered("none")], max_attempts=2)
    assert better_then_worse["step_rewards"] == [[score, -score]]
    cut = roll([row["prompt"]], [answered(partly)], max_attempts=2, max_turns=1)
    assert (cut["env_reward"], cut["stop_reason"]) == ([score], ["max_turns"])


# Scorers


def test_a_scorer_gets_the_problem_exactly_as_it_was_made() -> None:
    row = reasoning_gym_dataset("arc_agi", size=1)[0]  # whose scorer compares tuples
    assert roll([row["prompt"]], [answered(row["answer"])])["env_reward"] == [1.0]


def test_a_problem_with_numpys_texts_is_plain_data() -> None:
    row = reasoning_gym_dataset("knights_knaves", size=1)[0]
    assert roll([row["prompt"]], [answered(row["answer"])])["env_reward"] == [1.0]


def test_an_answer_that_makes_the_scorer_fail_is_worth_nothing() -> None:
    prompt = reasoning_gym_dataset("prime_factorization", size=1)[0]["prompt"]
    batch = roll([prompt], [answered("junk")])
    assert (batch["env_reward"], batch["stop_reason"]) == ([0.0], ["terminated"])


@pytest.mark.parametrize(
    ("name", "answer", "score", "problem"),
    [
        ("n_queens", None, 1.0, None),
        ("n_queens", "__import__('os').kill(__import__('os').getppid(), 9)", 0.0, None),
        ("n_queens", "(_ for _ in ()).throw(KeyboardInterrupt)", 0.0, "KeyboardInterrupt"),
        ("n_queens", "__import__('json').__dict__.clear()", 0.0, "died: "),
        ("countdown", "9**9**9", 0.0, "timeout: "),
        ("countdown", "1 + 2", 0.05, None),
    ],
)
def test_a_scorer_that_evaluates_what_the_model_wrote_does_so_in_a_sandbox(
    name: str, answer: str | None, score: float, problem: str | None, executor: LocalExecutor
) -> None:
    row = reasoning_gym_dataset(name, size=1)[0]

    async def step() -> Any:
        env: Any = reasoning_gym_env(executor=executor, timeout_s=1.0)()
        env.reset(row["prompt"])
        return await env.step({"role": "assistant", "content": answered(answer or row["answer"])})

    result = asyncio.run(step())
    assert result.reward == score
    assert (problem or "None") in str(result.info.get("score_error"))


def test_an_executor_that_lacks_the_library_stops_the_run_rather_than_score_all_as_wrong() -> None:
    class Lacking:
        is_alive = True

        async def open(self) -> Any:
            return self

        async def run(self, code: str, timeout_s: float) -> ExecResult:
            return ExecResult(ExecStatus.ERROR, error="No module named 'reasoning_gym'")

        async def close(self) -> None:
            pass

    row = reasoning_gym_dataset("n_queens", size=1)[0]
    client = ScriptedClient([answered(row["answer"])], tokenizer=TOKENIZER, max_model_len=None)
    rollout = env_rollout(reasoning_gym_env(executor=Lacking()), client=client)  # type: ignore[arg-type]
    with pytest.raises(SandboxError, match="'n_queens' cannot run in the sandbox: No module named 'reasoning_gym'"):
        rollout([row["prompt"]], fake_trainer(TOKENIZER, max_completion_length=4000))
    rollout.close()


def test_a_score_that_is_no_finite_number_fails_its_trajectory_only() -> None:
    from reasoning_gym.factory import DATASETS, ProceduralDataset, register_dataset

    @dataclass
    class Config:
        size: int
        seed: int

    class Odd(ProceduralDataset):
        def __init__(self, config: Config) -> None:
            super().__init__(config, config.seed, config.size)

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": "?", "answer": str(random.Random(index).random()), "metadata": {}}

        def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
            return math.nan

    register_dataset("odd_scores", Odd, Config)
    odd = reasoning_gym_dataset("odd_scores", size=1)[0]
    even = reasoning_gym_dataset("chain_sum", size=1)[0]
    del DATASETS["odd_scores"]
    batch = roll([odd["prompt"], even["prompt"]], lambda ids: answered(even["answer"]))
    assert batch["env_reward"] == [None, 1.0]
    assert "reward nan; it must be finite" in batch["rollout_error"][0]


def test_data_sets_can_be_mixed_in_one_run() -> None:
    from datasets import concatenate_datasets

    mixed = concatenate_datasets([reasoning_gym_dataset(name, size=2) for name in NAMES])
    keys = {row["prompt"][-1]["content"].strip(): row["answer"] for row in mixed}

    def reply(ids: list[int]) -> str:
        text = TOKENIZER.decode(ids)
        return answered(next(answer for question, answer in keys.items() if question in text))

    assert roll(mixed["prompt"][:], reply)["env_reward"] == [1.0] * 6


# What is refused


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("leg_count", {}, "no data set 'leg_count'. Of its [0-9]+, the nearest: leg_counting"),
        ("chain_sum", {"terms": 3}, "unexpected keyword argument 'terms'. It has: min_terms"),
        ("chain_sum", {"min_terms": -1}, "refuses its settings: min_terms must be positive"),
        ("chain_sum", {"min_terms": print}, "a setting of 'chain_sum', and no plain data"),
        ("chain_sum", {"size": 0}, "size must be a number of problems"),
        ("chain_sum", {"seed": None}, "seed a whole number"),
        ("chain_sum", {"system_prompt": "defualt"}, "one of the library's prompts"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_generated(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SetupError, match=words):
        reasoning_gym_dataset(name, **{"size": 1} | options)


def test_prompts_of_another_data_set_stop_the_run() -> None:
    with pytest.raises(SetupError, match="needs the prompts of reasoning_gym_dataset"):
        roll([[{"role": "user", "content": "6 times 7?"}]], [answered(42)])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_attempts": 0}, "max_attempts must be a number of turns"),
        ({"executor": LocalExecutor}, "executor must be an Executor"),
        ({"timeout_s": 0}, "timeout_s must be a positive number"),
    ],
)
def test_an_argument_that_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        reasoning_gym_env(**options)


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(SetupError, match="pip install 'trl-rollouts.reasoning-gym.'"):
        reasoning_gym_dataset("chain_sum", size=1)
    with pytest.raises(SetupError, match="pip install 'trl-rollouts.reasoning-gym.'"):
        reasoning_gym_env()
