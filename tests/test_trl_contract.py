"""A real GRPOTrainer around the rollouts: what it asks for, what it makes of the answer, what it trains on."""

import asyncio
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_parts import Echo, Quiz, Recorded, chat, make_trainer, use_vllm_server_mode
from datasets import Dataset
from safetensors.torch import load_file
from trl import GRPOTrainer

from trl_rollouts import (
    Message,
    RolloutError,
    SetupError,
    StepResult,
    env_reward,
    env_rollout,
    tool_rollout,
    with_task,
)
from trl_rollouts.testing import FakeServer, Reply, ScriptedClient, byte_tokenizer, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

# With the byte tokenizer, text is its bytes. Special tokens: 257 opens a turn, 258 ends it; 261 and 262 are the tags
# of a tool call, 263 and 264 those of a tool's response.


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def call_ids(n: int) -> list[int]:
    return [261, *f'\n{{"name": "multiply", "arguments": {{"a": {n}, "b": 10}}}}\n'.encode(), 262, 258]


def response_ids(n: int) -> list[int]:
    return [10, 257, *b"user\n", 263, *f"\n{n}0\n".encode(), 264, 258, 10, 257, *b"assistant\n"]


def answer_ids(n: int) -> list[int]:
    return [*f"It is {n}0.".encode(), 258]


def row_ids(n: int) -> list[int]:
    return call_ids(n) + response_ids(n) + answer_ids(n)


def row_mask(n: int) -> list[int]:
    return [1] * len(call_ids(n)) + [0] * len(response_ids(n)) + [1] * len(answer_ids(n))


def text_of(ids: list[int]) -> str:
    return bytes(token_id for token_id in ids if token_id < 256).decode()


def scripted_tool_use() -> Callable[[list[int]], Reply]:
    """The n-th first turn calls multiply(n, 10), and what follows the response says what it was."""
    numbers = itertools.count(1)

    def reply(ids: list[int]) -> Reply:
        response = re.search(r"user\n\n(\d+)0\n\nassistant\n$", text_of(ids))
        if response is not None:
            return Reply(answer_ids(int(response[1])))
        n = next(numbers)
        return Reply(call_ids(n), delay_s=0.01 * (-n % 4))  # of four calls, the last is ready first

    return reply


@dataclass
class Run:
    trainer: GRPOTrainer
    server: FakeServer
    calls: list[tuple[list[Any], dict[str, list[Any]]]]
    """What the rollout was given and what it returned."""
    rewarded: list[dict[str, Any]]
    """What the reward function was given, call by call."""

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.trainer.state.log_history if name in entry]


@pytest.fixture(scope="module")
def tool_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps with two groups of four, an evaluation of two rows after each."""
    rewarded: list[dict[str, Any]] = []

    def distinct(tool_calls: list[list[dict[str, Any]]], **kwargs: Any) -> list[float]:
        rewarded.append({"tool_calls": tool_calls, **kwargs})
        return [2.0 ** (calls[0]["arguments"]["a"] % 8) for calls in tool_calls]  # no member of a group is its mean

    dataset = Dataset.from_dict({"prompt": [chat("first"), chat("second")]})
    with FakeServer(scripted_tool_use()) as server:
        rollout = Recorded(tool_rollout([multiply], base_url=server.base_url))
        trainer = make_trainer(
            rollout,
            tmp_path_factory.mktemp("tool_run"),
            dataset,
            eval_dataset=dataset,
            reward_funcs=distinct,
            per_device_train_batch_size=8,
            max_steps=2,
            per_device_eval_batch_size=2,
            num_generations_eval=1,
            eval_strategy="steps",
            eval_steps=1,
        )
        trainer.train()
    return Run(trainer, server, rollout.calls, rewarded)


@pytest.fixture(scope="module")
def quiz_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One step with two groups of four, whose rows have the same text and different answers."""
    rewarded: list[dict[str, Any]] = []
    numbers = itertools.count()

    def reply(ids: list[int]) -> str:
        told = re.search(r"assistant\nguess (\d+)\n.*It is (\w+)\.", text_of(ids), re.DOTALL)
        if told is None:
            return f"guess {next(numbers)}"
        return told[2] if int(told[1]) % 2 else "no idea"

    def watch(**kwargs: Any) -> list[None]:
        rewarded.append(kwargs)
        return [None] * len(kwargs["prompts"])

    dataset = Dataset.from_dict({"prompt": [chat("Guess."), chat("Guess.")], "answer": ["yes", "maybe"]})
    with FakeServer(reply) as server:
        rollout = Recorded(env_rollout(Quiz, base_url=server.base_url))
        trainer = make_trainer(
            rollout,
            tmp_path_factory.mktemp("quiz_run"),
            with_task(dataset, ["answer"]),
            reward_funcs=[env_reward, watch],
            per_device_train_batch_size=8,
        )
        trainer.train()
    return Run(trainer, server, rollout.calls, rewarded)


