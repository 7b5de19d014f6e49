"""OpenEnv servers on loopback, in the virtual environment that has the package: vLLM's cannot have it."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from trl_rollouts.serving import free_port, serving

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".cache/openenv/bin"


def require_openenv() -> None:
    if (BIN / "openenv").exists():
        return
    what = f"{BIN} has no openenv: `make test` puts it there."
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} In CI nothing is skipped.")
    pytest.skip(what)


@contextmanager
def words_server(log: Path, *, capacity: int) -> Iterator[tuple[str, str]]:
    """openenv_words.py: its base URL, and another one where it hangs up on who does not answer its pings."""
    pinging_port = str(free_port())
    program = str(Path(__file__).with_name("openenv_words.py"))
    with _serve([program], log, str(capacity), pinging_port) as base_url:
        yield base_url, f"http://127.0.0.1:{pinging_port}"


@contextmanager
def shop_server(log: Path) -> Iterator[str]:
    """openenv_shop.py: its base URL."""
    with _serve([str(Path(__file__).with_name("openenv_shop.py"))], log) as base_url:
        yield base_url


@contextmanager
def environment_server(folder: Path, name: str) -> Iterator[str]:
    """What `openenv init` writes, as it is: its base URL."""
    subprocess.run([BIN / "openenv", "init", name, "-o", folder], check=True, capture_output=True, timeout=60)
    with _serve(["-m", f"{name}.server.app", "--host", "127.0.0.1"], folder / "log", path=folder) as base_url:
        yield base_url


@contextmanager
def _serve(program: list[str], log: Path, *arguments: str, path: Path | None = None) -> Iterator[str]:
    port = free_port()
    command = [str(BIN / "python"), *program, "--port", str(port), *arguments]
    env, health = {"PYTHONPATH": str(path or "")}, f"http://127.0.0.1:{port}/health"
    with serving(command, health, name=program[-1], log=log, env=env, grace_s=3.0):
        yield f"http://127.0.0.1:{port}"


def sessions(base_url: str, *, forget: bool = False) -> dict[str, int]:
    """What openenv_words.py has counted; with `forget` it begins anew."""
    answer = requests.get(f"{base_url}/sessions", params={"forget": forget}, timeout=10)
    return {name: int(value) for name, value in answer.json().items()}
