"""What TRL trains on, on literal ids, masks and logprobs."""

import math

import pytest

from trl_rollouts.trajectory import Completion, StopReason, Trajectory, columns


def two_turns() -> Trajectory:
    """Prompt [1, 2]; samples [11, 12]; observes [99, 98]; samples [21, 22]."""
    trajectory = Trajectory(prompt_ids=[1, 2])
    trajectory.append_completion(Completion([11, 12], [-0.1, -0.2], "stop"))
    trajectory.append_observation([99, 98])
    trajectory.append_completion(Completion([21, 22], [-0.3, -0.4], "stop"))
    trajectory.step_rewards, trajectory.infos = [0.5, 1.0], [{"tool_calls": [{"name": "f"}]}, {}]
    trajectory.end(StopReason.TERMINATED)
    return trajectory


def test_the_prompt_stays_the_first_request_and_observations_stand_between_the_turns() -> None:
    batch = columns([two_turns()], placeholder_id=0)
    assert batch["prompt_ids"] == [[1, 2]]
    assert batch["completion_ids"] == [[11, 12, 99, 98, 21, 22]]
    assert batch["env_mask"] == [[1, 1, 0, 0, 1, 1]]
    assert batch["logprobs"] == [[-0.1, -0.2, 0.0, 0.0, -0.3, -0.4]]


def test_a_row_never_ends_on_an_observation() -> None:
    trajectory = Trajectory(prompt_ids=[1])
    trajectory.append_completion(Completion([11], [-0.1], "stop"))
    trajectory.append_observation([99, 98])
    trajectory.end(StopReason.TIMEOUT)
    assert (trajectory.completion_ids, trajectory.env_mask, trajectory.logprobs) == ([11], [1], [-0.1])


def test_a_sampled_token_whose_logprob_is_unknown_is_kept_and_not_trained() -> None:
    trajectory = Trajectory(prompt_ids=[1])
    trajectory.append_completion(Completion([11, 12], [-0.1, math.nan], "stop"))
    trajectory.end(StopReason.TERMINATED)
    assert (trajectory.completion_ids, trajectory.env_mask, trajectory.logprobs) == ([11, 12], [1, 0], [-0.1, 0.0])


def test_a_trajectory_that_failed_before_its_first_token_is_one_masked_placeholder() -> None:
    trajectory = Trajectory()
    trajectory.fail(ValueError("no such game"))
    batch = columns([trajectory], placeholder_id=7)
    assert batch == {
        "prompt_ids": [[7]],
        "completion_ids": [[7]],
        "logprobs": [[0.0]],
        "env_mask": [[0]],
        "env_reward": [None],
        "step_rewards": [[]],
        "num_turns": [0],
        "stop_reason": ["error"],
        "transcript": [[]],
        "tool_calls": [[]],
        "rollout_error": ["ValueError: no such game"],
    }


def test_a_failed_trajectory_keeps_its_tokens_and_trains_none_of_them() -> None:
    trajectory = Trajectory(prompt_ids=[1])
    trajectory.append_completion(Completion([11, 12], [-0.1, -0.2], "stop"))
    trajectory.append_observation([99])
    trajectory.step_rewards = [1.0]
    trajectory.fail(RuntimeError("lost"))
    batch = columns([trajectory, two_turns()], placeholder_id=0)
    assert batch["completion_ids"][0] == [11, 12]
    assert (batch["env_mask"][0], batch["logprobs"][0], batch["env_reward"][0]) == ([0, 0], [0.0, 0.0], None)
    assert batch["env_mask"][1] == [1, 1, 0, 0, 1, 1]


def test_an_environment_may_use_its_info_again() -> None:
    trajectory, info = Trajectory(), {"tool_calls": [{"name": "f"}]}
    trajectory.append_step(1.0, info)
    info["tool_calls"].append({"name": "g"})
    trajectory.append_step(1.0, info)
    assert [call["name"] for call in trajectory.tool_calls] == ["f", "f", "g"]


def test_every_field_is_a_plain_list_with_one_entry_a_row() -> None:
    batch = columns([two_turns(), two_turns()], placeholder_id=0)
    assert {name: (type(values), len(values)) for name, values in batch.items()} == dict.fromkeys(batch, (list, 2))
    assert batch["env_reward"] == [1.5, 1.5]
    assert batch["step_rewards"] == [[0.5, 1.0], [0.5, 1.0]]
    assert batch["tool_calls"] == [[{"name": "f"}], [{"name": "f"}]]
    assert batch["stop_reason"] == ["terminated", "terminated"]


def test_no_trajectories_are_empty_columns() -> None:
    batch = columns([], placeholder_id=0)
    assert batch["prompt_ids"] == batch["completion_ids"] == batch["logprobs"] == batch["env_mask"] == []


def test_lengths_that_disagree_do_not_reach_the_trainer() -> None:
    trajectory = two_turns()
    trajectory.env_mask.pop()
    with pytest.raises(AssertionError):
        columns([trajectory], placeholder_id=0)