def test_two_steps_and_two_evaluations_have_finite_losses_and_gradients(tool_run: Run) -> None:
    assert len(tool_run.logged("loss")) == len(tool_run.logged("eval_loss")) == 2
    assert all(math.isfinite(loss) for loss in tool_run.logged("loss") + tool_run.logged("eval_loss"))
    assert all(0 < norm < math.inf for norm in tool_run.logged("grad_norm"))


def test_a_call_gets_each_prompt_as_often_as_it_is_to_be_sampled_and_returns_one_row_for_each(tool_run: Run) -> None:
    train, evaluation = [chat("first")] * 4 + [chat("second")] * 4, [chat("first"), chat("second")]
    assert [prompts for prompts, _ in tool_run.calls] == [train, evaluation, train, evaluation]
    assert [{len(column) for column in columns.values()} for _, columns in tool_run.calls] == [{8}, {2}, {8}, {2}]


def test_rows_are_in_the_order_of_their_prompts_whichever_is_ready_first(tool_run: Run) -> None:
    endings = [[*f"user\n{text}".encode(), 258, 10, 257, *b"assistant\n"] for text in ["first"] * 4 + ["second"] * 4]
    _, columns = tool_run.calls[0]
    assert [ids[-len(end) :] for ids, end in zip(columns["prompt_ids"], endings, strict=True)] == endings


def test_each_row_holds_its_own_ids_and_mask(tool_run: Run) -> None:
    numbers = []
    for _, columns in tool_run.calls:
        for ids, mask in zip(columns["completion_ids"], columns["env_mask"], strict=True):
            n = int(text_of(ids).removesuffix("0.").rpartition(" ")[2])
            numbers.append(n)
            assert ids == row_ids(n)
            assert mask == row_mask(n)
    assert sorted(numbers) == list(range(1, 21))


def test_mean_length_counts_sampled_tokens_only(tool_run: Run) -> None:
    of_train = [columns["env_mask"] for prompts, columns in tool_run.calls if len(prompts) == 8]
    means = [sum(map(sum, masks)) / 8 for masks in of_train]
    assert tool_run.logged("completions/mean_length") == means == [67.0, 69.0]


def test_the_trainers_tool_mask_is_the_mask_of_the_same_row(tool_run: Run) -> None:
    inputs = tool_run.trainer._buffered_inputs[0]  # of the second step, shuffled
    masks = {tuple(row_ids(n)): row_mask(n) for n in range(11, 19)}
    for row in range(8):
        length = int(inputs["completion_mask"][row].sum())
        ids = tuple(inputs["completion_ids"][row, :length].tolist())
        assert inputs["tool_mask"][row, :length].tolist() == masks.pop(ids)
    assert masks == {}


def test_the_gradient_comes_from_sampled_tokens_only(tool_run: Run) -> None:
    trainer = tool_run.trainer
    gradients: list[torch.Tensor] = []
    inputs = trainer._buffered_inputs[0]

    def keep(module: torch.nn.Module, arguments: Any, states: torch.Tensor) -> None:
        states.register_hook(gradients.append)

    handle = trainer.model.model.norm.register_forward_hook(keep)  # a position's last state predicts the next token
    trainer.compute_loss(trainer.model, inputs).backward()
    handle.remove()
    is_trained = (torch.cat(gradients).abs().sum(-1) > 0).int()[:, :-1]
    num_prompt = inputs["prompt_ids"].size(1)
    assert is_trained[:, : num_prompt - 1].sum() == 0
    assert torch.equal(is_trained[:, num_prompt - 1 :], (inputs["tool_mask"] * inputs["completion_mask"]).int())


