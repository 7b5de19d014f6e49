"""Teach a model to speak in ten letters: the environment that `openenv init` writes echoes, and rewards up to ten.

    pip install openenv                                     # in a virtual environment of its own: see below
    openenv init word_echo                                  # then max_concurrent_envs=8 in word_echo/server/app.py
    cd word_echo && python -m server.app --host 127.0.0.1 --port 8001

    pip install 'trl-rollouts[openenv]'
    trl-rollouts serve MODEL --port 8000
    accelerate launch recipes/openenv_echo.py --config recipes/configs/openenv_echo.yaml

The package `openenv` and vLLM need different versions of `mcp`, and the training does not need `openenv`.

Every field of GRPOConfig can be set in the config file or on the command line. What to change for a task of your own:
the environment behind env_url, what the model sees of it and how it acts, the dataset.
"""

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config

from trl_rollouts import env_reward, env_rollout, openenv_env, with_task


@dataclass
class TaskConfig:
    """What the task adds to GRPOConfig."""

    env_url: str = field(default="http://127.0.0.1:8001", metadata={"help": "The environment's server."})
    max_concurrency: int = field(
        default=8, metadata={"help": "The server's max_concurrent_envs, divided by the number of training processes."}
    )
    num_prompts: int = field(default=1000, metadata={"help": "Size of the training set."})
    max_turns: int = field(default=2, metadata={"help": "Words of one trajectory."})
    transcript_dir: str | None = field(default=None, metadata={"help": "Folder for one JSON line a trajectory."})


TOPICS = ["the sea", "a garden", "winter", "a train", "breakfast", "the moon", "a market", "rain"]


def show(observation: dict[str, Any]) -> str:
    """What the model sees of the environment's observation: nothing of the first one."""
    echoed = observation["echoed_message"]
    return f'The echo says "{echoed}". Another word.' if observation["message_length"] else ""


def say(text: str) -> dict[str, Any]:
    """The environment's action."""
    if not text.strip():
        raise ValueError("nothing was said.")  # the model is told
    return {"message": text.strip()}


def brevity(transcript: list[list[dict]], rollout_error: list[str | None], **kwargs: Any) -> list[float | None]:
    """A hundredth off for each letter beyond ten, which the environment does not reward. At most 1 a word."""
    said = [[len(one["content"].strip()) for one in messages if one["role"] == "assistant"] for messages in transcript]
    excess = [sum(min(max(length - 10, 0) / 100, 1.0) for length in lengths) for lengths in said]
    return [None if error is not None else -one for one, error in zip(excess, rollout_error, strict=True)]


def make_dataset(config: TaskConfig) -> Dataset:
    """Topics, each behind one worked exchange. The seed goes to the environment's reset; this one draws nothing."""
    shown = [{"role": "user", "content": "One word about the sky."}, {"role": "assistant", "content": "Blue."}]
    rows = []
    for row in range(config.num_prompts):
        question = {"role": "user", "content": f"One word about {TOPICS[row % len(TOPICS)]}."}
        rows.append({"prompt": [*shown, question], "seed": row})
    return with_task(Dataset.from_list(rows), ["seed"])


def main(task: TaskConfig, args: GRPOConfig, model_config: ModelConfig) -> None:
    args.model_init_kwargs = {
        "dtype": model_config.dtype,
        "attn_implementation": model_config.attn_implementation,
        **(args.model_init_kwargs or {}),
    }
    echo = openenv_env(task.env_url, max_concurrency=task.max_concurrency, to_text=show, to_action=say)
    trainer = GRPOTrainer(
        model=model_config.model_name_or_path,
        args=args,
        reward_funcs=[env_reward, brevity],
        train_dataset=make_dataset(task),
        peft_config=get_peft_config(model_config),
        rollout_func=env_rollout(echo, max_turns=task.max_turns, transcript_dir=task.transcript_dir),
    )
    trainer.train()
    trainer.save_state()


if __name__ == "__main__":
    main(*TrlParser((TaskConfig, GRPOConfig, ModelConfig)).parse_args_and_config())
