"""Launched on two processes: the environment of one cannot be set up, while the other is waiting for its rows.

torchrun --standalone --nproc_per_node 2 contract_failing_rank.py BASE_URL FOLDER
"""

import sys
from pathlib import Path

from contract_parts import Quiz, chat, make_trainer

from trl_rollouts import Message, SetupError, env_reward, env_rollout


class Failing(Quiz):
    rank = -1

    def reset(self, prompt: list[Message]) -> list[Message]:
        if self.rank == 1:
            raise SetupError("the game's licence is missing on this machine")
        return super().reset(prompt)


def main(base_url: str, folder: Path) -> None:
    rollout = env_rollout(Failing, base_url=base_url)
    prompt = [{**chat("Guess.")[0], "task": {"answer": "yes"}}]
    trainer = make_trainer(
        rollout, folder, [prompt] * 2, reward_funcs=env_reward, per_device_train_batch_size=1, num_generations=2
    )
    Failing.rank = trainer.accelerator.process_index
    trainer.train()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
