"""Weights on their way to a server: what it is sent and when, what the folder holds, what stops a run."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from trl_rollouts import CheckpointSync, Message, SetupError, StepResult, WeightSyncError, env_rollout, weights
from trl_rollouts.serving import free_port
from trl_rollouts.testing import FakeServer, byte_tokenizer, fake_trainer, tiny_model

SYNC = ["/collective_rpc", "/reset_prefix_cache"]


class WeightServer:
    """The two endpoints that take weights. `answer` may look at the folder, and gives a status and a body."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.answer: Callable[[str], tuple[int, Any]] = lambda path: (200, {"success": True})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.requests.append((self.path, json.loads(text) if text else None))
                status, body = outer.answer(self.path)
                content = b"" if body is None else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                with suppress(ConnectionError):  # the client's time limit has passed
                    self.wfile.write(content)

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self.base_url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    @property
    def folders(self) -> list[Path]:
        return [Path(body["kwargs"]["weights_path"]) for path, body in self.requests if path == "/collective_rpc"]

    def __enter__(self) -> "WeightServer":
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[WeightServer]:
    with WeightServer() as server:
        yield server


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """What a sync reads of a trainer, around a real model and a real accelerator."""
    model = tiny_model(byte_tokenizer())
    return SimpleNamespace(
        model=model,
        model_wrapped=model,
        accelerator=Accelerator(cpu=True),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        state=SimpleNamespace(global_step=0),
    )


def train(trainer: Any) -> None:
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    trainer.state.global_step += 1


def is_saved(model: torch.nn.Module, folder: Path) -> bool:
    saved, expected = load_file(folder / "model.safetensors"), model.state_dict()
    return saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)


def test_a_server_is_told_to_reload_and_then_to_forget_its_prefixes(trainer: Any, server: WeightServer) -> None:
    CheckpointSync().sync(trainer, [server.base_url])
    [(reload, body), (reset, nothing)] = server.requests
    assert (reload, reset, nothing) == ("/collective_rpc", "/reset_prefix_cache", None)
    assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(server.folders[0])}}
    assert server.folders[0].is_absolute()


def test_weights_are_sent_once_a_step(trainer: Any, server: WeightServer) -> None:
    sync = CheckpointSync()
    for _ in range(3):
        sync.sync(trainer, [server.base_url])
    assert server.paths == SYNC
    train(trainer)
    for _ in range(3):
        sync.sync(trainer, [server.base_url])
    assert server.paths == SYNC * 2


def test_another_training_that_counts_its_steps_from_zero_again_sends_its_weights(
    trainer: Any, server: WeightServer
) -> None:
    sync = CheckpointSync()
    sync.sync(trainer, [server.base_url])
    train(trainer)
    trainer.state = SimpleNamespace(global_step=0)
    sync.sync(trainer, [server.base_url])
    assert server.paths == SYNC * 2
    assert is_saved(trainer.model, server.folders[1])


def test_every_server_gets_the_same_weights(trainer: Any, server: WeightServer) -> None:
    with WeightServer() as other:
        CheckpointSync().sync(trainer, [server.base_url, other.base_url])
    assert server.paths == other.paths == SYNC
    assert server.folders == other.folders


def test_a_server_that_joins_within_a_step_gets_the_weights(trainer: Any, server: WeightServer) -> None:
    sync = CheckpointSync()
    sync.sync(trainer, [server.base_url])
    with WeightServer() as other:
        sync.sync(trainer, [server.base_url, other.base_url])
        assert other.paths == SYNC


def test_the_folder_is_whole_when_the_server_reads_it(trainer: Any, server: WeightServer) -> None:
    seen: list[tuple[bool, list[str]]] = []

    def look(path: str) -> tuple[int, Any]:
        if path == "/collective_rpc":
            folder = server.folders[-1]
            seen.append((is_saved(trainer.model, folder), sorted(file.name for file in folder.iterdir())))
        return 200, {"results": [None]}

    server.answer = look
    sync = CheckpointSync()
    sync.sync(trainer, [server.base_url])
    train(trainer)
    sync.sync(trainer, [server.base_url])
    files = ["config.json", "generation_config.json", "model.safetensors"]
    assert seen == [(True, files), (True, files)]


def test_the_newest_weights_alone_are_kept(trainer: Any, server: WeightServer, tmp_path: Path) -> None:
    sync = CheckpointSync()
    for _ in range(3):
        sync.sync(trainer, [server.base_url])
        train(trainer)
    [folder] = (tmp_path / "rollout_weights").iterdir()
    assert folder == server.folders[2]
    assert folder.name.startswith("rollout-weights-step-00000002-")


