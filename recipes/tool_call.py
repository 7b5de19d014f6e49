"""Teach a model to call a tool: it is asked for a product and has `multiply` to find it.

    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/tool_call.py --config recipes/configs/tool_call.yaml

Every field of GRPOConfig can be set in the config file or on the command line. What to change for a task of your own:
the function, the dataset, the reward.
"""

import random
from dataclasses import dataclass, field

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import tool_rollout


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    num_prompts: int = field(default=1000, metadata={"help": "Size of the training set."})
    largest: int = field(default=99, metadata={"help": "Largest factor asked for."})
    max_turns: int = field(
        default=1, metadata={"help": "1: the call is scored. More: its result goes back to the model."}
    )
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def question(a: int, b: int) -> dict:
    return {"role": "user", "content": f"What is {a} times {b}?"}


def call(a: int, b: int) -> dict:
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def make_dataset(config: TaskConfig, seed: int) -> Dataset:
    """Questions, each behind one worked exchange: a small model needs to see a call once to try one."""
    random_ = random.Random(seed)
    factors = [
        (random_.randint(2, config.largest), random_.randint(2, config.largest)) for _ in range(config.num_prompts)
    ]
    return Dataset.from_list(
        [{"prompt": [question(7, 8), call(7, 8), question(a, b)], "product": a * b} for a, b in factors]
    )


def tool_reward(
    tool_calls: list[list[dict]], product: list[int], rollout_error: list[str | None], **kwargs
) -> list[float | None]:
    """0.2 for a call, and 0.8 more if it is the only one and returns the product; None where the rollout failed."""
    rewards: list[float | None] = []
    for calls, expected, error in zip(tool_calls, product, rollout_error, strict=True):
        right = len(calls) == 1 and calls[0]["result"] == expected
        rewards.append(None if error is not None else 0.2 * bool(calls) + 0.8 * right)
    return rewards


def main(task: TaskConfig, args: GRPOConfig, model_config: ModelConfig) -> None:
    args.model_init_kwargs = {
        "dtype": model_config.dtype,
        "attn_implementation": model_config.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    trainer = GRPOTrainer(
        model=model_config.model_name_or_path,
        args=args,
        reward_funcs=tool_reward,
        train_dataset=make_dataset(task, seed=args.seed),
        peft_config=get_peft_config(model_config),
        rollout_func=tool_rollout([multiply], max_turns=task.max_turns, transcript_dir=task.transcript_dir),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
