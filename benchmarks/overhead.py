"""What a rollout costs beside the server: time per turn of 256 trajectories that run at once, without a model.

    make bench

The completions are scripted, so all of the time is this package's and the tokenizer's.
"""

import json
import time

from trl_rollouts import env_rollout
from trl_rollouts.env import StepResult
from trl_rollouts.testing import ScriptedClient, byte_tokenizer, fake_trainer

NUM_TRAJECTORIES, NUM_TURNS = 256, 8


class Chat:
    """Answers every turn."""

    async def reset(self, prompt):
        return prompt

    async def step(self, action):
        return StepResult([{"role": "user", "content": "Go on, " + "please " * 20}])

    async def close(self):
        pass


def main() -> dict[str, float]:
    tokenizer = byte_tokenizer()
    client = ScriptedClient(lambda prompt: "word " * 10, tokenizer=tokenizer, max_model_len=None)
    rollout = env_rollout(Chat, max_turns=NUM_TURNS, client=client)
    trainer = fake_trainer(tokenizer, max_completion_length=100_000)
    prompts = [[{"role": "user", "content": f"Question {i}"}] for i in range(NUM_TRAJECTORIES)]
    rollout(prompts[:8], trainer)
    started = time.monotonic()
    batch = rollout(prompts, trainer)
    seconds = time.monotonic() - started
    rollout.close()
    assert batch["num_turns"] == [NUM_TURNS] * NUM_TRAJECTORIES
    return {"us_per_turn": round(seconds / (NUM_TRAJECTORIES * NUM_TURNS) * 1e6)}


if __name__ == "__main__":
    print(json.dumps({"benchmark": "overhead", "trajectories": NUM_TRAJECTORIES, "turns": NUM_TURNS, **main()}))
