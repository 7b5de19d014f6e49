"""Launched with TRL 1.10.0 first on the path: two steps of its trainer on its own server.

    PYTHONPATH=.cache/trl-1.10.0 python contract_old_trl.py BASE_URL TOKENIZER_FOLDER OUTPUT_FOLDER

The trained model is a one-layer one over the server's vocabulary, so the server's weights are left as they are.
"""

import json
import sys
from typing import Any

import trl
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from trl_rollouts import Message, StepResult, env_reward, env_rollout
from trl_rollouts.testing import tiny_model


class TwoTurns:
    """Asks once more; a reward for each turn."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        self.turns += 1
        messages = [{"role": "user", "content": "Are you sure?"}]
        return StepResult(messages, reward=len(action["content"]) / 100, terminated=self.turns == 2)

    def close(self) -> None:
        pass


def main(base_url: str, tokenizer_folder: str, output_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    batches: list[dict[str, Any]] = []
    rollout = env_rollout(TwoTurns, base_url=base_url, weight_sync=None)

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        batches.append(rollout(prompts, trainer))
        return batches[-1]

    args = GRPOConfig(
        output_dir=output_dir,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=64,
        generation_kwargs={"max_tokens": 8},
        max_steps=2,
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
    )
    trainer = GRPOTrainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "Name a river."}]] * 4}),
        reward_funcs=env_reward,
        rollout_func=recorded,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(json.dumps({"trl": trl.__version__, "logs": logs, "masks": [batch["env_mask"] for batch in batches]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
