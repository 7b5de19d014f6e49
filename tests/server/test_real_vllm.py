"""The real vLLM, a real small model, the real tokenizer: what the fakes cannot prove."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import vllm_server
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_rollouts import (
    CheckpointSync,
    Message,
    ServerError,
    SetupError,
    StepResult,
    env_rollout,
    tool_rollout,
)
from trl_rollouts.clients.http import Http
from trl_rollouts.clients.vllm import VLLMClient
from trl_rollouts.serving import free_port, serving
from trl_rollouts.testing import ScriptedClient, fake_trainer

pytestmark = pytest.mark.server


class ThreeTurns:
    """Answers twice and ends with the third turn."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        self.turns += 1
        answer = {"role": "user", "content": f"Say it again, in other words ({self.turns})."}
        return StepResult([answer], reward=1.0, terminated=self.turns == 3)

    def close(self) -> None:
        pass


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def worked(a: int, b: int) -> list[Message]:
    """An example for the model: a question, and the call."""
    function = {"name": "multiply", "arguments": {"a": a, "b": b}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [*ask(f"What is {a} times {b}?"), call]


QUESTIONS = [ask(text) for text in ("What is rain?", "Name a river.", "Who wrote Hamlet?", "What is 12 times 3?")]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)


def trainer_for(tokenizer: Any, model: Any, **config: Any) -> Any:
    trainer = fake_trainer(tokenizer, **config)
    trainer.model = trainer.model_wrapped = model
    trainer.accelerator.get_state_dict = lambda module: module.state_dict()
    return trainer


def own_logprobs(model: Any, prompt_ids: list[int], completion_ids: list[int], temperature: float) -> list[float]:
    """The trainer's side: log-softmax of each completion id, at the sampling temperature."""
    ids = torch.tensor([prompt_ids + completion_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt_ids) :, None])[:, 0].tolist()


class OneTurn(ThreeTurns):
    def step(self, action: Message) -> StepResult:
        return StepResult(terminated=True)


def test_a_turn_ends_where_the_trainers_tokenizer_says_and_that_id_is_part_of_it(
    vllm_server: str, smollm2: Path, model: Any
) -> None:
    """As for a base model trained on ChatML: the server stops at what the model's own files name."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.eos_token = "."
    rollout = env_rollout(OneTurn, base_url=vllm_server, weight_sync=None)
    batch = rollout(QUESTIONS[:2], trainer_for(tokenizer, model, max_completion_length=100))
    full_stop = tokenizer.convert_tokens_to_ids(".")
    assert [ids.count(full_stop) for ids in batch["completion_ids"]] == [1, 1]
    assert [ids[-1] for ids in batch["completion_ids"]] == [full_stop, full_stop]
    assert batch["env_mask"] == [[1] * len(ids) for ids in batch["completion_ids"]]
    assert batch["stop_reason"] == ["terminated", "terminated"]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_logprobs_of_a_three_turn_row_are_the_trainers_own(
    vllm_server: str, tokenizer: Any, model: Any, temperature: float
) -> None:
    """The server computes in bfloat16, the trainer here in float32: 8 bits of mantissa are worth up to about 0.2 nats
    on a single token of this model, and nothing on average. A wrong position or temperature is off by whole nats.
    """
    rollout = env_rollout(ThreeTurns, base_url=vllm_server, weight_sync=None)
    trainer = trainer_for(tokenizer, model, max_completion_length=200, temperature=temperature)
    trainer.args.generation_kwargs = {"max_tokens": 24}
    batch = rollout(QUESTIONS, trainer)
    rollout.close()
    assert batch["num_turns"] == [3, 3, 3, 3]
    differences = []
    for prompt, row, mask, logprobs in zip(
        *(batch[name] for name in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
    ):
        own = own_logprobs(model, prompt, row, temperature)
        differences += [ours - theirs for ours, theirs, m in zip(logprobs, own, mask, strict=True) if m]
        assert 0 in mask
    assert len(differences) > 100
    print(f"temperature {temperature}: {len(differences)} tokens, {max(map(abs, differences)):.3f} nats at most")
    assert abs(math.fsum(differences) / len(differences)) < 0.02
    assert max(map(abs, differences)) < 0.5


def test_a_three_turn_row_spells_out_the_conversation(vllm_server: str, tokenizer: Any, model: Any) -> None:
    rollout = env_rollout(ThreeTurns, base_url=vllm_server, weight_sync=None)
    trainer = trainer_for(tokenizer, model, max_completion_length=400)
    trainer.args.generation_kwargs = {"max_tokens": 24}
    batch = rollout(QUESTIONS, trainer)
    rollout.close()
    for row, mask, transcript in zip(batch["completion_ids"], batch["env_mask"], batch["transcript"], strict=True):
        text = tokenizer.decode(row)
        assert text.count("(1).<|im_end|>\n<|im_start|>assistant\n") == 1
        assert text.count("<|im_end|>\n<|im_end|>") == 0
        position = 0
        for message in transcript[1:]:
            position = text.index(message["content"], position) + len(message["content"])
        assert mask[-1] == 1


def test_a_single_step_tool_call_is_run(vllm_server: str, tokenizer: Any, model: Any) -> None:
    rollout = tool_rollout([multiply], max_turns=1, base_url=vllm_server, weight_sync=None)
    prompt = [*worked(7, 8), *worked(31, 6), *ask("What is 12 times 3?")]
    batch = rollout([prompt], trainer_for(tokenizer, model, max_completion_length=60, temperature=0.0))
    rollout.close()
    assert [(call["arguments"], call["result"]) for call in batch["tool_calls"][0]] == [({"a": 12, "b": 3}, 36)]
    assert batch["env_mask"] == [[1] * len(batch["completion_ids"][0])]


def test_after_a_sync_the_server_is_the_trainers_model(
    vllm_server: str, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    """The last layers are swapped, so the new weights say something else; then the old ones are brought back."""
    sync = CheckpointSync(tmp_path / "weights")
    # One at a time: in bfloat16 what else is in the batch decides near-ties.
    rollout = env_rollout(ThreeTurns, max_turns=1, base_url=vllm_server, weight_sync=sync, max_concurrency=1)
    trainer = trainer_for(tokenizer, model, max_completion_length=12, temperature=0.0)
    before = rollout(QUESTIONS, trainer)
    layers = model.model.layers
    layers[20], layers[29] = layers[29], layers[20]
    try:
        trainer.state.global_step = 1
        after = rollout(QUESTIONS, trainer)
        for prompt, row, logprobs in zip(after["prompt_ids"], after["completion_ids"], after["logprobs"], strict=True):
            own = own_logprobs(model, prompt, row, temperature=1.0)
            assert max(abs(a - b) for a, b in zip(own, logprobs, strict=True)) < 0.5
    finally:
        layers[20], layers[29] = layers[29], layers[20]
        trainer.state.global_step = 2
        restored = rollout(QUESTIONS, trainer)
        rollout.close()
    assert after["completion_ids"] != before["completion_ids"]
    assert restored["completion_ids"] == before["completion_ids"]
    assert restored["logprobs"] == before["logprobs"]
    assert len(list((tmp_path / "weights").iterdir())) == 1


def mean_distance(model: Any, batch: dict[str, list[Any]]) -> float:
    """Between the logprobs of a batch's sampled tokens and the model's own, in nats."""
    distances = []
    for row in range(len(batch["prompt_ids"])):
        own = own_logprobs(model, batch["prompt_ids"][row], batch["completion_ids"][row], temperature=1.0)
        columns = zip(own, batch["logprobs"][row], batch["env_mask"][row], strict=True)
        distances += [abs(mine - theirs) for mine, theirs, is_sampled in columns if is_sampled]
    return sum(distances) / len(distances)


def test_trajectories_outlive_their_server_and_go_on_with_the_trainers_weights(
    smollm2: Path, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    """It is ended while it samples their second turns. A new one, at the same address, has the base weights."""
    port, second = free_port(), []

    def replace(stack: ExitStack) -> None:
        stack.close()
        second.append(stack.enter_context(vllm_server(smollm2, tmp_path / "second.log", port=port)))

    class Replacing(ThreeTurns):
        def step(self, action: Message) -> StepResult:
            if not (second or replacing.is_alive()):
                with suppress(RuntimeError):  # another trajectory was first
                    replacing.start()
            return super().step(action)

    layers = model.model.layers
    layers[20], layers[29] = layers[29], layers[20]
    with ExitStack() as stack:
        base_url = stack.enter_context(vllm_server(smollm2, tmp_path / "first.log", port=port))
        replacing = threading.Thread(target=replace, args=(stack,))
        try:
            rollout = env_rollout(Replacing, base_url=base_url, weight_sync=CheckpointSync(tmp_path / "weights"))
            trainer = trainer_for(tokenizer, model, max_completion_length=600, temperature=1.0)
            batch = rollout(QUESTIONS, trainer)
            replacing.join()
            trained = mean_distance(model, batch)
        finally:
            layers[20], layers[29] = layers[29], layers[20]
        rollout.close()
    assert trained < 0.1 < 0.5 < mean_distance(model, batch)  # in nats a token; the second of the base weights
    assert second == [base_url]
    assert batch["rollout_error"] == [None] * len(QUESTIONS)


@pytest.fixture(scope="module")
def raw_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A vLLM with its own defaults, as a user may start it: its address, and its process group."""
    base_url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm2)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", "512"]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path_factory.mktemp("raw") / "server.log"
    with serving(command, f"{base_url}/health", name="vLLM", log=log, env=env) as process:
        yield base_url, process.pid


