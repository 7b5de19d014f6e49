"""The fakes that tests of rollouts stand on. Servers are spoken to over plain HTTP, without this package's clients."""

import asyncio
import dataclasses
import json
import math
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_rollouts.errors import RequestError
from trl_rollouts.sampling import Sampling
from trl_rollouts.testing import (
    BrokenBody,
    CutOff,
    FakeServer,
    ForeignTokenId,
    Garbage,
    LongTokenIds,
    NaNLogprob,
    NoLogprobs,
    NoTokenIds,
    NullLogprob,
    Reordered,
    Reply,
    Reset,
    ScriptedClient,
    Silence,
    Status,
    Trickle,
    WrongCount,
    WrongIndex,
    WrongPromptIds,
    byte_tokenizer,
    fake_trainer,
    tiny_model,
)

PAD, START, EOS, THINK, UNTHINK, CALL, UNCALL = 256, 257, 258, 259, 260, 261, 262
TOKENIZER = byte_tokenizer()
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 0}


def complete(server: FakeServer, prompt: Any = (65,), timeout: float = 10.0, **fields: Any) -> requests.Response:
    prompt = list(prompt) if isinstance(prompt, tuple) else prompt
    body = {"model": "fake", "prompt": prompt, "max_tokens": 16, **IDS, **fields}
    return requests.post(f"{server.base_url}/v1/completions", json=body, timeout=timeout)


def choice(server: FakeServer, prompt: Any = (65,), **fields: Any) -> dict[str, Any]:
    response = complete(server, prompt, **fields)
    assert response.status_code == 200, response.text
    (only,) = response.json()["choices"]
    return dict(only)


def generate(server: FakeServer, prompts: Any, timeout: float = 10.0, **fields: Any) -> requests.Response:
    body = {"prompts": prompts, "max_tokens": 16, **fields}
    return requests.post(f"{server.base_url}/generate/", json=body, timeout=timeout)


# The tokenizer and the model


def test_an_id_below_256_is_its_byte() -> None:
    assert TOKENIZER("Az\n\xe9")["input_ids"] == [65, 122, 10, 0xC3, 0xA9]


def test_special_tokens_and_tags_follow_the_bytes() -> None:
    ids = TOKENIZER("<|endoftext|><|im_start|><|im_end|><think></think><tool_call></tool_call>")["input_ids"]
    assert ids == [PAD, START, EOS, THINK, UNTHINK, CALL, UNCALL]
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id) == (PAD, EOS)


def test_tags_survive_skipping_special_tokens() -> None:
    assert TOKENIZER.decode([CALL, 65, UNCALL, EOS], skip_special_tokens=True) == "<tool_call>A</tool_call>"


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text


def test_merges_make_sampled_ids_that_their_text_does_not_encode_to() -> None:
    tokenizer = byte_tokenizer([("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), (" ", "hello")])
    he, llo, hello, spaced = 265, 267, 268, 269
    assert tokenizer.decode([he, llo]) == "hello"
    assert tokenizer("hello")["input_ids"] == [hello]
    assert tokenizer(" hello<|im_end|>")["input_ids"] == [spaced, EOS]


def test_the_tokenizer_survives_saving_and_pickling(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer: Any = byte_tokenizer([("h", "e")])
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "he said <tool_call> \U0001f600"}]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    copies: list[Any] = [AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))]
    for copy in copies:
        assert copy.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == expected
        assert (copy.eos_token_id, copy.pad_token_id, len(copy)) == (EOS, PAD, 266)


