"""Starting a server, waiting for it, ending all of it: with a server that is no more than that."""

import sys
import time
from pathlib import Path

import psutil
import pytest
import requests
from servers import running

from trl_rollouts.errors import ServerError
from trl_rollouts.serving import free_port, serving

FAKE = Path(__file__).parent / "fake_vllm/vllm/entrypoints/openai/api_server.py"


def fake(*arguments: str) -> tuple[list[str], str]:
    port = str(free_port())
    return [sys.executable, str(FAKE), "--port", port, *arguments], f"http://127.0.0.1:{port}/health"


def test_the_block_starts_once_the_server_is_healthy_and_leaves_no_process_behind(tmp_path: Path) -> None:
    command, health_url = fake("--fake-ready-after-s", "0.5")
    with serving(command, health_url, name="it", log=tmp_path / "log") as server:
        answer = requests.get(health_url, timeout=5)
        pids = answer.json()["pids"]
        assert answer.status_code == 200
        assert server.pid == pids[0]
        assert running(pids) == pids
    assert running(pids) == []


def test_an_error_inside_the_block_ends_the_server_too(tmp_path: Path) -> None:
    command, health_url = fake()
    pids: list[int] = []
    try:
        with serving(command, health_url, name="it", log=tmp_path / "log"):
            pids = requests.get(health_url, timeout=5).json()["pids"]
            raise ZeroDivisionError
    except ZeroDivisionError:
        assert len(pids) == 2
        assert running(pids) == []


def test_a_worker_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    command, health_url = fake("--fake-stubborn")
    with serving(command, health_url, name="it", log=tmp_path / "log", grace_s=0.5):
        pids = requests.get(health_url, timeout=5).json()["pids"]
        start = time.monotonic()
    assert running(pids) == []
    assert 0.5 <= time.monotonic() - start < 5


def test_a_worker_whose_server_was_killed_is_ended(tmp_path: Path) -> None:
    command, health_url = fake()
    with serving(command, health_url, name="it", log=tmp_path / "log") as server:
        pids = requests.get(health_url, timeout=5).json()["pids"]
        server.kill()
        server.wait()
        assert running(pids) == pids[1:]
    assert running(pids) == []


def test_a_server_that_ends_before_it_is_ready_raises_with_its_return_code_and_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    command, health_url = fake("--fake-exit", "7")
    with (
        pytest.raises(ServerError, match=r"it ended with return code 7 .*\n.*the fake server speaks"),
        serving(command, health_url, name="it", log=tmp_path / "log"),
    ):
        pytest.fail("the block was entered")


def test_a_server_that_is_not_ready_in_time_raises_and_is_ended(tmp_path: Path) -> None:
    command, health_url = fake("--fake-ready-after-s", "60")
    with (
        pytest.raises(ServerError, match=r"it did not answer at .*/health within 1 s"),
        serving(command, health_url, name="it", log=tmp_path / "log", timeout_s=1.0),
    ):
        pytest.fail("the block was entered")
    assert not [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == command]


def test_waiting_is_reported_with_the_seconds_so_far(tmp_path: Path) -> None:
    command, health_url = fake("--fake-ready-after-s", "6")
    lines: list[str] = []
    with serving(command, health_url, name="it", log=tmp_path / "log", report=lines.append):
        assert lines == ["waiting for it: 5 s"]
