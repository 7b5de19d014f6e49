"""Teach a model to compute with Python: it writes code, reads what it printed, and answers.

    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/code_execution.py --config recipes/configs/code_execution.yaml

Every field of GRPOConfig can be set in the config file or on the command line. What to change for a task of your own:
the dataset, the reward, the functions that the code may call.
"""

import random
import re
from dataclasses import dataclass, field

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import code_rollout


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    num_prompts: int = field(default=1000, metadata={"help": "Size of the training set."})
    largest: int = field(default=99, metadata={"help": "Largest price and weight asked for."})
    max_turns: int = field(default=4, metadata={"help": "Completions of one trajectory."})
    timeout_s: float = field(default=5.0, metadata={"help": "Seconds that one piece of code may run."})
    results_as: str = field(default="message", metadata={"help": '"message", or "inline" for base models.'})
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


PRICES = {"apples": 3, "pears": 4, "plums": 7}


def price(fruit: str) -> int:
    """The price of a kilo, in euros.

    Args:
        fruit: apples, pears or plums.
    """
    return PRICES[fruit]


def question(kilos: int, fruit: str, paid: int) -> dict:
    text = f"I buy {kilos} kilos of {fruit} and pay with {paid} euros. How many euros do I get back?"
    return {"role": "user", "content": text}


def make_dataset(config: TaskConfig, seed: int) -> Dataset:
    """Questions, each behind one worked exchange: a small model needs to see code once to write some."""
    random_ = random.Random(seed)
    shown = [
        question(2, "plums", 20),
        {"role": "assistant", "content": "<code>20 - 2 * price('plums')</code>"},
        {"role": "user", "content": "<result>\n6\n</result>"},
        {"role": "assistant", "content": "I get back 6 euros."},
    ]
    rows = []
    for _ in range(config.num_prompts):
        kilos, fruit = random_.randint(2, config.largest), random_.choice(list(PRICES))
        back = random_.randint(1, config.largest)
        rows.append({"prompt": [*shown, question(kilos, fruit, kilos * PRICES[fruit] + back)], "back": back})
    return Dataset.from_list(rows)


def code_reward(
    transcript: list[list[dict]],
    tool_calls: list[list[dict]],
    back: list[int],
    rollout_error: list[str | None],
    **kwargs,
) -> list[float | None]:
    """0.2 for code that runs, and 0.8 more for the right answer behind it; None where the rollout failed.

    What code prints is the model's word. The answer is compared with the dataset's.
    """
    rewards: list[float | None] = []
    for messages, calls, expected, error in zip(transcript, tool_calls, back, rollout_error, strict=True):
        ran = any(call["name"] == "python" and call["error"] is None for call in calls)
        numbers = re.findall(r"-?\d+", messages[-1]["content"])
        is_right = messages[-1]["role"] == "assistant" and numbers[-1:] == [str(expected)]
        rewards.append(None if error is not None else 0.2 * ran + 0.8 * (ran and is_right))
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
        reward_funcs=code_reward,
        train_dataset=make_dataset(task, seed=args.seed),
        peft_config=get_peft_config(model_config),
        rollout_func=code_rollout(
            tools=[price],
            timeout_s=task.timeout_s,
            max_turns=task.max_turns,
            results_as=task.results_as,
            transcript_dir=task.transcript_dir,
        ),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
