"""What is left of a rollout that is interrupted: no open request, no child process, no thread, no open environment."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from servers import running

from trl_rollouts import StepResult, env_rollout
from trl_rollouts.testing import FakeServer, Reply, byte_tokenizer, fake_trainer

TOKENIZER = byte_tokenizer()
SCRIPT = Path(__file__).with_name("interrupted.py")


def until(is_so: Callable[[], Any], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(is_so())


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["request", "step", "code"])
def test_a_signal_ends_it_at_once_and_nothing_is_left(signum: signal.Signals, where: str) -> None:
    def reply(prompt: list[int]) -> Reply:
        if where == "request":
            return Reply([97, 258], delay_s=60.0)
        return Reply([*(b"<code>while True: pass</code>" if where == "code" else b"a"), 258])

    with FakeServer(reply, tokenizer=TOKENIZER) as server:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "code" if where == "code" else "env", server.base_url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert until(lambda: len(server.prompts) == 4, timeout_s=60.0)
            time.sleep(0.5)  # into what follows the answers
            children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            assert bool(children) is (where == "code")
            started = time.monotonic()
            process.send_signal(signum)
            output, errors = process.communicate(timeout=30)
            assert time.monotonic() - started < 15
        finally:
            process.kill()
            process.communicate()
        assert until(lambda: server._in_flight == 0)
        assert until(lambda: running(children) == [])
    if signum is signal.SIGINT:
        assert "KeyboardInterrupt" in errors
        # Behind a step that hangs in its thread, a close would have to wait for it.
        assert output.count("closed") == (0 if where == "code" else 4)
    assert process.returncode != 0


class Once:
    """One turn, counted from its making to its close."""

    num_open = 0

    def reset(self, prompt: Any) -> Any:
        type(self).num_open += 1
        return prompt

    def step(self, action: Any) -> StepResult:
        return StepResult(reward=1.0, terminated=True)

    def close(self) -> None:
        type(self).num_open -= 1


def test_a_rollout_that_is_collected_leaves_no_thread_and_no_connection() -> None:
    before = {*threading.enumerate()}
    with FakeServer(lambda prompt: "a") as server:
        rollout: Any = env_rollout(Once, base_url=server.base_url, weight_sync=None)
        rollout([[{"role": "user", "content": "p"}]], fake_trainer(TOKENIZER))
        num_files = psutil.Process().num_fds()
        del rollout
        gc.collect()
        assert until(lambda: not [one for one in {*threading.enumerate()} - before if one.name == "trl_rollouts"])
        assert psutil.Process().num_fds() < num_files


def test_an_exception_in_a_reward_function_finds_everything_closed(tmp_path: Path) -> None:
    from contract_parts import chat, make_trainer

    def broken(**columns: Any) -> list[float]:
        assert Once.num_open == 0
        raise ZeroDivisionError("no reward")

    with FakeServer(lambda prompt: "a") as server:
        rollout = env_rollout(Once, base_url=server.base_url)
        trainer = make_trainer(rollout, tmp_path, [chat("x")], reward_funcs=broken)
        with pytest.raises(ZeroDivisionError, match="no reward"):
            trainer.train()
        assert server._in_flight == 0
        rollout.close()
