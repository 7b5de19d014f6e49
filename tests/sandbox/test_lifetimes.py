"""What is started ends, and what is left behind is nothing: processes, descriptors, folders, memory."""

import asyncio
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from harness import pid_of, processes_of

from trl_rollouts import SessionError
from trl_rollouts.sandbox import ExecStatus
from trl_rollouts.sandbox.local import LocalExecutor

SPIN = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
SPIN_AND_WRITE = "i = 0\nwhile True:\n    with open(str(i % 1000), 'w') as file: file.write('x')\n    i += 1"

HOST = """
import asyncio, sys
from trl_rollouts.sandbox.local import LocalExecutor

async def main():
    executor = LocalExecutor(modules=[], folder=sys.argv[1])
    sessions = [await executor.open() for _ in range(6)]
    runs = [asyncio.create_task(session.run(sys.argv[2], 600.0)) for session in sessions[:4]]
    await asyncio.sleep(0.5)
    print("spinning", flush=True)
    await asyncio.sleep(float(sys.argv[3]))
    if sys.argv[3] == "0": sys.exit()

asyncio.run(main())
"""


def wait_until(holds: object, what: str, timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def zombies() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) == os.getpid():
            found.append(int(name))
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_ten_thousand_snippets_leave_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)

        async def trajectory(number: int) -> None:
            session = await executor.open()
            assert (await session.run(f"total = {number}", 20.0)).status == "ok"
            for i in range(33):
                result = await session.run(f"total += {i}\nprint(total, file=open('f', 'a'))\n'x' * total", 20.0)
                assert result.status == "ok"
            codes = ["import sys; sys.exit(1)", "import os; os._exit(1)", "import os; os.close(3)", "1 / 0"]
            await session.run(codes[number % len(codes)], 20.0)
            await session.close()

        async def batch(first: int) -> None:
            await asyncio.gather(*(trajectory(first + number) for number in range(20)))

        await batch(0)
        (base,) = tmp_path.iterdir()
        gc.collect()
        num_fds, num_bytes, num_processes = (
            len(os.listdir("/proc/self/fd")),
            resident_bytes(),
            len(processes_of(str(base))),
        )
        for first in range(20, 300, 20):
            await batch(first)
        assert sorted(os.listdir(base)) == ["canary", "log"]
        assert (base / "log").read_text() == ""
        assert len(os.listdir("/proc/self/fd")) == num_fds
        assert len(processes_of(str(base))) == num_processes == 1
        assert zombies() == []
        assert resident_bytes() - num_bytes < 8 << 20
        await executor.close()
        assert list(tmp_path.iterdir()) == []
        assert zombies() == []

    asyncio.run(main())


def started_host(folder: Path, code: str, stays_s: float) -> "tuple[subprocess.Popen[bytes], str]":
    """A process with an executor, four sessions of which run `code` and two nothing; and the executor's folder."""
    host = subprocess.Popen([sys.executable, "-c", HOST, str(folder), code, str(stays_s)], stdout=subprocess.PIPE)
    assert host.stdout is not None
    assert host.stdout.readline() == b"spinning\n"
    (base,) = map(str, folder.iterdir())
    return host, base


@pytest.mark.parametrize("code", [SPIN, SPIN_AND_WRITE], ids=["spinning", "writing"])
def test_a_killed_host_takes_its_fork_server_sessions_and_folder_along(tmp_path: Path, code: str) -> None:
    host, base = started_host(tmp_path, code, stays_s=600)
    assert len(processes_of(base)) == 7
    host.kill()
    host.communicate()
    wait_until(lambda: not processes_of(base), "processes are left")
    wait_until(lambda: not list(tmp_path.iterdir()), "the folder is left")


@pytest.mark.parametrize("code", [SPIN, SPIN_AND_WRITE], ids=["spinning", "writing"])
def test_a_host_that_exits_without_closing_leaves_nothing(tmp_path: Path, code: str) -> None:
    host, base = started_host(tmp_path, code, stays_s=0)
    host.communicate(timeout=30.0)
    assert host.returncode == 0
    wait_until(lambda: not processes_of(base), "processes are left")
    wait_until(lambda: not list(tmp_path.iterdir()), "the folder is left")


