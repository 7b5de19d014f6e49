"""What every rollout takes besides its own arguments, and what is wrong with what it was given."""

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from .clients import Client
from .errors import SetupError
from .parsing import Parser
from .weights import CheckpointSync


class RolloutOptions(TypedDict, total=False):
    """What every rollout takes besides its own arguments. Sampling is not among them: it is `GRPOConfig`'s.

    Attributes:
        base_url: the vLLM server, or several that serve the same model. By default, the one in the trainer's config.
        client: samples in place of a server, such as `trl_rollouts.testing.ScriptedClient`.
        parser: takes a completion's text, returns the assistant's message with its tool calls. By default found from
            the chat template, or refused.
        max_concurrency: trajectories under way at a time (256).
        request_timeout_s: seconds that one request may take, queueing in the server included (600).
        trajectory_timeout_s: seconds after which a trajectory ends with the turns it has (1500, below torch's 1800
            for a waiting process).
        transcript_dir: folder for one JSON line a trajectory; none by default.
        weight_sync: how the server gets the trainer's weights where TRL does not sync them. "auto": by
            `CheckpointSync` with `use_vllm=False`, by TRL itself with its server mode. None: not at all.
    """

    base_url: str | Sequence[str] | None
    client: Client | None
    parser: Parser | None
    max_concurrency: int
    request_timeout_s: float
    trajectory_timeout_s: float
    transcript_dir: str | os.PathLike[str] | None
    weight_sync: CheckpointSync | Literal["auto"] | None


_SAMPLING = frozenset("temperature top_p top_k min_p repetition_penalty max_completion_length num_generations".split())


def check_names(options: Iterable[str], own: Sequence[str]) -> None:
    """Raises `SetupError` for an option that there is none of. `own`: the rollout's arguments besides."""
    known = [*own, *RolloutOptions.__annotations__]
    for name in options:
        if name in _SAMPLING:
            raise SetupError(f"{name} is the trainer's: set GRPOConfig.{name}. The rollout reads it at every call.")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            guess = f" Did you mean {nearest[0]}?" if nearest else ""
            raise SetupError(f"There is no option {name!r}.{guess} The options are: {', '.join(known)}.")


def check_values(options: RolloutOptions) -> None:
    """Raises `SetupError` for what cannot work."""
    base_url, parser, transcript_dir = options.get("base_url"), options.get("parser"), options.get("transcript_dir")
    for name in ("max_concurrency", "request_timeout_s", "trajectory_timeout_s"):
        check_positive(name, options.get(name, 1))
    if base_url is not None and options.get("client") is not None:
        raise SetupError("Pass base_url or client, not both.")
    if base_url is not None and not base_url:
        raise SetupError("base_url names no server.")
    weight_sync = options.get("weight_sync")
    if weight_sync not in (None, "auto") and not callable(getattr(weight_sync, "sync", None)):
        raise SetupError(f'weight_sync must be "auto", None or a CheckpointSync(), not {weight_sync!r}.')
    if parser is not None and not callable(parser):
        raise SetupError(f"parser must be a function from a completion's text to a message, not {parser!r}.")
    if transcript_dir is not None and Path(transcript_dir).is_file():
        raise SetupError(f"transcript_dir={str(transcript_dir)!r} is a file; it must be a folder.")


def check_positive(name: str, value: Any) -> None:
    """Raises `SetupError` unless it is a number above 0, and finite: a call of the rollout has an upper bound."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SetupError(f"{name} must be a positive number, not {value!r}.")
