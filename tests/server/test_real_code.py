"""Code execution on both real servers: real stop strings, real tokens, a real sandbox."""

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from trl_rollouts import code_rollout
from trl_rollouts.testing import fake_trainer

pytestmark = pytest.mark.server

SHOWN = [(6, 7), (12, 5), (31, 3), (8, 9)]
AS_TEXT = "".join(
    f"Question: What is {a} times {b}?\n<code>{a} * {b}</code>\n<result>\n{a * b}\n</result>\nAnswer: {a * b}\n\n"
    for a, b in SHOWN
)
AS_MESSAGES = [
    message
    for a, b in SHOWN
    for message in (
        {"role": "user", "content": f"What is {a} times {b}?"},
        {"role": "assistant", "content": f"<code>{a} * {b}</code>"},
        {"role": "user", "content": f"<result>\n{a * b}\n</result>"},
        {"role": "assistant", "content": f"It is {a * b}."},
    )
]


def runs(row: dict[str, Any]) -> list[tuple[int, list[int]]]:
    """The row's ids, where the mask changes apart."""
    pairs = zip(row["env_mask"], row["completion_ids"], strict=True)
    return [(flag, [token_id for _, token_id in group]) for flag, group in groupby(pairs, key=lambda pair: pair[0])]


@pytest.fixture(params=["vllm_server", "trl_server"])
def base_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param))


@pytest.mark.parametrize("results_as", ["inline", "message"])
def test_the_result_follows_the_token_in_which_the_code_ended(base_url: str, smollm2: Path, results_as: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    prompt: Any = AS_TEXT + "Question: What is 14 times 9?\n"
    if results_as == "message":
        prompt = [*AS_MESSAGES, {"role": "user", "content": "What is 14 times 9?"}]
    rollout = code_rollout(base_url=base_url, weight_sync=None, results_as=results_as, max_turns=3, instructions=None)
    config = {"temperature": 0.5, "max_completion_length": 120, "generation_kwargs": {"max_tokens": 40}}
    batch = rollout([prompt] * 4, fake_trainer(tokenizer, **config))
    rollout.close()

    assert batch["rollout_error"] == [None] * 4
    num_results = 0
    for index in range(4):
        row = {name: column[index] for name, column in batch.items()}
        parts = runs(row)
        assert parts[0][0] == parts[-1][0] == 1
        for (_, sampled), (_, shown) in zip(parts[::2], parts[1::2], strict=False):
            text = tokenizer.decode(shown)
            assert "<result>\n" in text
            if "parse_error" in [call["error"] for call in row["tool_calls"]]:
                continue
            assert "</code>" in tokenizer.decode(sampled)
            assert "</code>" not in tokenizer.decode(sampled[:-1])  # it ended there, in that token
            num_results += 1
            if results_as == "inline":
                assert text.startswith("\n<result>\n")
                assert text.endswith("\n</result>\n")
    assert num_results > 0