def test_a_fork_server_that_is_killed_takes_its_sessions_along_and_is_started_again(tmp_path: Path) -> None:
    async def main() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)
        idle, busy = await executor.open(), await executor.open()
        run = asyncio.create_task(busy.run(SPIN, 60.0))
        await asyncio.sleep(0.2)
        (base,) = map(str, tmp_path.iterdir())
        assert executor._server is not None
        os.kill(executor._server._process.pid, signal.SIGKILL)
        assert (await asyncio.wait_for(run, 10.0)).status == ExecStatus.DIED
        assert (await idle.run("1", 5.0)).status == ExecStatus.DIED
        assert not idle.is_alive
        fresh = await executor.open()
        assert (await fresh.run("40 + 2", 10.0)).value == "42"
        await asyncio.gather(idle.close(), busy.close())
        wait_until(lambda: not processes_of(base), "processes are left")
        await executor.close()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_closing_an_executor_ends_sessions_in_the_midst_of_their_snippets(tmp_path: Path) -> None:
    async def main() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)
        sessions = [await executor.open() for _ in range(4)]
        runs = [asyncio.create_task(session.run(SPIN_AND_WRITE, 60.0)) for session in sessions]
        await asyncio.sleep(0.3)
        (base,) = map(str, tmp_path.iterdir())
        await executor.close()
        assert {result.status for result in await asyncio.gather(*runs)} <= {"died", "killed"}
        assert processes_of(base) == []
        assert list(tmp_path.iterdir()) == []
        for session in sessions:
            await session.close()

    asyncio.run(main())


def test_an_executor_is_closed_once_nobody_holds_it_or_a_session_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        session = await LocalExecutor(modules=[], folder=tmp_path).open()
        gc.collect()
        assert (await session.run("40 + 2", 10.0)).value == "42"
        (base,) = map(str, tmp_path.iterdir())
        await session.close()
        del session
        gc.collect()
        assert processes_of(base) == []
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())


def test_a_fork_of_the_host_that_exits_leaves_the_executor_alone(tmp_path: Path) -> None:
    async def main() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)
        session = await executor.open()
        if (pid := os.fork()) == 0:
            executor._server = None
            del session, executor
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        assert (await session.run("40 + 2", 10.0)).value == "42"
        await executor.close()

    asyncio.run(main())


def test_a_cancelled_run_ends_its_session(tmp_path: Path) -> None:
    async def main() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)
        session = await executor.open()
        pid = pid_of(session)  # type: ignore[arg-type]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.run(SPIN, 60.0), 0.2)
        assert not session.is_alive
        await session.close()
        assert not Path(f"/proc/{pid}").exists()
        await executor.close()

    asyncio.run(main())


def test_sessions_of_two_loops_on_two_threads_share_one_executor(tmp_path: Path) -> None:
    executor, values = LocalExecutor(modules=[], folder=tmp_path), list[str | None]()

    async def many() -> None:
        async def one(number: int) -> str | None:
            session = await executor.open()
            result = await session.run(f"{number} + 1", 30.0)
            await session.close()
            return result.value

        values.extend(await asyncio.gather(*(one(number) for number in range(40))))

    threads = [threading.Thread(target=lambda: asyncio.run(many())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert values == [str(number + 1) for number in range(40)] * 2
    assert [len(list(base.iterdir())) for base in tmp_path.iterdir()] == [2]
    asyncio.run(executor.close())


def test_a_session_that_cannot_be_prepared_is_an_error_of_that_session(tmp_path: Path) -> None:
    async def main() -> None:
        executor = LocalExecutor(modules=[], folder=tmp_path)
        session = await executor.open()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (5, limits[1]))  # all of them are in use
        try:
            with pytest.raises(SessionError, match="could not be prepared"):
                await executor.open()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert (await session.run("40 + 2", 10.0)).value == "42"
        await (await executor.open()).close()
        await session.close()
        await executor.close()
        assert list(tmp_path.iterdir()) == []

    asyncio.run(main())
