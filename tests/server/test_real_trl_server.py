"""The real `/generate/` server of TRL 1.10.0: the same rollouts, the same tokens."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import OLD_TRL
from transformers import AutoTokenizer

from trl_rollouts import Message, SetupError, StepResult, env_rollout
from trl_rollouts.testing import fake_trainer

pytestmark = pytest.mark.server

QUESTIONS: list[list[Message]] = [
    [{"role": "user", "content": text}]
    for text in ("What is rain?", "Name a river.", "Who wrote Hamlet?", "12 times 3?")
]


class TwoTurns:
    """Asks once more."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        self.turns += 1
        return StepResult([{"role": "user", "content": "Are you sure?"}], terminated=self.turns == 2)

    def close(self) -> None:
        pass


def greedy(base_url: str, smollm2: Path, **config: Any) -> dict[str, list[Any]]:
    """One trajectory at a time: in bfloat16 the size of a batch decides near-ties."""
    rollout = env_rollout(TwoTurns, base_url=base_url, weight_sync=None, max_concurrency=1)
    trainer = fake_trainer(AutoTokenizer.from_pretrained(smollm2), temperature=0.0, max_completion_length=64, **config)
    trainer.args.generation_kwargs = {"max_tokens": 16}
    try:
        return rollout(QUESTIONS, trainer)
    finally:
        rollout.close()


def test_both_real_servers_give_the_same_greedy_rows(trl_server: str, vllm_server: str, smollm2: Path) -> None:
    ours, reference = greedy(trl_server, smollm2), greedy(vllm_server, smollm2)
    for name in ("prompt_ids", "completion_ids", "env_mask", "stop_reason", "transcript"):
        assert ours[name] == reference[name]
    for row, expected in zip(ours["logprobs"], reference["logprobs"], strict=True):
        assert row == pytest.approx(expected, abs=0.05)


def test_stop_strings_reach_the_sampler_and_their_text_stays(trl_server: str, smollm2: Path) -> None:
    rollout = env_rollout(TwoTurns, max_turns=1, base_url=trl_server, weight_sync=None)
    trainer = fake_trainer(AutoTokenizer.from_pretrained(smollm2), temperature=0.0, max_completion_length=32)
    whole = rollout([QUESTIONS[2]], trainer)["transcript"][0][-1]["content"]
    word = whole.split()[4]
    trainer.args.generation_kwargs = {"stop": [word]}
    batch = rollout([QUESTIONS[2]], trainer)
    rollout.close()
    assert batch["transcript"][0][-1]["content"] == whole[: whole.index(word) + len(word)]
    assert batch["stop_reason"] == ["max_turns"]


def test_weights_that_this_server_cannot_take_over_http_are_refused(trl_server: str, smollm2: Path) -> None:
    from trl_rollouts.weights import _reload

    with pytest.raises(SetupError, match=r"TRL <= 1\.10's own server takes weights only with use_vllm=True"):
        _reload(trl_server, smollm2)


def test_the_trainer_of_trl_1_10_trains_two_steps_on_its_own_server(
    trl_server: str, smollm2: Path, tmp_path: Path
) -> None:
    script = Path(__file__).parent.parent / "contract_old_trl.py"
    done = subprocess.run(
        [sys.executable, str(script), trl_server, str(smollm2), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(OLD_TRL), "TRL_EXPERIMENTAL_SILENCE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["trl"] == "1.10.0"
    assert len(result["logs"]) == 2
    for entry, masks in zip(result["logs"], result["masks"], strict=True):
        assert entry["completions/mean_length"] == sum(map(sum, masks)) / 4
        assert math.isfinite(entry["grad_norm"])
        assert entry["grad_norm"] > 0
        assert all(0 in mask for mask in masks)
