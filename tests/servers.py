"""The two real servers that tests and benchmarks run against, each on a free port, ended when the block is left."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from trl_rollouts.serving import free_port, serving

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / ".cache/SmolLM2-135M-Instruct"
OLD_TRL = ROOT / ".cache/trl-1.10.0"

_ENV = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def vllm_server(model: Path, log: Path, *vllm_arguments: str, port: int = 0) -> Iterator[str]:
    """`trl-rollouts serve`: yields its base URL."""
    port = port or free_port()
    command = [sys.executable, "-m", "trl_rollouts.cli", "serve", str(model), "--port", str(port)]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", *vllm_arguments]
    base_url = f"http://127.0.0.1:{port}"
    # It gives vLLM fifteen seconds to end, and must not be killed while it does.
    with serving(command, f"{base_url}/health", name="vLLM", grace_s=30.0, log=log, env=_ENV):
        yield base_url


@contextmanager
def old_trl_server(model: Path, log: Path) -> Iterator[str]:
    """The `/generate/` server of TRL 1.10.0, run beside the TRL that is installed: yields its base URL."""
    port = free_port()
    command = [sys.executable, "-m", "trl.scripts.vllm_serve", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max_model_len", "2048"]
    command += ["--dtype", "bfloat16", "--enforce_eager", "true"]
    base_url = f"http://127.0.0.1:{port}"
    env = {**_ENV, "PYTHONPATH": str(OLD_TRL), "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serving(command, f"{base_url}/health/", name="TRL's server", log=log, env=env):
        yield base_url


def running(pids: list[int]) -> list[int]:
    """Those whose processes have not ended; one may end while it is looked at."""
    alive = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive
