"""What a session does for honest code: its own time, its own devices, its own folder."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trl_rollouts.sandbox import ExecStatus, Session
from trl_rollouts.sandbox.local import LocalExecutor

BUSY = "import time\nt = time.process_time()\nwhile time.process_time() - t < 0.3: pass"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


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
