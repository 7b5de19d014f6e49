"""Rollouts in milliseconds, without a model: a server that fails on demand, and the rest of a run around it.

`check_env` and `check_executor` try out what an environment and an executor of your own owe.

Nothing here needs torch, trl or vllm to import; `byte_tokenizer` and `tiny_model` need transformers when called.
"""

from .client import ScriptedClient
from .envs import check_env
from .executors import check_executor
from .faults import (
    BrokenBody,
    CutOff,
    ForeignTokenId,
    Garbage,
    Late,
    LongTokenIds,
    NaNLogprob,
    NoLogprobs,
    NoTokenIds,
    NullLogprob,
    Reordered,
    Reset,
    Restart,
    SeededFaults,
    Silence,
    Status,
    Trickle,
    WrongCount,
    WrongIndex,
    WrongPromptIds,
)
from .model import Reply
from .server import FakeServer
from .tokenizer import byte_tokenizer, tiny_model
from .trainer import fake_trainer

__all__ = [
    "BrokenBody",
    "CutOff",
    "FakeServer",
    "ForeignTokenId",
    "Garbage",
    "Late",
    "LongTokenIds",
    "NaNLogprob",
    "NoLogprobs",
    "NoTokenIds",
    "NullLogprob",
    "Reordered",
    "Reply",
    "Reset",
    "Restart",
    "ScriptedClient",
    "SeededFaults",
    "Silence",
    "Status",
    "Trickle",
    "WrongCount",
    "WrongIndex",
    "WrongPromptIds",
    "byte_tokenizer",
    "check_env",
    "check_executor",
    "fake_trainer",
    "tiny_model",
]
