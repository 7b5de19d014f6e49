"""Teach a model to solve Reasoning Gym's problems: made by a program, scored by the data set's own scorer.

    pip install 'trl-rollouts[reasoning-gym]'
    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/reasoning_gym_problems.py --config recipes/configs/reasoning_gym_problems.yaml

Every field of GRPOConfig can be set in the config file or on the command line. What to change for a task of your own:
the data sets and their settings, the number of attempts.
"""

from dataclasses import dataclass, field

from datasets import Dataset, concatenate_datasets
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import env_reward, env_rollout, reasoning_gym_dataset, reasoning_gym_env


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    datasets: list[str] = field(
        default_factory=lambda: ["chain_sum", "leg_counting"], metadata={"help": "Names of Reasoning Gym's data sets."}
    )
    num_prompts: int = field(default=500, metadata={"help": "Problems of each data set."})
    num_eval_prompts: int = field(
        default=0, metadata={"help": "Problems of each for evaluation, none of them trained."}
    )
    system_prompt: str = field(default="default", metadata={"help": "One of the library's, or a text of your own."})
    max_attempts: int = field(default=2, metadata={"help": "Answers that the model may give to one problem."})
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


EVAL_SEED = 1_000_000
"""Problems are made from seeds that count up, so that far away there are none of the training's."""


def make_dataset(config: TaskConfig, num_prompts: int, seed: int) -> Dataset:
    return concatenate_datasets(
        [
            reasoning_gym_dataset(name, size=num_prompts, seed=seed, system_prompt=config.system_prompt)
            for name in config.datasets
        ]
    )


def main(task: TaskConfig, args: GRPOConfig, model_config: ModelConfig) -> None:
    args.model_init_kwargs = {
        "dtype": model_config.dtype,
        "attn_implementation": model_config.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    trainer = GRPOTrainer(
        model=model_config.model_name_or_path,
        args=args,
        reward_funcs=env_reward,
        train_dataset=make_dataset(task, task.num_prompts, args.seed),
        eval_dataset=make_dataset(task, task.num_eval_prompts, EVAL_SEED) if task.num_eval_prompts else None,
        peft_config=get_peft_config(model_config),
        rollout_func=env_rollout(
            reasoning_gym_env(max_attempts=task.max_attempts),
            max_turns=task.max_attempts,
            transcript_dir=task.transcript_dir,
        ),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