def render(messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return str(TOKENIZER.apply_chat_template(messages, tokenize=False, **kwargs))


def test_the_template_is_chatml() -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    expected = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    assert render(messages) == expected
    assert render(messages, add_generation_prompt=True) == expected + "<|im_start|>assistant\n"


def test_without_thinking_the_prompt_ends_on_empty_thoughts() -> None:
    text = render([{"role": "user", "content": "U"}], add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_template_shows_tools_after_the_system_text() -> None:
    text = render([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}], tools=[ADD])
    assert text.startswith("<|im_start|>system\nS\n\n# Tools\n\n")
    assert "<tools>\n" + json.dumps(ADD) + "\n</tools>" in text
    assert text.count("<|im_start|>system") == 1


def test_the_template_writes_calls_and_groups_their_results() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning_content": "R", "content": "C", "tool_calls": [call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    assert render(messages) == (
        "<|im_start|>assistant\n<think>\nR\n</think>\n\nC\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )
    assert render([{"role": "assistant", "tool_calls": [call, call]}]).startswith("<|im_start|>assistant\n<tool_call>")


def test_the_tiny_model_is_the_same_each_time_and_leaves_the_seed_alone() -> None:
    import torch

    state = torch.random.get_rng_state()
    one, two = tiny_model(TOKENIZER), tiny_model(TOKENIZER)
    assert torch.equal(torch.random.get_rng_state(), state)
    logits = one(torch.tensor([[START, 65, EOS]])).logits
    assert logits.shape == (1, 3, 265)
    assert torch.equal(logits, two(torch.tensor([[START, 65, EOS]])).logits)


# vLLM's protocol


def test_text_is_encoded_and_ends_the_turn() -> None:
    with FakeServer(["Hi"]) as server:
        answer = choice(server, [65, 66])
    assert answer["token_ids"] == [72, 105, EOS]
    assert answer["prompt_token_ids"] == [65, 66]
    assert answer["text"] == "Hi"
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", None)


def test_the_whole_answer_reads_as_vllms() -> None:
    with FakeServer([[72, EOS]], model="m") as server:
        answer = complete(server, model="m", temperature=0.5).json()
        logprobs = [server.logprob(72, 0.5), server.logprob(EOS, 0.5)]
    assert answer.pop("id").startswith("cmpl-")
    assert answer == {
        "object": "text_completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "text": "H",
                "logprobs": {
                    "text_offset": [0, 11],
                    "token_logprobs": logprobs,
                    "tokens": ["token_id:72", "token_id:258"],
                    "top_logprobs": [{"token_id:72": logprobs[0]}, {"token_id:258": logprobs[1]}],
                },
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": [72, EOS],
                "prompt_logprobs": None,
                "prompt_token_ids": [65],
                "routed_experts": None,
            }
        ],
        "service_tier": None,
        "system_fingerprint": "fake",
        "usage": {
            "prompt_tokens": 1,
            "total_tokens": 3,
            "completion_tokens": 2,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "metrics": None,
    }


def test_ids_and_logprobs_come_only_where_asked_for() -> None:
    with FakeServer(["Hi", "Hi"]) as server:
        bare = choice(server, return_token_ids=False, logprobs=None)
        named = choice(server, return_tokens_as_token_ids=False)
    assert (bare["token_ids"], bare["prompt_token_ids"], bare["logprobs"]) == (None, None, None)
    assert named["logprobs"]["tokens"] == ["H", "i", "<|im_end|>"]


def test_max_tokens_cuts_and_says_so() -> None:
    with FakeServer([[1, 2, 3], [1, 2, EOS]]) as server:
        cut, ended = choice(server, max_tokens=2), choice(server, max_tokens=3)
    assert (cut["token_ids"], cut["finish_reason"]) == ([1, 2], "length")
    assert (ended["token_ids"], ended["finish_reason"]) == ([1, 2, EOS], "stop")


def test_stop_strings_and_ids_end_a_reply_with_all_its_ids() -> None:
    with FakeServer(lambda _: "abcdef") as server:
        cut, whole = choice(server, stop=["cd"]), choice(server, stop="cd", include_stop_str_in_output=True)
        by_id = choice(server, stop_token_ids=[98])
    assert cut["token_ids"] == whole["token_ids"] == [97, 98, 99, 100]
    assert (cut["text"], whole["text"]) == ("ab", "abcd")
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "cd")
    assert (by_id["token_ids"], by_id["text"], by_id["stop_reason"]) == ([97, 98], "a", 98)


def test_a_reply_is_sent_exactly_as_given() -> None:
    with FakeServer([Reply([5000, EOS, 7], logprobs=[-0.5, -0.25, -0.125], finish_reason="length")]) as server:
        answer = choice(server)
    assert answer["token_ids"] == [5000, EOS, 7]
    assert answer["logprobs"]["token_logprobs"] == [-0.5, -0.25, -0.125]
    assert answer["finish_reason"] == "length"


