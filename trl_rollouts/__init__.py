"""Ready-made rollouts for TRL's GRPOTrainer: multi-turn training on exactly the tokens that the server sampled.

    from trl_rollouts import tool_rollout
    trainer = GRPOTrainer(..., rollout_func=tool_rollout([multiply]))

Importing this package is free: names are resolved when they are first used, so no torch, trl, vllm or HTTP library is
loaded by the import alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clients import Client, connect
    from .env import Env, StepResult, with_task
    from .envs.gymnasium import gymnasium_env
    from .envs.openenv import openenv_env
    from .envs.reasoning_gym import reasoning_gym_dataset, reasoning_gym_env
    from .envs.textarena import textarena_env
    from .envs.trl_environment import trl_environment
    from .envs.verifiers import verifiers_dataset, verifiers_env
    from .errors import (
        EnvError,
        PromptTooLongError,
        RequestError,
        RolloutError,
        SandboxError,
        ServerError,
        ServerGoneError,
        SessionError,
        SetupError,
        TemplateError,
        WeightSyncError,
    )
    from .metrics import env_reward
    from .options import RolloutOptions
    from .parsing import parse_hermes
    from .ready_made import code_rollout, env_rollout, tool_rollout
    from .rollout import Rollout
    from .sampling import Sampling
    from .sandbox import ExecResult, ExecStatus, Executor, Session
    from .sandbox.http import HttpExecutor, serve_executor
    from .sandbox.local import Isolation, LocalExecutor
    from .sandbox.ray import RayExecutor
    from .tokens import ChatTokenizer
    from .trajectory import Completion, Message, StopReason, Trajectory
    from .transcripts import read_transcripts
    from .weights import CheckpointSync

__version__ = "0.1.0"

_HOMES = {
    "clients": ("Client", "connect"),
    "env": ("Env", "StepResult", "with_task"),
    "envs.gymnasium": ("gymnasium_env",),
    "envs.reasoning_gym": ("reasoning_gym_dataset", "reasoning_gym_env"),
    "envs.openenv": ("openenv_env",),
    "envs.textarena": ("textarena_env",),
    "envs.trl_environment": ("trl_environment",),
    "envs.verifiers": ("verifiers_dataset", "verifiers_env"),
    "errors": (
        "EnvError",
        "PromptTooLongError",
        "RequestError",
        "RolloutError",
        "SandboxError",
        "ServerError",
        "ServerGoneError",
        "SessionError",
        "SetupError",
        "TemplateError",
        "WeightSyncError",
    ),
    "metrics": ("env_reward",),
    "parsing": ("parse_hermes",),
    "options": ("RolloutOptions",),
    "ready_made": ("code_rollout", "env_rollout", "tool_rollout"),
    "rollout": ("Rollout",),
    "sampling": ("Sampling",),
    "sandbox": ("ExecResult", "ExecStatus", "Executor", "Session"),
    "sandbox.local": ("Isolation", "LocalExecutor"),
    "sandbox.http": ("HttpExecutor", "serve_executor"),
    "sandbox.ray": ("RayExecutor",),
    "tokens": ("ChatTokenizer",),
    "trajectory": ("Completion", "Message", "StopReason", "Trajectory"),
    "transcripts": ("read_transcripts",),
    "weights": ("CheckpointSync",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 (in the order of a first reading; a test holds that it is complete)
    "tool_rollout",
    "code_rollout",
    "env_rollout",
    "Rollout",
    "RolloutOptions",
    "env_reward",
    "with_task",
    "trl_environment",
    "gymnasium_env",
    "reasoning_gym_env",
    "reasoning_gym_dataset",
    "textarena_env",
    "openenv_env",
    "verifiers_env",
    "verifiers_dataset",
    "Env",
    "StepResult",
    "Message",
    "Trajectory",
    "StopReason",
    "Sampling",
    "Completion",
    "Client",
    "connect",
    "ChatTokenizer",
    "parse_hermes",
    "LocalExecutor",
    "Isolation",
    "RayExecutor",
    "HttpExecutor",
    "serve_executor",
    "Executor",
    "Session",
    "ExecResult",
    "ExecStatus",
    "CheckpointSync",
    "read_transcripts",
    "RolloutError",
    "SetupError",
    "ServerError",
    "ServerGoneError",
    "RequestError",
    "SandboxError",
    "SessionError",
    "WeightSyncError",
    "TemplateError",
    "PromptTooLongError",
    "EnvError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl_rollouts' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