def test_what_a_killed_run_left_is_removed_and_files_of_others_are_not(
    trainer: Any, server: WeightServer, tmp_path: Path
) -> None:
    for name in (
        "rollout-weights-step-00000007-0123abcd",
        "rollout-weights-step-00000008-4567cdef.unfinished",
        "step-00000007",
    ):
        (tmp_path / "weights" / name).mkdir(parents=True)
    CheckpointSync(tmp_path / "weights").sync(trainer, [server.base_url])
    assert sorted((tmp_path / "weights").iterdir()) == [server.folders[0], tmp_path / "weights" / "step-00000007"]


def test_the_folder_may_be_relative(
    trainer: Any, server: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    CheckpointSync("here").sync(trainer, [server.base_url])
    assert server.folders[0].parent == tmp_path / "here"
    assert is_saved(trainer.model, server.folders[0])


def test_another_user_can_read_the_files(trainer: Any, server: WeightServer) -> None:
    CheckpointSync().sync(trainer, [server.base_url])
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in server.folders[0].iterdir())


def test_half_written_weights_never_have_the_final_name(
    trainer: Any, server: WeightServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_halfway(folder: Path, **_: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
        raise OSError("No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(trainer.model, "save_pretrained", fail_halfway)
        with pytest.raises(WeightSyncError, match="OSError: No space left on device"):
            CheckpointSync().sync(trainer, [server.base_url])
    assert server.requests == []
    assert [folder.suffix for folder in (tmp_path / "rollout_weights").iterdir()] == [".unfinished"]
    CheckpointSync().sync(trainer, [server.base_url])
    assert list((tmp_path / "rollout_weights").iterdir()) == server.folders


@pytest.mark.parametrize("failing", SYNC)
def test_a_server_that_fails_raises_its_words_and_is_asked_again_at_the_next_call(
    trainer: Any, server: WeightServer, failing: str
) -> None:
    server.answer = lambda path: (500, "engine is dead") if path == failing else (200, None)
    sync = CheckpointSync()
    with pytest.raises(WeightSyncError, match=f"{failing} answered 500: .*engine is dead"):
        sync.sync(trainer, [server.base_url])
    server.answer = lambda path: (200, None)
    server.requests.clear()
    sync.sync(trainer, [server.base_url])
    assert server.paths == SYNC


def test_an_unreachable_server_raises_with_its_address(trainer: Any) -> None:
    base_url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(WeightSyncError, match=f"{base_url}/collective_rpc cannot be reached: ConnectionError"):
        CheckpointSync().sync(trainer, [base_url])


def test_a_proxy_in_the_environment_is_not_used(
    trainer: Any, server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    CheckpointSync().sync(trainer, [server.base_url])
    assert server.paths == SYNC


@pytest.mark.parametrize("protocol", ["vllm", "trl"])
def test_a_server_that_takes_no_weights_is_refused_with_the_setting_it_needs(
    trainer: Any, protocol: Literal["vllm", "trl"]
) -> None:
    with (
        FakeServer([], protocol=protocol, dev_mode=False) as server,
        pytest.raises(SetupError, match="has no /collective_rpc.*VLLM_SERVER_DEV_MODE=1"),
    ):
        CheckpointSync().sync(trainer, [server.base_url])


def test_a_prefix_cache_that_is_in_use_is_reset_again_until_it_is_free(trainer: Any, server: WeightServer) -> None:
    answers = iter([{"results": [None]}, {"success": False}, {"success": False}, {"success": True}])
    server.answer = lambda path: (200, next(answers))
    CheckpointSync().sync(trainer, [server.base_url])
    assert server.paths == ["/collective_rpc", *["/reset_prefix_cache"] * 3]


def test_a_prefix_cache_that_stays_in_use_raises(
    trainer: Any, server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "RESET_TIMEOUT_S", 0.2)
    server.answer = lambda path: (200, {"success": False})
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="did not reset its prefix cache within 0.2 s"):
        CheckpointSync().sync(trainer, [server.base_url])
    assert time.monotonic() - started < 5


def test_a_server_that_does_not_answer_in_time_raises(
    trainer: Any, server: WeightServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "RELOAD_TIMEOUT_S", 0.2)
    released = threading.Event()
    server.answer = lambda path: (200, released.wait(10))
    try:
        with pytest.raises(WeightSyncError, match="did not answer: ReadTimeout"):
            CheckpointSync().sync(trainer, [server.base_url])
    finally:
        released.set()


def test_a_model_with_an_adapter_is_refused(trainer: Any, server: WeightServer) -> None:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        trainer.model.peft_config = {"default": None}
    else:
        trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(SetupError, match="PEFT adapter"):
        CheckpointSync().sync(trainer, [server.base_url])
    assert server.requests == []


def test_a_compiled_model_is_saved_under_its_own_names(trainer: Any, server: WeightServer) -> None:
    trainer.model_wrapped = torch.compile(trainer.model)
    CheckpointSync().sync(trainer, [server.base_url])
    assert is_saved(trainer.model, server.folders[0])


def test_a_model_with_tied_weights_loads_as_it_was(trainer: Any, server: WeightServer) -> None:
    config = trainer.model.config
    config.tie_word_embeddings = True
    trainer.model = trainer.model_wrapped = LlamaForCausalLM(config)
    CheckpointSync().sync(trainer, [server.base_url])
    loaded = LlamaForCausalLM.from_pretrained(server.folders[0]).state_dict()
    expected = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


class Echo:
    """One turn."""

    def reset(self, prompt: list[Message]) -> list[Message]:
        return prompt

    def step(self, action: Message) -> StepResult:
        return StepResult(terminated=True)

    def close(self) -> None:
        pass


def sent_weights(server: FakeServer) -> bool:
    return any(path in SYNC for path, _ in server.requests)


def test_without_a_sync_nothing_is_sent() -> None:
    with FakeServer(["x"]) as server:
        rollout = env_rollout(Echo, base_url=server.base_url, weight_sync=None)
        rollout([[{"role": "user", "content": "x"}]], fake_trainer(byte_tokenizer()))
    assert not sent_weights(server)


@pytest.mark.parametrize("vllm_mode", ["server", "colocate"])
def test_a_server_that_trl_does_not_sync_is_refused(vllm_mode: str) -> None:
    trainer = fake_trainer(
        byte_tokenizer(), use_vllm=True, vllm_mode=vllm_mode, vllm_server_base_url="http://127.0.0.1:1"
    )
    with FakeServer(["x"]) as server, pytest.raises(SetupError, match=r"not to \['http://127.*weight_sync=None"):
        env_rollout(Echo, base_url=server.base_url)([[{"role": "user", "content": "x"}]], trainer)
    assert server.prompts == []


def test_a_server_in_the_config_of_a_colocated_engine_is_refused() -> None:
    with FakeServer(["x"]) as server:
        trainer = fake_trainer(
            byte_tokenizer(), use_vllm=True, vllm_mode="colocate", vllm_server_base_url=server.base_url
        )
        with pytest.raises(SetupError, match="No server to sample from: use_vllm=True, vllm_mode='colocate'"):
            env_rollout(Echo)([[{"role": "user", "content": "x"}]], trainer)
    assert server.requests == []


@pytest.mark.parametrize("spelling", ["{url}", "{url}/", "127.0.0.1:{port}"])
def test_the_trainers_own_server_given_by_address_is_left_to_trl(spelling: str) -> None:
    with FakeServer(["x"]) as server:
        base_url = spelling.format(url=server.base_url, port=server.base_url.rpartition(":")[2])
        trainer = fake_trainer(
            byte_tokenizer(), use_vllm=True, vllm_mode="server", vllm_server_base_url=server.base_url
        )
        env_rollout(Echo, base_url=base_url)([[{"role": "user", "content": "x"}]], trainer)
    assert not sent_weights(server)
    assert len(server.prompts) == 1


def test_nothing_is_restored_before_something_was_synced() -> None:
    with pytest.raises(WeightSyncError, match="There are no weights to bring to http://x: none were synced yet"):
        CheckpointSync().restore("http://x")


def test_what_is_restored_is_what_was_synced_last(trainer: Any, server: WeightServer) -> None:
    sync = CheckpointSync()
    sync.sync(trainer, [server.base_url])
    train(trainer)
    sync.sync(trainer, [server.base_url])
    sync.restore(server.base_url)
    assert server.paths == SYNC * 3
    assert server.folders[1] == server.folders[2] != server.folders[0]


def test_beside_other_processes_a_prefix_cache_in_use_is_taken_for_theirs(trainer: Any, server: WeightServer) -> None:
    sync = CheckpointSync()
    sync.sync(trainer, [server.base_url])
    sync._is_shared = True
    server.answer = lambda path: (200, {"success": False})
    sync.restore(server.base_url)
    assert server.paths == SYNC * 2
