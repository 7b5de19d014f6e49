"""Everything of GRPOConfig is sent, and nothing is left for the server to fill in."""

from types import SimpleNamespace
from typing import Any

import pytest

from trl_rollouts import Sampling, SetupError


def config(**changes: Any) -> SimpleNamespace:
    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 256,
        "generation_kwargs": None,
    }
    return SimpleNamespace(**(defaults | changes))


def test_defaults_are_sent_in_full() -> None:
    assert Sampling.from_config(config()).body() == {
        "max_tokens": 256,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def test_every_sampling_field_of_the_config_reaches_the_request() -> None:
    fields = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.2}
    body = Sampling.from_config(config(**fields, max_completion_length=64)).body()
    assert body == {**fields, "max_tokens": 64}


def test_generation_kwargs_override_the_named_fields_and_unknown_ones_pass_through() -> None:
    given = {"temperature": 0.3, "min_p": 0.1, "max_tokens": 8, "frequency_penalty": 0.5, "whatever": [1]}
    body = Sampling.from_config(config(generation_kwargs=given)).body()
    assert body["temperature"] == 0.3
    assert body["min_p"] == 0.1
    assert body["max_tokens"] == 8
    assert body["frequency_penalty"] == 0.5
    assert body["whatever"] == [1]


@pytest.mark.parametrize("stop", ["</code>", ["</code>"]])
def test_a_stop_string_keeps_its_text(stop: str | list[str]) -> None:
    body = Sampling.from_config(config(generation_kwargs={"stop": stop})).body()
    assert body["stop"] == ["</code>"]
    assert body["include_stop_str_in_output"] is True


@pytest.mark.parametrize("name", ["n", "logprobs", "prompt", "model"])
def test_a_field_that_the_rollout_sets_itself_is_refused_by_name(name: str) -> None:
    with pytest.raises(SetupError, match=f"'{name}'.*Remove them from GRPOConfig.generation_kwargs"):
        Sampling.from_config(config(generation_kwargs={name: 4}))


def test_max_tokens_never_exceed_what_is_left() -> None:
    sampling = Sampling.from_config(config(max_completion_length=100))
    assert sampling.limited(40).max_tokens == 40
    assert Sampling.from_config(config(generation_kwargs={"max_tokens": 8})).limited(40).max_tokens == 8


def test_a_seed_becomes_a_different_one_for_each_trajectory_and_turn() -> None:
    sampling = Sampling.from_config(config(generation_kwargs={"seed": 7}))
    seeds = {sampling.seeded(trajectory, turn).body()["seed"] for trajectory in range(10) for turn in range(10)}
    assert len(seeds) == 100


def test_without_a_seed_none_is_sent() -> None:
    assert "seed" not in Sampling.from_config(config()).seeded(3, 1).body()


def test_a_structured_output_regex_is_sent() -> None:
    body = Sampling.from_config(config(vllm_structured_outputs_regex="[0-9]+")).body()
    assert body["structured_outputs"] == {"regex": "[0-9]+"}


def test_the_ids_that_end_a_turn_here_are_sent_beside_the_users() -> None:
    sampling = Sampling.from_config(config(generation_kwargs={"stop_token_ids": [7]}))
    assert sampling.ending_at({258, 256}).body()["stop_token_ids"] == [7, 256, 258]


def test_a_user_who_ignores_the_end_of_turns_is_not_stopped_at_it() -> None:
    sampling = Sampling.from_config(config(generation_kwargs={"ignore_eos": True}))
    assert "stop_token_ids" not in sampling.ending_at({258}).body()


def test_stop_token_ids_that_are_no_list_are_refused() -> None:
    with pytest.raises(SetupError, match="stop_token_ids must be a list of ids, not 7"):
        Sampling.from_config(config(generation_kwargs={"stop_token_ids": 7}))
