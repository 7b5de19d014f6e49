"""Train on an environment of verifiers: its tasks, its turns and its rewards, with tokens that our server samples.

    pip install 'trl-rollouts[verifiers]'
    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/verifiers_environment.py --config recipes/configs/verifiers_environment.yaml

Every field of GRPOConfig can be set in the config file or on the command line. What to change for another environment:
its id, that of an installed package. This one is `verifiers_number_game.py` next to this script.
"""

import json
from dataclasses import dataclass, field

from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import env_reward, env_rollout, verifiers_dataset, verifiers_env


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    environment: str = field(default="verifiers_number_game", metadata={"help": "Id of a taskset of verifiers."})
    taskset: str = field(default="{}", metadata={"help": "Its configuration, as JSON."})
    num_prompts: int | None = field(default=None, metadata={"help": "Tasks of the training set; all by default."})
    max_turns: int = field(default=8, metadata={"help": "Turns of one episode, beside the environment's own limit."})
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


def main(task: TaskConfig, args: GRPOConfig, model_config: ModelConfig) -> None:
    args.model_init_kwargs = {
        "dtype": model_config.dtype,
        "attn_implementation": model_config.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    environment = {"taskset": {"id": task.environment, **json.loads(task.taskset)}}
    trainer = GRPOTrainer(
        model=model_config.model_name_or_path,
        args=args,
        reward_funcs=env_reward,  # the environment's own rewards, weighted and added up
        train_dataset=verifiers_dataset(environment, size=task.num_prompts),
        peft_config=get_peft_config(model_config),
        rollout_func=env_rollout(
            verifiers_env(environment), max_turns=task.max_turns, transcript_dir=task.transcript_dir
        ),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