def test_a_reply_with_another_number_of_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 ids has 1 logprobs"):
        Reply([1, 2], logprobs=[-0.5])


def test_a_single_text_is_no_script() -> None:
    with pytest.raises(ValueError, match="Put it into a list"):
        FakeServer("Hi")


def test_logprobs_are_the_softmax_of_one_distribution_at_the_temperature() -> None:
    with FakeServer([]) as server:
        for temperature in (0.5, 1.0, 2.0):
            logprobs = [server.logprob(token_id, temperature) for token_id in range(len(TOKENIZER))]
            assert math.isclose(sum(map(math.exp, logprobs)), 1.0)
            assert len(set(logprobs)) == len(TOKENIZER)
        scaled = [server.logprob(token_id) / 0.5 for token_id in range(len(TOKENIZER))]
        log_sum = math.log(sum(map(math.exp, scaled)))
        assert math.isclose(server.logprob(65, 0.5), scaled[65] - log_sum)


def test_one_top_logprob_is_the_likeliest_token_beside_the_sampled() -> None:
    with FakeServer([[65]]) as server:
        (top,) = choice(server, logprobs=1)["logprobs"]["top_logprobs"]
        best = max(range(len(TOKENIZER)), key=server.logprob)
        assert top == {"token_id:65": server.logprob(65), f"token_id:{best}": server.logprob(best)}


def test_raw_logprobs_do_not_depend_on_temperature() -> None:
    with FakeServer(lambda _: [65], logprobs_mode="raw_logprobs") as server:
        cold, hot = choice(server, temperature=0.5), choice(server, temperature=2.0)
    with FakeServer(lambda _: [65]) as server:
        assert choice(server, temperature=2.0)["logprobs"] != hot["logprobs"]
    assert cold["logprobs"] == hot["logprobs"]


def test_several_prompts_and_n_give_choices_in_order() -> None:
    with FakeServer(lambda prompt_ids: [*prompt_ids, EOS]) as server:
        choices = complete(server, [[1], [2]], n=2).json()["choices"]
    assert [(one["index"], one["token_ids"][0]) for one in choices] == [(0, 1), (1, 1), (2, 2), (3, 2)]


def test_a_text_prompt_shows_the_servers_ids_and_uses_no_reply() -> None:
    with FakeServer(["Hi"], faults=[NoLogprobs()]) as server:
        assert choice(server, "A\n")["prompt_token_ids"] == [65, 10]
        assert choice(server, [65])["logprobs"] is None
        assert server.prompts == [[65]]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        (
            {"prompt": [1] * 30},
            400,
            "This model's maximum context length is 32 tokens. However, you requested 16 output tokens and your "
            "prompt contains 30 input tokens, for a total of 46 tokens. Please reduce the length of the input prompt "
            "or the number of requested output tokens. (parameter=input_tokens, value=30)",
        ),
        (
            {"prompt": [1] * 17},
            400,
            "This model's maximum context length is 32 tokens. However, you requested 16 output tokens and your "
            "prompt contains at least 17 input tokens, for a total of at least 33 tokens. Please reduce the length of "
            "the input prompt or the number of requested output tokens. (parameter=input_tokens, value=17)",
        ),
        ({"model": "other"}, 404, "The model `other` does not exist."),
        ({"prompt": [1, 999]}, 400, "Token id 999 is out of vocabulary"),
        ({"prompt": []}, 400, "You must pass at least one prompt"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"),
        ({"temperature": -1}, 400, "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)"),
    ],
)
def test_what_vllm_refuses_is_refused_in_its_words(fields: dict[str, Any], status: int, message: str) -> None:
    with FakeServer([], max_model_len=32) as server:
        response = complete(server, **fields)
    assert response.status_code == status
    assert response.json()["error"]["message"] == message
    assert response.json()["error"]["code"] == status


