"""Run a server as a subprocess: start it, wait until it is healthy, end all of it.

    with serving(command, "http://127.0.0.1:8000/health", name="vLLM", log=Path("vllm.log")) as server:
        ...

Contract: the block is entered once the health URL answers 200. However the block is left, no process of the server's
group outlives it, not even when the process that runs the block is killed.

It does not choose the command (the CLI does), restart a server, install signal handlers, or watch a server that is
ready: its `poll()` and `wait()` are there for that.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .errors import ServerError

_POLL_S = 0.2
_REPORT_EVERY_S = 5.0

# Reads the server's process group and ends that group when its standard input ends, as it does even when its writer is
# killed. Linux could tell the server itself of our death (PR_SET_PDEATHSIG), but vLLM ignores SIGTERM while it loads a
# model, and its engine outlives a killed server.
_GUARD = """
import os, signal, sys, time
group, grace_s = int(sys.stdin.readline() or sys.exit()), float(sys.argv[1])
sys.stdin.read()
deadline = time.monotonic() + grace_s
try:
    os.killpg(group, signal.SIGTERM)
    while time.monotonic() < deadline:
        os.killpg(group, 0)
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


@contextmanager
def serving(
    command: Sequence[str],
    health_url: str,
    *,
    name: str,
    timeout_s: float = 600.0,
    grace_s: float = 15.0,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    report: Callable[[str], None] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command` while the block runs, which starts when `health_url` answers.

    Args:
        command: the server's argument list.
        health_url: what answers 200 once the server is ready.
        name: what messages call the server.
        timeout_s: how long it may take to become ready.
        grace_s: how long its processes have between SIGTERM and SIGKILL; a fifth of it while it is not ready yet.
        log: the file that its output is written to; without one, its output joins our stderr.
        env: variables on top of this process's own.
        report: called about every five seconds, with a line that says how long it has been waited for.

    Raises:
        ServerError: it ended before it was ready (with the end of its log), or was not ready in time.
    """
    # Until it is ready a server has nothing to put away, and vLLM then ignores SIGTERM.
    allowed_s = grace_s / 5
    with _guard(grace_s) as guard:
        process = _start(command, log, env or {})
        try:
            guard.write(b"%d\n" % process.pid)
            guard.flush()
            _wait_until_healthy(process, health_url, name, timeout_s, log, report or (lambda line: None))
            allowed_s = grace_s
            yield process
        finally:
            _end_group(process, allowed_s)


def free_port() -> int:
    """A TCP port on loopback that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _guard(grace_s: float) -> Iterator[IO[bytes]]:
    command = [sys.executable, "-I", "-S", "-c", _GUARD, str(grace_s)]
    # Out of our group, whose Ctrl-C it must survive, and without our output, which it would hold open.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert process.stdin is not None
        try:
            yield process.stdin
        finally:
            process.kill()  # the group is gone, and its number may become another's


def _start(command: Sequence[str], log: Path | None, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with open(log, "wb") if log else os.fdopen(os.dup(2), "wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,  # a group of its own, which can be ended as a whole
        )


def _wait_until_healthy(
    process: subprocess.Popen[bytes],
    health_url: str,
    name: str,
    timeout_s: float,
    log: Path | None,
    report: Callable[[str], None],
) -> None:
    start = time.monotonic()
    next_report_s = _REPORT_EVERY_S
    while not _answers(health_url):
        waited_s = time.monotonic() - start
        if process.poll() is not None:
            raise ServerError(
                f"{name} ended with return code {process.returncode} after {waited_s:.0f} s, before it answered at "
                f"{health_url}. {_end_of(log)}"
            )
        if waited_s > timeout_s:
            raise ServerError(f"{name} did not answer at {health_url} within {timeout_s:g} s. {_end_of(log)}")
        if waited_s >= next_report_s:
            report(f"waiting for {name}: {waited_s:.0f} s")
            next_report_s += _REPORT_EVERY_S
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    import requests

    with requests.Session() as session:
        session.trust_env = False  # a proxy for the world must not be asked for a server of ours
        try:
            return session.get(url, timeout=2.0).status_code == 200
        except requests.RequestException:
            return False


def _end_of(log: Path | None, num_lines: int = 30) -> str:
    if log is None:
        return "Its log above says why."
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join([f"The end of {log}:", *lines[-num_lines:]])


def _end_group(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End every process of the group that `process` leads: a server's workers may outlive the server."""
    try:
        _signal_group(process, signal.SIGTERM)
        _wait_until_empty(process, grace_s)
    finally:  # also when a second Ctrl-C cuts the wait short
        _signal_group(process, signal.SIGKILL)
        _wait_until_empty(process, timeout_s=5.0)


def _wait_until_empty(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while _group_exists(process) and time.monotonic() < deadline:
        time.sleep(0.05)


def _group_exists(process: subprocess.Popen[bytes]) -> bool:
    process.poll()  # collects the leader, which would count as a member until then
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of which only zombies are left
        return False
    if sys.platform != "linux":
        return True
    # A worker whose server is gone is collected by process 1: late, or never where that is no init, as in a container.
    return any(_is_live_member(stat, process.pid) for stat in Path("/proc").glob("[0-9]*/stat"))


def _is_live_member(stat: Path, group: int) -> bool:
    try:
        state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]  # the name before may hold spaces
    except OSError:  # it has ended since it was listed
        return False
    return int(pgrp) == group and state not in "ZX"


def _signal_group(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    if _group_exists(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