def test_reward_functions_get_the_tool_calls_and_the_conversation_of_the_same_row(tool_run: Run) -> None:
    for kwargs in tool_run.rewarded:
        for ids, [call], transcript in zip(
            kwargs["completion_ids"], kwargs["tool_calls"], kwargs["transcript"], strict=True
        ):
            n = call["arguments"]["a"]
            assert ids == row_ids(n)
            assert call["result"] == 10 * n
            assert [message["role"] for message in transcript] == ["user", "assistant", "tool", "assistant"]
            assert [message["content"] for message in transcript[2:]] == [f"{n}0", f"It is {n}0."]


def test_reward_functions_get_rewards_turns_and_stop_reason_of_the_same_row(quiz_run: Run) -> None:
    [kwargs] = quiz_run.rewarded
    assert kwargs["num_turns"] == [2] * 8
    assert kwargs["stop_reason"] == ["terminated"] * 8
    assert kwargs["rollout_error"] == [None] * 8
    for row, transcript in enumerate(kwargs["transcript"]):
        is_right = transcript[3]["content"] == kwargs["answer"][row]
        assert kwargs["step_rewards"][row] == [0.25, float(is_right)]
        assert kwargs["env_reward"][row] == 0.25 + is_right
        assert f"It is {kwargs['answer'][row]}." in kwargs["completions"][row][0]["content"]
    assert sorted(kwargs["env_reward"]) == [0.25] * 4 + [1.25] * 4
    assert quiz_run.logged("rewards/env_reward/mean") == [0.75]


def test_rows_with_the_same_text_reach_the_environment_with_their_own_columns(quiz_run: Run) -> None:
    [(prompts, columns)] = quiz_run.calls
    assert [prompt[-1]["task"]["answer"] for prompt in prompts] == ["yes"] * 4 + ["maybe"] * 4
    assert [transcript[2] for transcript in columns["transcript"]] == [
        *[{"role": "user", "content": "It is yes."}] * 4,
        *[{"role": "user", "content": "It is maybe."}] * 4,
    ]


def test_the_prompt_is_that_of_the_first_request_and_shows_no_column(quiz_run: Run) -> None:
    [(_, columns)] = quiz_run.calls
    prompt_ids = [257, *b"user\nGuess.", 258, 10, 257, *b"assistant\n"]
    assert columns["prompt_ids"] == [prompt_ids] * 8
    assert quiz_run.server.prompts.count(prompt_ids) == 8
    assert len(quiz_run.server.prompts) == 16


@pytest.mark.parametrize(
    ("prompt", "prompt_ids"),
    [
        ("raw <|im_end|>", [*b"raw ", 258]),
        (chat("x"), [257, *b"user\nx", 258, 10, 257, *b"assistant\n"]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}],
            [257, *b"user\nxy", 258, 10, 257, *b"assistant\n"],
        ),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": "x"}],
            [257, *b"system\ns", 258, 10, 257, *b"user\nx", 258, 10, 257, *b"assistant\n"],
        ),
    ],
    ids=["string", "text", "parts", "system"],
)
def test_a_prompt_of_any_form_is_rendered_once(prompt: Any, prompt_ids: list[int], tmp_path: Path) -> None:
    rollout = Recorded(env_rollout(Echo, client=ScriptedClient(["0", "1", "2", "4"])))
    make_trainer(rollout, tmp_path, [prompt], reward_funcs=env_reward).train()
    [(_, columns)] = rollout.calls
    assert columns["prompt_ids"] == [prompt_ids] * 4
    assert sorted(columns["completion_ids"]) == [[*b"0", 258], [*b"1", 258], [*b"2", 258], [*b"4", 258]]