def test_vllm_says_what_it_is() -> None:
    with FakeServer([], model="m", max_model_len=99) as server:
        get = {path: requests.get(server.base_url + path, timeout=5) for path in ("/health", "/version", "/v1/models")}
        info = requests.get(f"{server.base_url}/server_info?config_format=json", timeout=5).json()
    assert (get["/health"].status_code, get["/health"].content) == (200, b"")
    assert get["/version"].json() == {"version": "0.31.0"}
    (model,) = get["/v1/models"].json()["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("m", "m", 99)
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "processed_logprobs"


def test_weight_calls_are_recorded_in_order() -> None:
    reload = {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}
    with FakeServer([]) as server:
        assert requests.post(f"{server.base_url}/collective_rpc", json=reload, timeout=5).json() == {"results": [None]}
        assert requests.post(f"{server.base_url}/reset_prefix_cache", timeout=5).json() == {"success": True}
    assert server.requests == [("/collective_rpc", reload), ("/reset_prefix_cache", None)]


def test_the_prefix_cache_is_not_reset_while_a_request_uses_it() -> None:
    def reset(server: FakeServer) -> Any:
        return requests.post(f"{server.base_url}/reset_prefix_cache", timeout=5).json()

    with FakeServer([Reply([EOS], delay_s=0.5)]) as server, ThreadPoolExecutor(1) as waiting:
        running = waiting.submit(choice, server)
        while not server.served_at_once:
            time.sleep(0.01)
        assert reset(server) == {"success": False}
        running.result()
        assert reset(server) == {"success": True}


def test_without_dev_mode_there_are_no_weight_calls() -> None:
    with FakeServer([], dev_mode=False) as server:
        response = requests.post(f"{server.base_url}/collective_rpc", json={}, timeout=5)
    assert (response.status_code, response.json()) == (404, {"detail": "Not Found"})


def test_vllm_serves_requests_at_once() -> None:
    with FakeServer(lambda _: Reply([EOS], delay_s=0.2)) as server, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: choice(server), range(8)))
    assert (server.max_in_flight, server.served_at_once) == (8, 8)


# TRL's protocol


def test_trl_answers_a_batch() -> None:
    with FakeServer(lambda prompt_ids: [*prompt_ids, EOS], protocol="trl") as server:
        answer = generate(server, [[1, 2], [3]], temperature=0.5).json()
        logprob = server.logprob(3, 0.5)
    assert answer["prompt_ids"] == [[1, 2], [3]]
    assert answer["completion_ids"] == [[1, 2, EOS], [3, EOS]]
    assert answer["logprobs"][1][0] == [logprob]
    assert answer["logprob_token_ids"] == [[[1], [2], [EOS]], [[3], [EOS]]]
    assert list(answer) == ["prompt_ids", "completion_ids", "logprobs", "logprob_token_ids"]
    assert server.prompts == [[1, 2], [3]]


def test_trl_merges_generation_kwargs_over_the_named_fields() -> None:
    with FakeServer(lambda _: "abcdef", protocol="trl") as server:
        answer = generate(server, [[1], [2]], generation_kwargs={"max_tokens": 2, "n": 2}).json()
        stopped = generate(server, [[1]], generation_kwargs={"stop": ["c"]}).json()
    assert answer["completion_ids"] == [[97, 98]] * 4
    assert answer["prompt_ids"] == [[1], [2]]
    assert stopped["completion_ids"] == [[97, 98, 99]]


def test_trl_sorts_logprobs_by_rank() -> None:
    with FakeServer([[65]], protocol="trl") as server:
        answer = generate(server, [[1]], logprobs=1).json()
        best = max(range(len(TOKENIZER)), key=server.logprob)
    assert answer["logprob_token_ids"] == [[[best, 65]]]


def test_trl_takes_text_and_shows_its_ids() -> None:
    with FakeServer([], protocol="trl") as server:
        assert generate(server, ["A\n"], max_tokens=1).json()["prompt_ids"] == [[65, 10]]


@pytest.mark.parametrize(
    ("prompts", "where"),
    [
        ("A", [["list[str]"], ["list[list[int]]"]]),
        ([1], [["list[str]", 0], ["list[list[int]]", 0]]),
        (["A", [1]], [["list[str]", 1], ["list[list[int]]", 0]]),
        ([[{"role": "user"}]], [["list[str]", 0], ["list[list[int]]", 0, 0]]),
    ],
)
def test_trl_takes_only_texts_or_ids(prompts: Any, where: list[list[Any]]) -> None:
    with FakeServer([], protocol="trl") as server:
        response = generate(server, prompts)
    assert response.status_code == 422
    assert [one["loc"] for one in response.json()["detail"]] == [["body", "prompts", *path] for path in where]


def test_trl_serves_one_request_at_a_time_and_no_health_meanwhile() -> None:
    with FakeServer(lambda _: Reply([EOS], delay_s=0.2), protocol="trl") as server:
        started = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            running = [pool.submit(generate, server, [[1], [2]]) for _ in range(3)]
            while len(server.requests) < 3:
                time.sleep(0.01)
            assert requests.get(f"{server.base_url}/health/", timeout=5).json() == {"status": "ok"}
            assert time.monotonic() - started > 0.55
            assert [one.result().status_code for one in running] == [200] * 3
    assert (server.max_in_flight, server.served_at_once) == (3, 1)


def test_an_over_long_prompt_hangs_trls_server_until_a_restart() -> None:
    with FakeServer(["Hi"], protocol="trl", max_model_len=8) as server:
        with pytest.raises(requests.Timeout):
            generate(server, [[1] * 8], timeout=0.2)
        with pytest.raises(requests.Timeout):
            requests.get(f"{server.base_url}/health/", timeout=0.2)
        server.restart()
        assert generate(server, [[1]]).json()["completion_ids"] == [[72, 105, EOS]]


def test_trls_completions_end_with_the_context() -> None:
    with FakeServer(["abcdef"], protocol="trl", max_model_len=8) as server:
        assert generate(server, [[1] * 6]).json()["completion_ids"] == [[97, 98]]


# Both


@pytest.mark.parametrize(
    ("protocol", "path", "status"),
    [
        ("vllm", "/generate/", 404),
        ("vllm", "/health/", 307),
        ("vllm", "/get_world_size/", 307),
        ("vllm", "/v1/completions", 405),
        ("trl", "/v1/models", 404),
        ("trl", "/version", 404),
        ("trl", "/health", 307),
        ("trl", "/generate/", 405),
    ],
)
def test_the_other_protocol_is_not_spoken(protocol: Any, path: str, status: int) -> None:
    with FakeServer([], protocol=protocol) as server:
        response = requests.get(server.base_url + path, timeout=5, allow_redirects=False)
    assert response.status_code == status
    if status == 404:
        assert response.json() == {"detail": "Not Found"}
    if status == 405:
        assert (response.json(), response.headers["allow"]) == ({"detail": "Method Not Allowed"}, "POST")


@pytest.mark.parametrize(
    ("protocol", "path", "status"), [("vllm", "/v1/completions", 400), ("trl", "/generate/", 422)]
)
def test_a_body_that_is_no_json_is_refused(protocol: Any, path: str, status: int) -> None:
    with FakeServer([], protocol=protocol) as server:
        assert requests.post(server.base_url + path, data="{no", timeout=5).status_code == status


def test_another_protocol_than_the_two_is_refused() -> None:
    with pytest.raises(ValueError, match="'sglang'; it is 'vllm' or 'trl'"):
        FakeServer([], protocol="sglang")  # type: ignore[arg-type]


def test_an_error_in_the_script_is_answered_and_raised_at_the_end() -> None:
    def reply(prompt_ids: list[int]) -> str:
        raise KeyError("from the script")

    server = FakeServer(reply)
    server.start()
    assert complete(server).status_code == 400
    with pytest.raises(KeyError, match="from the script"):
        server.__exit__(None, None, None)


def test_an_exhausted_script_is_an_error() -> None:
    with FakeServer(["a"]) as server:
        assert complete(server).status_code == 200
        assert "no reply left after 1" in complete(server).json()["error"]["message"]
        assert isinstance(server.errors.pop(), LookupError)


# Faults


def test_a_status_comes_instead_of_a_reply() -> None:
    faults = [Status(503), Status(500, "text"), Status(429, {"error": "slow"}), None]
    with FakeServer(["Hi"], faults=faults) as server:
        answers = [complete(server) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [503, 500, 429]
        assert (answers[1].text, answers[2].json()) == ("text", {"error": "slow"})
        assert choice(server)["text"] == "Hi"


def test_a_reset_closes_the_connection_and_the_server_goes_on() -> None:
    with FakeServer(["Hi"], faults=[Reset()]) as server:
        with pytest.raises(requests.ConnectionError):
            complete(server)
        assert choice(server)["text"] == "Hi"


def test_half_an_answer_is_no_json() -> None:
    with FakeServer(["Hi"], faults=[BrokenBody()]) as server, pytest.raises(requests.JSONDecodeError):
        complete(server).json()


def test_faults_can_be_chosen_by_the_request() -> None:
    def fault(body: Any) -> Status | None:
        return Status(418) if body["prompt"] == [66] else None

    with FakeServer(lambda _: "Hi", faults=fault) as server:
        assert [complete(server, [token_id]).status_code for token_id in (65, 66, 67)] == [200, 418, 200]


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (NoLogprobs(), lambda one: one["logprobs"] is None),
        (NullLogprob(1), lambda one: one["logprobs"]["token_logprobs"][1] is None),
        (NoTokenIds(), lambda one: "token_ids" not in one and "prompt_token_ids" not in one),
        (WrongPromptIds(), lambda one: one["prompt_token_ids"] == [65, 0]),
        (NaNLogprob(1), lambda one: math.isnan(one["logprobs"]["token_logprobs"][1] or 0.0)),
        (LongTokenIds(), lambda one: one["token_ids"] == [72, 105, EOS] * 2),
        (ForeignTokenId(1, 999), lambda one: one["token_ids"] == [72, 999, EOS]),
        (WrongIndex(), lambda one: one["index"] == 1),
    ],
)
def test_an_answer_of_vllm_can_be_spoiled(fault: Any, broken: Callable[[Any], bool]) -> None:
    with FakeServer(lambda _: "Hi", faults=[fault]) as server:
        assert broken(choice(server))
        assert not broken(choice(server))


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (NoLogprobs(), lambda answer: answer["logprobs"] is None),
        (NullLogprob(1), lambda answer: answer["logprobs"][0][1] == [None]),
        (NoTokenIds(), lambda answer: "completion_ids" not in answer),
        (WrongPromptIds(), lambda answer: answer["prompt_ids"] == [[65, 0]]),
        (WrongCount(), lambda answer: answer["completion_ids"] == []),
        (NaNLogprob(1), lambda answer: math.isnan(answer["logprobs"][0][1][0])),
        (LongTokenIds(), lambda answer: answer["completion_ids"] == [[72, 105, EOS] * 2]),
        (ForeignTokenId(1, 999), lambda answer: answer["completion_ids"] == [[72, 999, EOS]]),
    ],
)
def test_an_answer_of_trl_can_be_spoiled(fault: Any, broken: Callable[[Any], bool]) -> None:
    with FakeServer(lambda _: "Hi", faults=[fault], protocol="trl") as server:
        assert broken(generate(server, [[65]]).json())
        assert not broken(generate(server, [[65]]).json())


def test_whole_rows_can_change_places() -> None:
    with FakeServer(lambda ids: [*ids, EOS], faults=[Reordered()], protocol="trl") as server:
        answer = generate(server, [[1], [2]]).json()
    assert (answer["prompt_ids"], answer["completion_ids"]) == ([[2], [1]], [[2, EOS], [1, EOS]])
    assert answer["logprob_token_ids"] == [[[2], [EOS]], [[1], [EOS]]]


def test_fewer_bytes_than_were_promised_are_no_answer() -> None:
    with FakeServer(["Hi"], faults=[CutOff()]) as server, pytest.raises(requests.exceptions.ChunkedEncodingError):
        complete(server)


def test_garbage_claims_to_be_text() -> None:
    with FakeServer(["Hi"], faults=[Garbage()]) as server:
        response = complete(server)
    assert (response.status_code, response.encoding) == (200, "utf-8")
    with pytest.raises(UnicodeDecodeError):
        response.content.decode()


def test_a_trickle_is_the_whole_answer_in_pieces() -> None:
    with FakeServer(["Hi"], faults=[Trickle(over_s=0.3)]) as server:
        started = time.monotonic()
        assert choice(server)["text"] == "Hi"
        assert time.monotonic() - started >= 0.28


