"""One episode as the model saw it, token by token, and a batch of them as the columns TRL trains on.

A trajectory is append-only: a prompt, then completions (mask 1, with the logprobs they were sampled at) and
observations (mask 0, logprob 0.0) in the order in which the model met them. Ids are never decoded and encoded again.
A trajectory is one training row, and a row never ends on an observation.

Nothing here knows servers, environments or TRL.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Message = dict[str, Any]
"""A chat message as in the OpenAI and Hugging Face formats: `role`, `content`, and where they apply `tool_calls`,
`tool_call_id`, `name`, `reasoning_content`."""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a server sampled for one request."""

    token_ids: list[int]  # [T]
    """All sampled ids, with the one that ended the turn."""
    logprobs: list[float]  # [T]
    """Natural logarithm of the probability each id was sampled with, at the sampling temperature. NaN where the server
    could not tell: vLLM answers null for some near-certain tokens."""
    finish_reason: Literal["stop", "length"]
    """`stop`: an end-of-turn token or a stop string. `length`: cut by `max_tokens` or by the server's context."""


class StopReason(StrEnum):
    """Why a trajectory ended."""

    TERMINATED = "terminated"
    """The environment says the episode is over; for tools: the model answered without a call."""
    TRUNCATED = "truncated"
    """The environment cut the episode short, by a limit of its own."""
    MAX_TURNS = "max_turns"
    """The rollout's turns are used up."""
    LENGTH = "length"
    """The completion was cut, or what follows does not fit: `max_completion_length` or the server's context."""
    TIMEOUT = "timeout"
    """The trajectory's wall-clock limit passed; the turns that were finished are kept."""
    ERROR = "error"
    """The trajectory failed. Its tokens are masked and its reward is None."""


