"""Teach a model to play a game of TextArena's: it guesses a number, and is told whether to go higher or lower.

    pip install 'trl-rollouts[textarena]'
    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/textarena_guess_the_number.py --config recipes/configs/textarena_guess_the_number.yaml

Every field of GRPOConfig can be set in the config file or on the command line. What to change for another game for one
player: its id and options, the example, and `max_turns`, which must be enough for the game to end, since it pays then.
"""

from dataclasses import dataclass, field

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import env_reward, env_rollout, textarena_env, with_task


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    num_prompts: int = field(default=1000, metadata={"help": "Games of the training set."})
    largest: int = field(default=20, metadata={"help": "Largest number to guess."})
    num_guesses: int = field(default=10, metadata={"help": "Guesses of one game."})
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


def make_dataset(config: TaskConfig, seed: int) -> Dataset:
    """The same short prompt for each game, which the game's own follows; a game's seed makes its number.

    A worked exchange stands before it: a small model needs to see a move once to make some.
    """
    middle = config.largest // 2
    shown = [
        {"role": "user", "content": f"Guess the number between 1 and {config.largest}."},
        {"role": "assistant", "content": f"[{middle}]"},
        {"role": "user", "content": "The target number is lower."},
        {"role": "assistant", "content": f"[{middle // 2}]"},
        {"role": "user", "content": "That is the number. Now another game."},
    ]
    seeds = range(seed * config.num_prompts, (seed + 1) * config.num_prompts)
    return with_task(Dataset.from_list([{"prompt": shown, "seed": one} for one in seeds]), ["seed"])


def main(task: TaskConfig, args: GRPOConfig, model_config: ModelConfig) -> None:
    args.model_init_kwargs = {
        "dtype": model_config.dtype,
        "attn_implementation": model_config.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    game = textarena_env("GuessTheNumber-v0", max_number=task.largest, max_turns=task.num_guesses)
    trainer = GRPOTrainer(
        model=model_config.model_name_or_path,
        args=args,
        reward_funcs=env_reward,  # 1 for the number; otherwise how near the last guess was, when the game ends
        train_dataset=make_dataset(task, seed=args.seed),
        peft_config=get_peft_config(model_config),
        # The game counts from 0, and forgives an invalid move before each guess: this many turns always end it.
        rollout_func=env_rollout(game, max_turns=2 * task.num_guesses + 2, transcript_dir=task.transcript_dir),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