@pytest.fixture(scope="module")
def server_mode_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A step of two turns a row, with the logprobs that the model itself gives the scripted replies."""
    temperature = 0.7
    model = tiny_model(byte_tokenizer())  # the trainer's, before the step

    def reply(ids: list[int]) -> Reply:
        token_ids = [*(b"yes" if "It is" in text_of(ids) else b"guess"), 258]
        with torch.no_grad():
            logits = model(torch.tensor([ids + token_ids])).logits[0, len(ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        return Reply(token_ids, [float(logprobs[at, token_id]) for at, token_id in enumerate(token_ids)])

    def by_position(completions: list[Any], **_: Any) -> list[float]:
        return [float(index) for index in range(len(completions))]

    dataset = Dataset.from_dict({"prompt": [chat("Guess.")], "answer": ["yes"]})
    with FakeServer(reply) as server:
        rollout = Recorded(env_rollout(Quiz))
        trainer = make_trainer(
            rollout,
            tmp_path_factory.mktemp("server_mode_run"),
            with_task(dataset, ["answer"]),
            reward_funcs=by_position,
            temperature=temperature,
            vllm_mode="server",
            vllm_server_base_url=server.base_url,
        )
        steps = use_vllm_server_mode(trainer)
        trainer.train()
    assert steps == [0]
    return Run(trainer, server, rollout.calls, [])


def test_importance_ratios_are_one_where_the_logprobs_are_the_models_own(server_mode_run: Run) -> None:
    for name in ("min", "mean", "max"):
        assert server_mode_run.logged(f"sampling/importance_sampling_ratio/{name}") == [pytest.approx(1.0, abs=1e-3)]
    assert server_mode_run.logged("sampling/sampling_logp_difference/max") == [pytest.approx(0.0, abs=1e-3)]
    assert server_mode_run.logged("grad_norm")[0] > 0


def test_observations_stay_out_of_the_importance_ratio(server_mode_run: Run) -> None:
    [(_, columns)] = server_mode_run.calls
    observation = [10, 257, *b"user\nIt is yes.", 258, 10, 257, *b"assistant\n"]
    row = [*b"guess", 258, *observation, *b"yes", 258]
    mask = [1] * 6 + [0] * len(observation) + [1] * 4
    assert columns["completion_ids"] == [row] * 4
    assert columns["env_mask"] == [mask] * 4
    for logprobs in columns["logprobs"]:
        assert [logprob == 0.0 for logprob in logprobs] == [flag == 0 for flag in mask]
    with torch.no_grad():  # what a ratio over all tokens would have been
        inputs = server_mode_run.trainer._buffered_inputs[0]
        differences = inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"]
    assert differences.sum(-1).exp().max() < 1e-6


def test_in_vllms_server_mode_the_weights_are_left_to_trl(server_mode_run: Run) -> None:
    assert {path for path, _ in server_mode_run.server.requests} == {"/v1/models", "/metrics", "/v1/completions"}


def test_weights_are_reloaded_once_a_step_before_its_first_request(tool_run: Run) -> None:
    def kind(path: str, body: Any) -> str:
        return "probe" if path == "/v1/completions" and isinstance(body["prompt"], str) else path

    asked = [(path, body) for path, body in tool_run.server.requests if path != "/metrics"]
    order = [name for name, _ in groupby(kind(path, body) for path, body in asked)]
    sync = ["/collective_rpc", "/reset_prefix_cache"]
    # The evaluation after a step and the step after it sample from the same weights.
    assert order == ["/v1/models", "probe", *[*sync, "/v1/completions"] * 3]
    assert len(tool_run.server.bodies("/collective_rpc")) == len(tool_run.server.bodies("/reset_prefix_cache")) == 3


def test_the_folder_holds_the_newest_weights_alone(tool_run: Run) -> None:
    paths = [Path(body["kwargs"]["weights_path"]) for body in tool_run.server.bodies("/collective_rpc")]
    assert [path.name[-17:-9] for path in paths] == ["00000000", "00000001", "00000002"]
    assert list((Path(tool_run.trainer.args.output_dir) / "rollout_weights").iterdir()) == paths[-1:]
    saved, before = load_file(paths[-1] / "model.safetensors"), tiny_model(byte_tokenizer()).state_dict()
    trained = tool_run.trainer.model.state_dict()
    assert saved.keys() == trained.keys()
    assert all(torch.equal(saved[name], trained[name]) for name in saved)
    assert not any(torch.equal(saved[name], before[name]) for name in saved if "proj" in name)


class Fragile:
    """Fails on some actions; the others are rewarded by the number that the model says."""

    failures = "2"

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        if action["content"] in self.failures:
            raise ZeroDivisionError(f"no room for {action['content']}")
        return StepResult(reward=float(action["content"]), terminated=True)

    def close(self) -> None:
        pass


def test_a_failed_row_leaves_its_siblings_the_advantages_of_a_group_without_it(tmp_path: Path) -> None:
    client = ScriptedClient(["0", "1", "2", "2", "0", "1", "2", "1"])
    rollout = Recorded(env_rollout(Fragile, client=client, max_concurrency=1))
    trainer = make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=env_reward, max_steps=2)
    trainer.train()
    _, (_, columns) = rollout.calls
    assert columns["env_reward"] == [0.0, 1.0, None, 1.0]
    # Of rewards 0, 1, 1: less their mean 2/3, over their standard deviation 0.57735 + 0.0001.
    advantages = [-1.15450, 0.57725, 0.0, 0.57725]
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages, abs=1e-4)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(norms) == 2
    assert all(0 < norm < math.inf for norm in norms)


def test_a_failed_row_keeps_its_tokens_masked_and_says_why(tmp_path: Path) -> None:
    rollout = Recorded(env_rollout(Fragile, client=ScriptedClient(["0", "1", "2", "1"]), max_concurrency=1))
    make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=env_reward).train()
    [(_, columns)] = rollout.calls
    assert columns["completion_ids"] == [[*b"0", 258], [*b"1", 258], [*b"2", 258], [*b"1", 258]]
    assert columns["env_mask"] == [[1, 1], [1, 1], [0, 0], [1, 1]]
    assert columns["logprobs"][2] == [0.0, 0.0]
    assert columns["stop_reason"] == ["terminated", "terminated", "error", "terminated"]
    error = "EnvError: env.step failed: ZeroDivisionError: no room for 2"
    assert columns["rollout_error"] == [None, None, error, None]


def test_a_batch_in_which_every_row_failed_raises_the_first_cause(tmp_path: Path) -> None:
    rollout = env_rollout(Fragile, client=ScriptedClient(["2"] * 4))
    trainer = make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=env_reward)
    with pytest.raises(RolloutError, match="All 4 trajectories failed .4 EnvError.*no room for 2") as raised:
        trainer.train()
    assert raised.value.__cause__ is not None
    assert isinstance(raised.value.__cause__.__cause__, ZeroDivisionError)


async def async_reward(env_reward: list[float], **_: Any) -> list[float]:
    await asyncio.sleep(0)
    return env_reward


def test_an_async_reward_function_runs_after_a_rollout(tmp_path: Path) -> None:
    rollout = env_rollout(Echo, client=ScriptedClient(["0", "1", "2", "4"]))
    trainer = make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=async_reward)
    trainer.train()
    [entry] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert entry["rewards/async_reward/mean"] == 1.75


def test_training_works_inside_a_running_event_loop(tmp_path: Path) -> None:
    rollout = env_rollout(Echo, client=ScriptedClient(["0", "1", "2", "4"]))
    trainer = make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=async_reward)

    async def notebook() -> None:
        trainer.train()
        await asyncio.sleep(0)  # the loop is still the notebook's

    asyncio.run(notebook())
    assert trainer.state.global_step == 1


def test_tools_given_to_the_trainer_as_well_are_refused(tmp_path: Path) -> None:
    rollout = tool_rollout([multiply], client=ScriptedClient(["0"] * 4))
    trainer = make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=env_reward, tools=[multiply])
    with pytest.raises(SetupError, match="Remove tools= from the trainer and pass the functions to tool_rollout"):
        trainer.train()


@dataclass
class Launched:
    returncode: int
    output: str
    folder: Path
    server: FakeServer


def guesses(ids: list[int]) -> str:
    """Process 0 is brief and right in the end, process 1 is neither."""
    is_first, is_told = "rank 0" in text_of(ids), "It is" in text_of(ids)
    if is_told:
        return "yes" if is_first else "I do not know"
    return "no" if is_first else "perhaps, perhaps not"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Launched]]:
    """All scripts, at the same time: most of it is waiting for imports."""
    names = ("two_processes", "failing_sync", "failing_rank")
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    servers = {name: FakeServer(guesses) for name in names}
    processes = {}
    try:
        for name in names:
            servers[name].start()
            processes[name] = launch(f"contract_{name}.py", servers[name].base_url, folders[name])
        outputs = {name: process.communicate(timeout=250)[0] for name, process in processes.items()}
        yield {
            name: Launched(processes[name].returncode, outputs[name], folders[name], servers[name]) for name in names
        }
    finally:
        for process in processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        for server in servers.values():
            server.stop()


def launch(script: str, base_url: str, folder: Path) -> "subprocess.Popen[str]":
    path = Path(__file__).with_name(script)
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
            path,
            base_url,
            folder,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def two_turns(first: str, second: str) -> tuple[list[int], list[int]]:
    observation = [10, 257, *b"user\nIt is yes.", 258, 10, 257, *b"assistant\n"]
    ids = [*first.encode(), 258, *observation, *second.encode(), 258]
    return ids, [1] * (len(first) + 1) + [0] * len(observation) + [1] * (len(second) + 1)


@pytest.mark.parametrize(("run", "num_steps"), [("own_sync", 2), ("server_mode", 1)])
def test_a_group_split_over_two_processes_gets_each_its_own_completion(
    launched: dict[str, Launched], run: str, num_steps: int
) -> None:
    process = launched["two_processes"]
    assert process.returncode == 0, process.output
    reports = [json.loads((process.folder / f"rank{rank}.json").read_text())[run] for rank in (0, 1)]
    rows = [two_turns("no", "yes"), two_turns("perhaps, perhaps not", "I do not know")]
    for report, (ids, mask), reward in zip(reports, rows, [1.25, 0.25], strict=True):
        assert len(report["calls"]) == num_steps
        for prompts, columns in report["calls"]:
            assert prompts == [[{"role": "user", "content": "Guess.", "task": {"answer": "yes"}}]]
            assert columns["completion_ids"] == [ids]
            assert columns["env_mask"] == [mask]
            assert columns["env_reward"] == [reward]


def test_two_processes_take_the_same_steps_on_a_group_that_they_share(launched: dict[str, Launched]) -> None:
    folder = launched["two_processes"].folder
    reports = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert reports[0]["own_sync"]["checksum"] == reports[1]["own_sync"]["checksum"]
    assert reports[0]["own_sync"]["grad_norms"] == reports[1]["own_sync"]["grad_norms"]
    assert all(0 < norm < math.inf for norm in reports[0]["own_sync"]["grad_norms"])
    assert all(math.isfinite(norm) for norm in reports[0]["server_mode"]["grad_norms"])


def test_two_processes_begin_the_episodes_of_a_group_with_one_seed(launched: dict[str, Launched]) -> None:
    folder = launched["two_processes"].folder
    seeds = [json.loads((folder / f"rank{rank}.json").read_text())["seeds"] for rank in (0, 1)]
    assert seeds == [[zlib.crc32(b"Guess.")] * 3] * 2


def test_of_two_processes_one_reloads_the_weights_once_a_step(launched: dict[str, Launched]) -> None:
    server = launched["two_processes"].server
    assert len(server.bodies("/collective_rpc")) == len(server.bodies("/reset_prefix_cache")) == 2
    order = [
        path
        for path, body in server.requests
        if path not in ("/v1/models", "/metrics")
        and not (path == "/v1/completions" and isinstance(body["prompt"], str))
    ]
    assert [path for path, _ in groupby(order)] == ["/collective_rpc", "/reset_prefix_cache", "/v1/completions"] * 2


def test_both_processes_end_with_the_error_of_the_one_that_syncs(launched: dict[str, Launched]) -> None:
    process = launched["failing_sync"]
    assert process.returncode != 0
    errors = [(process.folder / f"rank{rank}.txt").read_text() for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0].startswith("WeightSyncError: The weights could not be saved or sent: NotADirectoryError: ")
    assert process.output.count(errors[0]) >= 1


def test_an_error_on_one_process_ends_the_other_that_waits_for_it_and_is_seen(launched: dict[str, Launched]) -> None:
    process = launched["failing_rank"]
    assert process.returncode != 0
    assert "SetupError: the game's licence is missing on this machine" in process.output
