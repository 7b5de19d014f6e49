"""Teach a model to cross a frozen lake: it sees the map as text, and moves until it is there or in a hole.

    pip install 'trl-rollouts[gymnasium]'
    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/gymnasium_frozenlake.py --config recipes/configs/gymnasium_frozenlake.yaml

Every field of GRPOConfig can be set in the config file or on the command line. What to change for a task of your own:
the environment and its options, the names of its actions, the dataset.
"""

from dataclasses import dataclass, field

from datasets import Dataset
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import env_reward, env_rollout, gymnasium_env, with_task
from trl_rollouts.env import EnvFactory


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    num_prompts: int = field(default=1000, metadata={"help": "Size of the training set."})
    num_maps: int = field(default=32, metadata={"help": "Different lakes."})
    size: int = field(default=4, metadata={"help": "Places in a row of a lake."})
    is_slippery: bool = field(default=False, metadata={"help": "Whether a move may go aside."})
    max_turns: int = field(default=12, metadata={"help": "Moves of one trajectory."})
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


MOVES = ["left", "down", "right", "up"]
RULES = (
    "You cross a frozen lake. S is the start, F is ice, H is a hole, G is the goal; you are at the place in brackets. "
    "Answer with one move: left, down, right or up."
)


def make_lakes(config: TaskConfig) -> dict[str, EnvFactory]:
    """One kind of environment a map. Each has a way from S to G."""
    return {
        f"lake {number}": gymnasium_env(
            "FrozenLake-v1",
            action_names=MOVES,
            render_mode="ansi",
            desc=generate_random_map(size=config.size, seed=number),
            is_slippery=config.is_slippery,
        )
        for number in range(config.num_maps)
    }


def make_dataset(config: TaskConfig) -> Dataset:
    """Each row names its lake, and the seed with which the ice is as slippery for all of its group.

    A worked exchange stands before it: a small model needs to see a move once to make some.
    """
    prompt = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": "The lake:\n\n[S]F\nHG"},
        {"role": "assistant", "content": "right"},
        {"role": "user", "content": "S[F]\nHG"},
        {"role": "assistant", "content": "down"},
        {"role": "user", "content": "You are there. The next lake:"},
    ]
    rows = [
        {"prompt": prompt, "environment": f"lake {row % config.num_maps}", "seed": row}
        for row in range(config.num_prompts)
    ]
    return with_task(Dataset.from_list(rows), ["environment", "seed"])


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
        train_dataset=make_dataset(task),
        peft_config=get_peft_config(model_config),
        rollout_func=env_rollout(make_lakes(task), max_turns=task.max_turns, transcript_dir=task.transcript_dir),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