def test_a_choice_can_be_missing() -> None:
    with FakeServer(["Hi"], faults=[WrongCount()]) as server:
        assert complete(server).json()["choices"] == []


# Life and death


def test_stopping_drops_a_silent_request_and_ends_the_thread() -> None:
    with FakeServer([], faults=[Silence()]) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server)
        while not server.max_in_flight:
            time.sleep(0.01)
        started = time.monotonic()
        server.stop()
        assert time.monotonic() - started < 2.0
        with pytest.raises(requests.ConnectionError):
            waiting.result(timeout=5)
    assert not [thread for thread in threading.enumerate() if thread.name == "FakeServer"]


def test_a_restarted_server_has_its_address_script_and_records() -> None:
    with FakeServer(["a", "b"]) as server:
        base_url = server.base_url
        assert choice(server)["text"] == "a"
        server.stop()
        with pytest.raises(requests.ConnectionError):
            complete(server)
        server.restart()
        assert server.base_url == base_url
        assert choice(server)["text"] == "b"
    assert len(server.prompts) == 2
    server.stop()


def test_a_request_that_its_client_gave_up_is_no_longer_in_flight() -> None:
    with FakeServer(lambda _: Reply([EOS], delay_s=0.1), faults=[Silence()]) as server:
        with pytest.raises(requests.Timeout):
            complete(server, timeout=0.1)
        time.sleep(0.1)
        choice(server)
    assert server.max_in_flight == 1


def test_a_server_that_was_not_started_has_no_address() -> None:
    with pytest.raises(RuntimeError, match="use `with FakeServer"):
        _ = FakeServer([]).base_url


# The client


def test_the_scripted_client_gives_completions_and_records_its_calls() -> None:
    client = ScriptedClient(["Hi", [1, 2, 3]])
    sampling = Sampling(max_tokens=2, temperature=0.5)

    async def both() -> list[Any]:
        return [await client.generate([65], sampling.limited(9)), await client.generate([65, 66], sampling)]

    first, second = asyncio.run(both())
    assert (first.token_ids, first.finish_reason) == ([72, 105], "length")
    assert first.logprobs == [client.logprob(72, 0.5), client.logprob(105, 0.5)]
    assert (second.token_ids, second.finish_reason) == ([1, 2], "length")
    assert [ids for ids, _ in client.calls] == [[65], [65, 66]]


def test_the_scripted_client_serves_calls_at_once() -> None:
    client = ScriptedClient(lambda ids: Reply([ids[0]], delay_s=0.05))

    async def eight() -> list[Any]:
        return await asyncio.gather(*(client.generate([token_id], Sampling(max_tokens=4)) for token_id in range(8)))

    assert [one.token_ids for one in asyncio.run(eight())] == [[token_id] for token_id in range(8)]
    assert client.max_in_flight == 8


def test_the_scripted_client_has_a_context() -> None:
    client = ScriptedClient(["Hi"], max_model_len=8)
    with pytest.raises(RequestError, match="exceed max_model_len=8"):
        asyncio.run(client.generate([65] * 5, Sampling(max_tokens=4)))


# The trainer


def test_the_fake_trainers_settings_are_grpo_configs() -> None:
    from trl.trainer.grpo_config import GRPOConfig

    ours = vars(fake_trainer(TOKENIZER).args)
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    theirs["output_dir"] = "trainer_output"
    assert ours == {name: theirs[name] for name in ours}


def test_the_fake_trainer_takes_settings_and_a_mode() -> None:
    trainer = fake_trainer(TOKENIZER, mode="eval", temperature=0.7, chat_template_kwargs={"enable_thinking": False})
    assert trainer.args.temperature == trainer.temperature == 0.7
    assert trainer.chat_template_kwargs == {"enable_thinking": False}
    assert not trainer.model.training
    assert trainer.processing_class is TOKENIZER
    trainer._metrics["eval"]["reward"].append(1.0)


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="'temperatur'"):
        fake_trainer(TOKENIZER, temperatur=0.7)


# The import


def test_importing_the_fakes_imports_no_model_library() -> None:
    code = (
        "import sys, trl_rollouts; assert 'trl_rollouts.testing' not in sys.modules; import trl_rollouts.testing; "
        "print([name for name in ('torch', 'trl', 'vllm', 'transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
