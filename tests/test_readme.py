"""The README's code runs as it stands there."""

import re
from pathlib import Path
from typing import Any

from trl_rollouts import env_rollout
from trl_rollouts.testing import ScriptedClient, byte_tokenizer, fake_trainer

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)


def run(marker: str, names: dict[str, Any]) -> dict[str, Any]:
    """Execute the block that holds `marker`, up to where it would make a trainer."""
    [block] = [block for block in BLOCKS if marker in block]
    exec(block.split("trainer = GRPOTrainer(")[0], names)
    return names


def test_the_fake_server_example_runs() -> None:
    run("FakeServer(", run("def multiply", {}))


def test_the_environment_example_plays() -> None:
    names = run("class GuessNumber", {})
    client = ScriptedClient(["I say 3", "then 9", "7!"])
    prompt = [{"role": "user", "content": "Guess.", "task": {"secret": 7}}]
    batch = env_rollout(names["GuessNumber"], max_turns=6, client=client)([prompt], fake_trainer(byte_tokenizer()))
    assert [m["content"] for m in batch["transcript"][0]] == ["Guess.", "I say 3", "higher", "then 9", "lower", "7!"]
    assert batch["env_reward"] == [1.0]


def test_the_reward_example_scores_answers_and_leaves_failed_rows_out() -> None:
    reward = run("def right_answer", {})["right_answer"]
    transcript = [[{"content": "It is 42."}], [{"content": "No."}], []]
    assert reward(transcript=transcript, answer=[42, 42, 42], rollout_error=[None, None, "lost"]) == [1.0, 0.0, None]
