"""The command line: as a process where it starts a server, in this process where it refuses to."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import requests
from servers import running

from trl_rollouts import HttpExecutor, SandboxError
from trl_rollouts.cli import main
from trl_rollouts.serving import free_port

FAKE_VLLM = str(Path(__file__).parent / "fake_vllm")
READY = "ready after"


@contextmanager
def cli(*arguments: str, pythonpath: str = FAKE_VLLM) -> Iterator[subprocess.Popen[str]]:
    """`trl-rollouts serve ARGUMENTS` on a fake vLLM, killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trl_rollouts.cli", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": pythonpath, "HF_HUB_OFFLINE": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(READY):
            return line
    raise AssertionError(f"it ended before it was ready: {process.communicate()}")


def wait_until_gone(pids: list[int], timeout_s: float) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while running(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return running(pids)


def state(port: str) -> dict[str, list]:
    return requests.get(f"http://127.0.0.1:{port}/", timeout=5).json()


def pids_while_it_starts(port: str) -> list[int]:
    for _ in range(100):
        try:
            return state(port)["pids"]
        except requests.ConnectionError:
            time.sleep(0.1)
    raise AssertionError("the fake server does not start")


def test_serve_says_when_it_is_ready_and_which_base_url_to_pass() -> None:
    port = str(free_port())
    with cli("smol", "--port", port) as process:
        line = until_ready(process)
    assert line.endswith(f"s at http://127.0.0.1:{port}: pass base_url='http://127.0.0.1:{port}'\n")


def test_arguments_it_does_not_know_reach_vllm_untouched_and_in_order() -> None:
    port = str(free_port())
    given = ["--max-model-len", "2048", "-tp", "2", "--hf-overrides", '{"a": -1}', "--time", "1", "-O3", "--seed=-5"]
    with cli("smol", "--port", port, *given) as process:
        until_ready(process)
        argv = state(port)["argv"]
    assert argv[:6] == ["--model", "smol", "--host", "127.0.0.1", "--port", port]
    assert argv[6:-4] == given


def test_vllm_is_asked_for_processed_logprobs_in_any_number_and_for_its_dev_mode() -> None:
    port = str(free_port())
    with cli("smol", "--port", port) as process:
        until_ready(process)
        server = state(port)
    assert server["argv"][-4:] == ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    assert server["env"]["VLLM_SERVER_DEV_MODE"] == "1"


def test_what_the_user_says_of_logprobs_is_not_said_twice() -> None:
    port = str(free_port())
    given = ["--logprobs_mode=processed_logprobs", "--max-logprobs", "20"]
    with cli("smol", "--port", port, *given) as process:
        until_ready(process)
        assert state(port)["argv"][6:] == given


@pytest.mark.parametrize(
    "arguments",
    [["--logprobs-mode", "raw_logprobs"], ["--logprobs-mode=raw_logits"], ["--logprobs_mode", "processed_logits"]],
)
def test_other_logprobs_than_the_trainers_are_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FAKE_VLLM)
    assert main(["serve", "smol", *arguments]) == 2
    assert "Leave it out, or pass processed_logprobs" in capsys.readouterr().err


def test_a_model_behind_vllms_own_arguments_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--dtype", "bfloat16", "smol"]) == 2
    assert "MODEL comes before vLLM's own arguments: trl-rollouts serve MODEL --dtype" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["./no/such/folder", "/no/such", "no/such/folder", "nowhere/"])
def test_a_folder_that_does_not_exist_is_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FAKE_VLLM)
    assert main(["serve", model]) == 2
    assert f"{model} does not exist" in capsys.readouterr().err


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FAKE_VLLM)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["serve", "owner/name", "--host", "0.0.0.0", "--port", str(port)]) == 2
    assert f"port {port} on 127.0.0.1 is already in use" in capsys.readouterr().err


def test_without_vllm_the_extra_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert main(["serve", "smol"]) == 2
    assert "pip install 'trl-rollouts[vllm]'" in capsys.readouterr().err


def test_a_server_that_ends_before_it_is_ready_is_reported_below_its_own_log() -> None:
    with cli("smol", "--port", str(free_port()), "--fake-exit", "3") as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "the fake server speaks" in errors.splitlines()[0]
    assert "trl-rollouts: vLLM ended with return code 3 after " in errors.splitlines()[-1]


