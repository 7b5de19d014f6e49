"""What a session does for honest code: its own time, its own devices, its own folder."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import processes_of

from trl_rollouts import SandboxError
from trl_rollouts.sandbox import ExecStatus, Session
from trl_rollouts.sandbox.local import LocalExecutor

BUSY = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.3: pass"


@pytest.fixture(scope="module")
def executor(runner: asyncio.Runner) -> Iterator[LocalExecutor]:
    executor = LocalExecutor(modules=[])
    yield executor
    runner.run(executor.close())


@pytest.fixture
def session(runner: asyncio.Runner, executor: LocalExecutor) -> Iterator[Session]:
    session = runner.run(executor.open())
    yield session
    runner.run(session.close())


def test_waiting_for_a_processor_does_not_count_against_a_snippet(
    runner: asyncio.Runner, executor: LocalExecutor
) -> None:
    num = 8 * (os.cpu_count() or 1)

    async def all_at_once() -> list[ExecStatus]:
        sessions = [await executor.open() for _ in range(num)]
        results = await asyncio.gather(*(session.run(BUSY, 1.0) for session in sessions))
        await asyncio.gather(*(session.close() for session in sessions))
        return [result.status for result in results]

    assert runner.run(all_at_once()) == [ExecStatus.OK] * num  # 2.4 s of wall clock each, at the least


def test_a_snippet_that_waits_holds_up_no_other(runner: asyncio.Runner, executor: LocalExecutor) -> None:
    async def quick_among_sleepers() -> bool:
        sessions = [await executor.open() for _ in range(20)]
        sleeping = [asyncio.create_task(one.run("import time; time.sleep(3)", 10.0)) for one in sessions[1:]]
        await sessions[0].run("1", 10.0)
        was_first = not any(task.done() for task in sleeping)
        await asyncio.gather(*sleeping)
        await asyncio.gather(*(one.close() for one in sessions))
        return was_first

    assert runner.run(quick_among_sleepers())


def test_output_can_be_thrown_away(runner: asyncio.Runner, session: Session) -> None:
    result = runner.run(session.run("import os\nwith open(os.devnull, 'w') as file: print('x', file=file)", 10.0))
    assert (result.status, result.error) == (ExecStatus.OK, None)


def test_a_traceback_marks_the_right_place_of_the_last_line(runner: asyncio.Runner, session: Session) -> None:
    result = runner.run(session.run("x = int('a')", 10.0))
    assert result.error is not None
    assert "    x = int('a')\n        ^^^^^^^^\n" in result.error


@pytest.mark.parametrize("timeout_s", ["5", 0, -1.0, None, True])
def test_a_time_limit_that_is_none_is_refused_and_the_session_goes_on(
    runner: asyncio.Runner, session: Session, timeout_s: float
) -> None:
    with pytest.raises(ValueError, match="timeout_s must be a positive number"):
        runner.run(session.run("1", timeout_s))
    assert runner.run(session.run("6 * 7", 10.0)).value == "42"


def test_two_snippets_at_a_time_are_refused(runner: asyncio.Runner, session: Session) -> None:
    async def both() -> None:
        first = asyncio.create_task(session.run("import time; time.sleep(0.3); 1", 10.0))
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="one snippet at a time"):
            await session.run("2", 10.0)
        assert (await first).value == "1"

    runner.run(both())


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    orphan, fresh = tmp_path / "trl_rollouts-orphan", tmp_path / "trl_rollouts-fresh"
    for folder in (orphan, fresh):
        folder.mkdir()
        (folder / "canary").touch()
    os.utime(orphan, (1, 1))

    async def open_one() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)
        await executor.open()
        await executor.close()

    asyncio.run(open_one())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trl_rollouts-fresh"]


def test_the_folder_of_a_living_process_stays(tmp_path: Path, runner: asyncio.Runner) -> None:
    first, second = LocalExecutor(modules=[], folder=tmp_path), LocalExecutor(modules=[], folder=tmp_path)
    session = runner.run(first.open())
    [folder] = tmp_path.iterdir()
    os.utime(folder, (1, 1))
    runner.run(second.open())
    assert runner.run(session.run("open('file', 'w').write('x')", 10.0)).status is ExecStatus.OK
    runner.run(first.close())
    runner.run(second.close())


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewraps_fork_server_outlives_the_thread_that_started_it() -> None:
    executor = LocalExecutor(modules=[], bubblewrap=True)
    servers = []

    async def use() -> None:
        assert (await (await executor.open()).run("6 * 7", 10.0)).value == "42"
        servers.append(executor._server)

    for _ in range(3):
        thread = threading.Thread(target=asyncio.run, args=(use(),))
        thread.start()
        thread.join()
    asyncio.run(executor.close())
    assert servers[0] is servers[1] is servers[2]


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_nothing_is_left_of_bubblewraps_processes(tmp_path: Path) -> None:
    async def use() -> None:
        executor = LocalExecutor(modules=[], bubblewrap=True, folder=tmp_path)
        sessions = [await executor.open() for _ in range(2)]
        await asyncio.gather(*(session.run("1", 10.0) for session in sessions))
        await executor.close()

    asyncio.run(use())
    deadline = time.monotonic() + 10.0
    while processes_of(str(tmp_path)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert list(tmp_path.iterdir()) == []


def test_many_first_sessions_start_one_fork_server(runner: asyncio.Runner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="trl_rollouts")

    async def open_all() -> None:
        executor = LocalExecutor(modules=[])
        await asyncio.gather(*(executor.open() for _ in range(64)))
        await executor.close()

    runner.run(open_all())
    assert caplog.text.count("is confined by") == 1


def test_a_fork_server_that_cannot_start_is_tried_once_by_all_who_wait(runner: asyncio.Runner) -> None:
    starts = []

    def wrapper(command: list[str], base: str) -> list[str]:
        starts.append(base)
        time.sleep(0.3)
        return ["/bin/false"]

    async def open_all() -> list[BaseException | object]:
        executor = LocalExecutor(modules=[])
        executor._wrapper = wrapper
        return await asyncio.gather(*(executor.open() for _ in range(16)), return_exceptions=True)

    assert all(isinstance(outcome, SandboxError) for outcome in runner.run(open_all()))
    assert len(starts) == 1
    assert not os.path.exists(starts[0])


def test_a_forked_child_of_a_trainer_that_was_killed_keeps_no_session(tmp_path: Path) -> None:
    script = """
import asyncio, os, sys, time
from trl_rollouts.sandbox.local import LocalExecutor

async def main():
    session = await LocalExecutor(modules=[], folder=sys.argv[1]).open()
    running = asyncio.create_task(session.run("while True: pass", 600.0))
    await asyncio.sleep(0.3)
    if os.fork() == 0:  # as a DataLoader's worker
        time.sleep(60)
        os._exit(0)
    print("ready", flush=True)
    await running

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"ready\n"
        child = int(Path(f"/proc/{host.pid}/task/{host.pid}/children").read_text().split()[-1])
        host.kill()
        deadline = time.monotonic() + 10.0
        while list(tmp_path.iterdir()):
            assert time.monotonic() < deadline, "the sessions go on"
            time.sleep(0.05)
        os.kill(child, signal.SIGKILL)
