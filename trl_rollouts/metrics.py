"""Trajectories as figures in the trainer's log, and the environment's reward as a reward function.

Figures are of the main process's share of a batch: a rollout makes no collective call. Their names begin with
`rollout/`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from .trajectory import StopReason, Trajectory

logger = logging.getLogger(__name__)

_ANSWERED = (
    "exception",
    "timeout",
    "unknown_tool",
    "invalid_arguments",
    "parse_error",
    "too_many_calls",
    "killed",
    "died",
    "protocol",
)


def env_reward(env_reward: list[float | None] | None = None, **_: Any) -> list[float | None]:
    """A reward function that hands TRL what the environments gave: the sum of each trajectory's step rewards.

    None, for a failed trajectory, stays None: TRL gives such a row no advantage and leaves it out of its group's mean.
    TRL 1.3 and older count it as 0 in that mean; the row itself trains nothing there either.

    Raises:
        ValueError: the trainer's rollout did not produce the field.
    """
    if env_reward is None:
        raise ValueError(
            "env_reward: the rollout returned no field 'env_reward'. Is rollout_func one of trl_rollouts'?"
        )
    return env_reward


def figures(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means and shares over a batch, by name."""
    kept = [trajectory for trajectory in trajectories if trajectory.stop_reason is not StopReason.ERROR]
    reasons = Counter(str(trajectory.stop_reason) for trajectory in trajectories)
    calls = [call for trajectory in kept for call in trajectory.tool_calls]
    errors = Counter(str(call["error"]) for call in calls if call.get("error"))
    values: dict[str, float] = {f"rollout/stop/{reason}": reasons[reason] / len(trajectories) for reason in StopReason}
    if kept:
        values |= {
            "rollout/num_turns": fmean(trajectory.num_turns for trajectory in kept),
            "rollout/sampled_tokens": fmean(trajectory.num_sampled for trajectory in kept),
            "rollout/observed_tokens": fmean(len(t.completion_ids) - t.num_sampled for t in kept),
            "rollout/generate_s": fmean(trajectory.timings.get("generate_s", 0.0) for trajectory in kept),
            "rollout/env_s": fmean(trajectory.timings.get("env_s", 0.0) for trajectory in kept),
            "rollout/tool_calls": len(calls) / len(kept),
            "rollout/refused_actions": sum(len(_refused(trajectory)) for trajectory in kept) / len(kept),
        }
    values |= {f"rollout/tool_errors/{kind}": errors[kind] / len(kept) for kind in _ANSWERED if calls and kept}
    return values


def log_figures(trainer: Any, trajectories: Sequence[Trajectory], mode: str) -> None:
    """Put the figures where TRL averages and logs its own."""
    for name, value in figures(trajectories).items():
        trainer._metrics[mode][name].append(value)


def mostly_cut(trajectories: Sequence[Trajectory], max_completion_length: int) -> str | None:
    """A warning where nearly everything is cut by length: such a run learns nothing and shows no error."""
    cut = sum(trajectory.stop_reason is StopReason.LENGTH for trajectory in trajectories)
    if cut <= 0.9 * len(trajectories) or len(trajectories) < 2:
        return None
    return (
        f"{cut} of {len(trajectories)} trajectories were cut by length "
        f"(max_completion_length={max_completion_length}, observations included, or the server's context). Raise "
        "GRPOConfig.max_completion_length if answers need more."
    )


def all_refused(trajectories: Sequence[Trajectory]) -> str | None:
    """A warning where no turn of a batch was an action: the model is told so each time, and nobody else."""
    refused = [reason for trajectory in trajectories for reason in _refused(trajectory)]
    if len(refused) < 2 or len(refused) < sum(trajectory.num_turns for trajectory in trajectories):
        return None
    return (
        f"The environment refused all {len(refused)} actions of a batch. The first: {refused[0]} Either the prompt "
        "does not say how to act, or what makes an action of the model's text (to_action) does not."
    )


def _refused(trajectory: Trajectory) -> list[str]:
    return [str(info["refused_action"]) for info in trajectory.infos if "refused_action" in info]