@dataclass(slots=True)
class Trajectory:
    """One episode, built by its `append_...`s; `columns` turns a list of them into a batch."""

    prompt_ids: list[int] = field(default_factory=list)  # [P]
    completion_ids: list[int] = field(default_factory=list)  # [C]
    env_mask: list[int] = field(default_factory=list)  # [C]
    """1 where the model sampled the token, 0 where it observed it (TRL's polarity: 1 is trained). A sampled token
    whose logprob is unknown is 0 too: no value could stand in for it without biasing the importance ratio."""
    logprobs: list[float] = field(default_factory=list)  # [C]
    """As sampled; 0.0 where observed."""
    messages: list[Message] = field(default_factory=list)
    """The conversation that the ids spell out, opening messages included."""
    step_rewards: list[float] = field(default_factory=list)  # [num_turns]
    infos: list[dict[str, Any]] = field(default_factory=list)  # [num_turns]
    """What the environment reported beside each step."""
    stop_reason: StopReason | None = None
    error: str | None = None
    cause: Exception | None = None
    """The exception behind `error`, for the traceback; never sent to the trainer."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds spent in `generate_s` (queueing included), `env_s`, `total_s`."""
    started_at: float = field(default_factory=time.monotonic)
    num_kept: int = 0
    """Length of the row up to the end of the last completion: what `end` keeps."""
    num_messages_kept: int = 0
    """The same of the messages."""
    finished: tuple[int, int] = (0, 0)
    """Both, up to the last completion that the environment has answered."""

    @property
    def num_turns(self) -> int:
        """Environment steps taken."""
        return len(self.step_rewards)

    @property
    def reward(self) -> float | None:
        """Sum of the step rewards; None if the trajectory failed."""
        return None if self.stop_reason is StopReason.ERROR else sum(self.step_rewards)

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls that the environment reported in `info["tool_calls"]`, in order, over all turns."""
        return [call for info in self.infos for call in info.get("tool_calls", ())]

    @property
    def num_sampled(self) -> int:
        """Tokens that count as sampled."""
        return sum(self.env_mask)

    def append_completion(self, completion: Completion) -> None:
        lengths = len(completion.token_ids), len(completion.logprobs)
        assert lengths[0] == lengths[1] > 0, f"the client returned {lengths[0]} ids and {lengths[1]} logprobs"
        known = [math.isfinite(logprob) for logprob in completion.logprobs]
        self.completion_ids += completion.token_ids
        self.env_mask += [int(is_known) for is_known in known]
        self.logprobs += [lp if is_known else 0.0 for lp, is_known in zip(completion.logprobs, known, strict=True)]
        self.num_kept = len(self.completion_ids)

    def append_action(self, message: Message) -> None:
        """The last completion as the environment takes it."""
        self.messages.append(message)
        self.num_messages_kept = len(self.messages)

    def append_step(self, reward: float, info: dict[str, Any]) -> None:
        """What the environment made of it. `info` and its calls are copied: an environment may use its own again."""
        self.finished = self.num_kept, self.num_messages_kept
        self.step_rewards.append(reward)
        self.infos.append({**info, "tool_calls": list(info["tool_calls"])} if "tool_calls" in info else dict(info))

    def add_reward(self, reward: float) -> None:
        """What was earned beside the steps' own rewards, at the end: it counts as the last step's."""
        assert self.step_rewards, "a trajectory that has not failed has a turn"
        self.step_rewards[-1] += reward

    def append_observation(self, token_ids: list[int]) -> None:
        assert self.completion_ids, "an observation follows a completion"
        self.completion_ids += token_ids
        self.env_mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def end(self, reason: StopReason) -> None:
        """Close the trajectory. An observation that no completion follows is dropped from the row."""
        for column in (self.completion_ids, self.env_mask, self.logprobs):
            del column[self.num_kept :]
        if self.num_messages_kept:
            del self.messages[self.num_messages_kept :]
        self.stop_reason = reason
        self.timings["total_s"] = time.monotonic() - self.started_at

    def end_at_finished_turn(self, reason: StopReason) -> None:
        """Close the trajectory without the completion that the environment has not answered: nothing rewards it."""
        self.num_kept, self.num_messages_kept = self.finished
        self.end(reason)

    def fail(self, cause: Exception) -> None:
        """Close the trajectory as failed: tokens so far are kept, and `columns` masks them all."""
        self.error, self.cause = f"{type(cause).__name__}: {cause}", cause
        self.end(StopReason.ERROR)


def columns(trajectories: Sequence[Trajectory], *, placeholder_id: int) -> dict[str, list[Any]]:
    """A batch as TRL's `rollout_func` returns it: one entry a trajectory in every list, in order.

    A failed trajectory becomes a valid row that trains nothing: its tokens (or, where there are none, the single
    `placeholder_id`), mask 0, logprobs 0.0, `env_reward` None.
    """
    rows = [_row(trajectory, placeholder_id) for trajectory in trajectories]
    for row in rows:
        _check(row)
    return {name: [row[name] for row in rows] for name in FIELDS}


FIELDS = (
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "env_mask",
    "env_reward",
    "step_rewards",
    "num_turns",
    "stop_reason",
    "transcript",
    "tool_calls",
    "rollout_error",
)
"""The columns' names. Those after `env_mask` reach the reward functions."""


def _row(trajectory: Trajectory, placeholder_id: int) -> dict[str, Any]:
    assert trajectory.stop_reason is not None, "a trajectory is returned once it has ended"
    completion_ids, env_mask, logprobs = trajectory.completion_ids, trajectory.env_mask, trajectory.logprobs
    if trajectory.stop_reason is StopReason.ERROR:
        completion_ids = completion_ids or [placeholder_id]
        env_mask = [0] * len(completion_ids)
        logprobs = [0.0] * len(completion_ids)
    return {
        "prompt_ids": trajectory.prompt_ids or [placeholder_id],
        "completion_ids": completion_ids,
        "logprobs": logprobs,
        "env_mask": env_mask,
        "env_reward": trajectory.reward,
        "step_rewards": trajectory.step_rewards,
        "num_turns": trajectory.num_turns,
        "stop_reason": str(trajectory.stop_reason),
        "transcript": trajectory.messages,
        "tool_calls": trajectory.tool_calls,
        "rollout_error": trajectory.error,
    }


def _check(row: dict[str, Any]) -> None:
    """What TRL does not check: it pads a short mask with 1 and short logprobs with 0.0, without a word."""
    ids, mask, logprobs = row["completion_ids"], row["env_mask"], row["logprobs"]
    assert len(row["prompt_ids"]) >= 1
    assert len(ids) == len(mask) == len(logprobs) >= 1, (len(ids), len(mask), len(logprobs))
    assert all(type(token_id) is int for token_id in row["prompt_ids"] + ids)
    assert all(flag == 1 or (flag == 0 and logprob == 0.0) for flag, logprob in zip(mask, logprobs, strict=True))