def test_vllms_own_defaults_are_refused_with_what_to_add(raw_server: Any, tokenizer: Any, model: Any) -> None:
    rollout = env_rollout(ThreeTurns, base_url=raw_server[0], weight_sync=None)
    with pytest.raises(SetupError, match="max_model_len=512.*--max-model-len"):
        rollout(QUESTIONS, trainer_for(tokenizer, model, max_completion_length=512))
    with pytest.raises(SetupError, match="--logprobs-mode processed_logprobs"):
        rollout(QUESTIONS, trainer_for(tokenizer, model, max_completion_length=64))
    rollout.close()


def test_a_server_without_development_endpoints_is_refused_where_weights_must_go(
    raw_server: Any, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    with pytest.raises(SetupError, match="VLLM_SERVER_DEV_MODE=1"):
        CheckpointSync(tmp_path).sync(trainer_for(tokenizer, model), [raw_server[0]])


def test_a_server_that_is_killed_in_the_middle_is_raised_in_bounded_time(
    raw_server: Any, tokenizer: Any, model: Any
) -> None:
    base_url, group = raw_server

    async def client() -> VLLMClient:
        return VLLMClient(Http(base_url, timeout_s=60.0), model=str(model.config._name_or_path), max_model_len=512)

    class Unproved(ScriptedClient):
        """Takes the place of the proof, which this server would not pass."""

        inner: VLLMClient | None = None

        async def generate(self, token_ids: list[int], sampling: Any) -> Any:
            self.inner = self.inner or await client()
            try:
                return await self.inner.generate(token_ids, sampling)
            except ServerError:
                await self.inner.close()
                raise

    rollout = env_rollout(ThreeTurns, client=Unproved([]), weight_sync=None)
    killer = threading.Timer(2.0, os.killpg, [group, signal.SIGKILL])
    killer.start()
    started = time.monotonic()
    with pytest.raises(ServerError, match="cannot be reached.*after 4 attempts"):
        rollout(QUESTIONS * 4, trainer_for(tokenizer, model, max_completion_length=400))
    assert time.monotonic() - started < 60
    rollout.close()
