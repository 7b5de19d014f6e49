"""Launched on two processes: a group of two, one member on each, trained with and without TRL's own weight sync.

    torchrun --standalone --nproc_per_node 2 contract_two_processes.py BASE_URL FOLDER

Each process writes what its rollouts were given and returned to FOLDER/rank<N>.json.
"""

import json
import sys
from pathlib import Path
from typing import Any, ClassVar

from contract_parts import Quiz, Recorded, chat, make_trainer, use_vllm_server_mode

from trl_rollouts import Message, Rollout, env_reward, env_rollout
from trl_rollouts.envs.seeds import reset_seed


class RankQuiz(Quiz):
    """Tells the fake server which process asks, so that the two get completions of other lengths; notes its seeds."""

    rank = -1
    seeds: ClassVar[list[int]] = []

    def reset(self, prompt: list[Message]) -> list[Message]:
        super().reset(prompt)
        self.seeds.append(reset_seed(prompt, "RankQuiz"))
        return [*prompt, *chat(f"I am rank {self.rank}.")]


def train(rollout: Rollout, folder: Path, **config: Any) -> dict[str, Any]:
    """What the rollout was given and returned, and what came of it."""
    recorded = Recorded(rollout)
    trainer = make_trainer(
        recorded,
        folder,
        [[{"role": "user", "content": "Guess.", "task": {"answer": "yes"}}]] * 2,
        reward_funcs=env_reward,
        per_device_train_batch_size=1,
        num_generations=2,
        **config,
    )
    RankQuiz.rank = trainer.accelerator.process_index
    if trainer.args.vllm_mode == "server":
        # TRL has a client on the main process only.
        use_vllm_server_mode(trainer, **({"vllm_client": object()} if RankQuiz.rank == 0 else {}))
    trainer.train()
    return {
        "calls": recorded.calls,
        "grad_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry],
        "checksum": sum(float(weights.detach().double().sum()) for weights in trainer.model.parameters()),
    }


def main(base_url: str, folder: Path) -> None:
    report = {
        "own_sync": train(env_rollout(RankQuiz, base_url=base_url), folder, max_steps=2),
        "server_mode": train(env_rollout(RankQuiz), folder, vllm_mode="server", vllm_server_base_url=base_url),
        "seeds": RankQuiz.seeds,
    }
    (folder / f"rank{RankQuiz.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