def test_a_server_that_is_not_ready_in_time_is_reported_and_ended() -> None:
    port = str(free_port())
    with cli("smol", "--port", port, "--timeout-s", "1", "--fake-ready-after-s", "60") as process:
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "did not answer at http://127.0.0.1:" in errors
    with pytest.raises(requests.ConnectionError):
        state(port)


def test_a_server_that_dies_later_ends_the_command_and_the_servers_workers() -> None:
    port = str(free_port())
    with cli("smol", "--port", port) as process:
        until_ready(process)
        pids = state(port)["pids"]
        os.kill(pids[0], signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "vLLM ended by itself with return code -9" in errors
    assert running(pids) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_server_and_its_workers(signum: signal.Signals) -> None:
    port = str(free_port())
    with cli("smol", "--port", port) as process:
        until_ready(process)
        pids = state(port)["pids"]
        process.send_signal(signum)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert "Traceback" not in errors
    assert running(pids) == []


def test_a_signal_while_the_server_starts_ends_it_too() -> None:
    port = str(free_port())
    with cli("smol", "--port", port, "--fake-ready-after-s", "60") as process:
        pids = pids_while_it_starts(port)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert READY not in output
    assert running(pids) == []


def test_a_second_ctrl_c_does_not_wait_for_a_worker_that_hangs() -> None:
    port = str(free_port())
    with cli("smol", "--port", port, "--fake-stubborn") as process:
        until_ready(process)
        pids = state(port)["pids"]
        process.send_signal(signal.SIGINT)
        wait_until_gone(pids[:1], timeout_s=10)
        assert running(pids) == pids[1:]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=5)
    assert running(pids) == []


@pytest.mark.parametrize("starting", [False, True])
def test_the_server_and_its_workers_end_when_the_command_is_killed(starting: bool) -> None:
    port = str(free_port())
    with cli("smol", "--port", port, "--fake-ready-after-s", "60" if starting else "0") as process:
        pids = pids_while_it_starts(port)
        if not starting:
            until_ready(process)
        process.kill()
        process.wait()
        assert wait_until_gone(pids, timeout_s=10) == []


def test_importing_the_command_line_imports_no_heavy_library() -> None:
    code = (
        "import sys, trl_rollouts.cli; print({'torch', 'trl', 'vllm', 'transformers', 'requests'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"


@pytest.mark.server
def test_a_real_vllm_starts_and_leaves_no_process_behind_after_ctrl_c(smollm2: Path) -> None:
    port = str(free_port())
    arguments = ["--port", port, "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048"]
    with cli(str(smollm2), *arguments, pythonpath="") as process:
        until_ready(process)
        assert requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=10).status_code == 200
        pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(pids) > 1  # the engine core is a process of its own
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert running(pids) == []
    groups = [os.getpgid(pid) for pid in psutil.pids() if psutil.pid_exists(pid)]
    assert pids[0] not in groups


def test_doctor_says_what_confines_code_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "code execution: confined by limits, landlock, seccomp, as " in said
    assert "trl 1." in said


def test_doctor_takes_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--fast"])
    assert "unrecognized arguments: --fast" in capsys.readouterr().err


def test_sandbox_runs_code_for_a_trainer_elsewhere_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    port = free_port()
    command = [sys.executable, "-m", "trl_rollouts.cli", "sandbox", "--port", str(port)]
    command += ["--token-file", str(tmp_path / "token")]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("code is confined by limits, landlock, seccomp, as ")

        async def use(token: str) -> str | None:
            executor = HttpExecutor(f"http://127.0.0.1:{port}", token=token)
            result = await (await executor.open()).run("6 * 7", 10.0)
            await executor.close()
            return result.value

        assert asyncio.run(use("secret")) == "42"
        with pytest.raises(SandboxError, match="the token is missing or wrong"):
            asyncio.run(use("guess"))
        process.terminate()
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def test_sandbox_needs_the_token_file_it_is_told_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["sandbox", "--token-file", str(tmp_path / "absent")]) == 2
    assert "No such file" in capsys.readouterr().err
