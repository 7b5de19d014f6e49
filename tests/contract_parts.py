"""What the tests against a real GRPOTrainer share with the scripts that they launch."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_rollouts import Message, StepResult
from trl_rollouts.testing import byte_tokenizer, tiny_model


def chat(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def make_trainer(
    rollout: Callable[..., Any],
    output_dir: Path,
    prompts: Dataset | Sequence[Any],
    *,
    reward_funcs: Any,
    eval_dataset: Dataset | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    **config: Any,
) -> GRPOTrainer:
    """A one-layer model on a CPU, in groups of four."""
    tokenizer = byte_tokenizer()
    if tools:
        tokenizer.response_schema = {}  # TRL takes no tools with a chat template that it does not know
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 256,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=GRPOConfig(output_dir=str(output_dir), **settings | config),
        train_dataset=prompts if isinstance(prompts, Dataset) else Dataset.from_dict({"prompt": list(prompts)}),
        eval_dataset=eval_dataset,
        reward_funcs=reward_funcs,
        rollout_func=rollout,
        tools=list(tools) or None,
    )


def use_vllm_server_mode(trainer: GRPOTrainer, **vllm_generation: Any) -> list[int]:
    """Switch to vLLM's server mode behind the constructor, whose weight transfer needs CUDA.

    Returns:
        The steps at which TRL then syncs the weights, as they come.
    """
    steps: list[int] = []

    def sync_weights() -> None:
        steps.append(trainer.state.global_step)

    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
    trainer.vllm_generation = SimpleNamespace(sync_weights=sync_weights, **vllm_generation)
    return steps


class Recorded:
    """A rollout_func that keeps what it was given and what it returned."""

    def __init__(self, rollout: Callable[..., Any]) -> None:
        self._rollout = rollout
        self.calls: list[tuple[list[Any], dict[str, list[Any]]]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = self._rollout(prompts, trainer)
        self.calls.append((prompts, columns))
        return columns


class Quiz:
    """Two guesses, the row's answer shown in between; a reward for each."""

    def reset(self, prompt: list[Message]) -> list[Message]:
        self._answer = prompt[-1]["task"]["answer"]
        self._num_guesses = 0
        return prompt

    def step(self, action: Message) -> StepResult:
        self._num_guesses += 1
        if self._num_guesses == 1:
            return StepResult([{"role": "user", "content": f"It is {self._answer}."}], reward=0.25)
        return StepResult(reward=float(action["content"] == self._answer), terminated=True)

    def close(self) -> None:
        pass


class Echo:
    """One turn, rewarded by the number that the model says."""

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        return StepResult(reward=float(action["content"]), terminated=True)

    def close(self) -> None:
        pass
