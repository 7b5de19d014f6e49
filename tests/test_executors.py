"""Every executor of the package keeps to one contract, and `check_executor` notices one that does not."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trl_rollouts.engine import Engine
from trl_rollouts.errors import SandboxError, SessionError, SetupError
from trl_rollouts.sandbox import ExecResult, ExecStatus, HostCall, Session
from trl_rollouts.sandbox.http import HttpExecutor, serve_executor
from trl_rollouts.sandbox.local import LocalExecutor
from trl_rollouts.sandbox.ray import RayExecutor
from trl_rollouts.testing import check_executor
from trl_rollouts.testing.executor_checks import CHECKS

WAIT = "import time; time.sleep(1000)"


local = partial(LocalExecutor, modules=())


# The contract


def test_the_local_executor_keeps_to_the_contract() -> None:
    assert len(asyncio.run(check_executor(local()))) == len(CHECKS)


def test_every_check_is_listed_once_under_a_name_that_says_what_is_owed() -> None:
    from trl_rollouts.testing import executor_checks

    written = [name for name, one in vars(executor_checks).items() if asyncio.iscoroutinefunction(one)]
    assert written == [check.__name__ for check in CHECKS]


class Broken:
    """An executor whose sessions do what the local one's do, but for what `spoil` makes of it."""

    def __init__(self, spoil: Callable[["BrokenSession", str, float], Any]) -> None:
        self.spoil = spoil
        self.inner = local()

    async def open(self, functions: Sequence[str] = (), call: HostCall | None = None) -> Session:
        session = BrokenSession()
        session.executor, session.functions, session.call = self, functions, call
        session.inner = await self.inner.open(functions, call)
        return session

    async def close(self) -> None:
        await self.inner.close()


class BrokenSession:
    executor: Broken
    functions: Sequence[str]
    call: HostCall | None
    inner: Session

    @property
    def is_alive(self) -> bool:
        return self.inner.is_alive

    async def run(self, code: str, timeout_s: float) -> ExecResult:
        result: ExecResult = await self.executor.spoil(self, code, timeout_s)
        return result

    async def close(self) -> None:
        await self.inner.close()


def failures_of(spoil: Callable[[BrokenSession, str, float], Any], timeout_s: float) -> str:
    with pytest.raises(AssertionError) as caught:
        asyncio.run(check_executor(Broken(spoil), timeout_s=timeout_s))
    return str(caught.value)


def test_an_executor_that_forgets_and_sends_broken_texts_fails_by_name() -> None:
    async def spoil(session: BrokenSession, code: str, timeout_s: float) -> ExecResult:
        result = await session.inner.run(code, timeout_s)
        if session.inner.is_alive:
            await session.inner.close()
            session.inner = await session.executor.inner.open(session.functions, session.call)
        return replace(result, stderr="\ud800") if "ud800" in code else result

    said = failures_of(spoil, timeout_s=60.0)
    assert said.startswith(f"Broken fails 11 of {len(CHECKS)} checks.\n")
    assert "\n  state_is_kept_from_snippet_to_snippet: expected: status=ok after 'x += double(" in said
    assert "; seen: status=error. It said: Traceback" in said
    assert "\n  no_text_is_invalid: expected: valid Unicode; seen: '\\ud800'" in said
    assert "files_are_kept_from_snippet_to_snippet" in said
    assert "sessions_run_at_the_same_time" not in said


def test_an_executor_that_keeps_no_time_fails_and_hangs_nobody() -> None:
    async def spoil(session: BrokenSession, code: str, timeout_s: float) -> ExecResult:
        return await session.inner.run(code, 1000.0)

    said = failures_of(spoil, timeout_s=3.0)
    assert "\n  the_time_limit_interrupts_and_keeps_state: it did not come back within 3 s" in said
    assert "\n  a_snippet_that_swallows_interrupts_is_killed: it did not come back within 3 s" in said
    assert "state_is_kept_from_snippet_to_snippet" not in said


def test_an_executor_that_cannot_open_a_session_says_why_once() -> None:
    with pytest.raises(SandboxError, match="No module named 'not_there'"):
        asyncio.run(check_executor(LocalExecutor(modules=["not_there"])))


# HTTP


def test_an_executor_over_http_keeps_to_the_contract() -> None:
    async def steps() -> list[str]:
        async with serve_executor(local(), token="secret") as base_url:
            return await check_executor(HttpExecutor(base_url, token="secret"))

    assert len(asyncio.run(steps())) == len(CHECKS)


def test_a_wrong_token_opens_nothing() -> None:
    async def steps() -> None:
        async with serve_executor(local(), token="secret") as base_url:
            with pytest.raises(SandboxError, match="answered 401: the token is missing or wrong"):
                await HttpExecutor(base_url, token="Secret\u00e9").open()

    asyncio.run(steps())


def test_a_server_that_is_gone_takes_its_sessions_along() -> None:
    async def steps() -> None:
        async with serve_executor(local(), token="secret") as base_url:
            executor = HttpExecutor(base_url, token="secret")
            session = await executor.open()
            running = asyncio.create_task((await executor.open()).run(WAIT, 1000.0))
            await asyncio.sleep(0.5)
        with pytest.raises(SessionError):
            await running
        for _ in range(2):
            with pytest.raises(SessionError, match=f"The sandbox at {base_url} cannot be reached"):
                await session.run("1", 60.0)
        assert not session.is_alive
        await session.close()
        with pytest.raises(SandboxError, match=f"The sandbox at {base_url} cannot be reached"):
            await executor.open()

    asyncio.run(steps())


def test_a_session_that_its_host_has_left_is_closed() -> None:
    async def steps() -> None:
        async with serve_executor(local(), token="secret", idle_timeout_s=1.0) as base_url:
            session = await HttpExecutor(base_url, token="secret").open()
            result = await session.run("import os, time; time.sleep(2); print(os.getcwd())", 60.0)
            folder = Path(result.stdout.strip())
            assert folder.exists()
            await asyncio.sleep(2.0)
            assert not folder.exists()
            with pytest.raises(SessionError, match="not open, or no longer"):
                await session.run("1", 60.0)
            await session.close()

    asyncio.run(steps())


def test_an_empty_token_is_refused() -> None:
    async def steps() -> None:
        async with serve_executor(local(), token=""):
            pass

    with pytest.raises(SetupError, match="token must not be empty"):
        asyncio.run(steps())


# Ray


def test_without_a_cluster_none_is_started(tmp_path: Path) -> None:
    from ray._private.services import find_gcs_addresses

    if find_gcs_addresses():
        pytest.skip("A Ray cluster runs on this machine already.")
    process = host("pass", RAY_TMPDIR=str(tmp_path), RAY_ADDRESS="")
    assert "SandboxError: There is no Ray cluster to run model-written code on" in process.communicate(timeout=60)[1]
    assert not find_gcs_addresses()


def test_an_address_at_which_nobody_listens_is_an_error_at_once() -> None:
    process = host("pass", RAY_ADDRESS="127.0.0.1:1")
    assert "SandboxError: There is no Ray cluster to run model-written code on" in process.communicate(timeout=60)[1]


class Nodes:
    """A cluster of real nodes on this machine, whose head has no processor."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, num_cpus: int = 1) -> Any:
        return self.cluster.add_node(num_cpus=num_cpus, object_store_memory=80 << 20)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """The cluster, with one node of two processors."""
    import ray

    nodes = Nodes()
    nodes.add(num_cpus=2)
    ray.init(address=nodes.address, log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.cluster.shutdown()


def node_of(session: Any) -> Any:
    return session._carry.__self__


def test_the_ray_executor_keeps_to_the_contract(nodes: Nodes) -> None:
    engine = Engine()  # in a thread that is not the main one, as in a rollout
    assert len(engine.run(check_executor(RayExecutor(local)))) == len(CHECKS)
    engine.close()


def test_what_holds_a_node_is_known_once_it_has_a_session(nodes: Nodes) -> None:
    async def steps() -> None:
        executor = RayExecutor(local)
        assert executor.isolation == {}
        await executor.open()
        (isolation,) = executor.isolation.values()
        assert isolation.layers[:3] == ("limits", "landlock", "seccomp")
        await executor.close()

    asyncio.run(steps())


def test_closing_leaves_no_process_and_no_file(nodes: Nodes) -> None:
    async def steps() -> Path:
        executor = RayExecutor(local)
        session = await executor.open()
        folder = Path((await session.run("import os; print(os.getcwd())", 60.0)).stdout.strip())
        assert folder.exists()
        await session.close()
        assert not folder.exists()
        await executor.open()
        await executor.close()
        return folder.parent

    base = asyncio.run(steps())
    assert not base.exists()
    assert not processes_in(base)


def test_several_event_loops_use_one_executor_at_a_time(nodes: Nodes) -> None:
    executor, values = RayExecutor(local), []

    async def double(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return 2 * args[0]

    async def steps(number: int) -> None:
        session = await executor.open(["double"], double)
        values.append((await session.run(f"double({number})", 60.0)).value)
        await session.close()

    threads = [threading.Thread(target=lambda n=n: asyncio.run(steps(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, values)) == ["0", "2", "4", "6"]
    asyncio.run(executor.close())


def test_three_hundred_sessions_at_a_time(nodes: Nodes) -> None:
    async def steps() -> None:
        executor = RayExecutor(local)
        sessions = await asyncio.gather(*(executor.open() for _ in range(300)))
        results = await asyncio.gather(*(one.run(f"{n} + 1", 60.0) for n, one in enumerate(sessions)))
        assert [one.value for one in results] == [str(n + 1) for n in range(300)]
        await asyncio.gather(*(one.close() for one in sessions))
        await executor.close()

    asyncio.run(steps())


def test_an_open_that_is_cancelled_leaves_no_session(nodes: Nodes) -> None:
    async def steps() -> None:
        executor = RayExecutor(local)
        session = await executor.open()
        where = "import os\nprint(os.path.dirname(os.getcwd()))"
        base = Path((await session.run(where, 60.0)).stdout.strip())
        opening = [asyncio.create_task(executor.open()) for _ in range(20)]
        await asyncio.sleep(0.02)
        for one in opening:
            one.cancel()
        await asyncio.gather(*opening, return_exceptions=True)
        opened = [one.result() for one in opening if not one.cancelled()]
        await asyncio.gather(*(one.close() for one in opened))
        for _ in range(100):
            if len(list(base.glob("session-*"))) == 1:
                break
            await asyncio.sleep(0.1)
        assert len(list(base.glob("session-*"))) == 1
        assert node_of(session).num_sessions == 1
        await executor.close()

    asyncio.run(steps())


def test_a_layer_that_a_node_lacks_is_an_error_of_ours(nodes: Nodes) -> None:
    async def steps() -> None:
        executor = RayExecutor(lambda: LocalExecutor(modules=["not_there"]))
        with pytest.raises(SandboxError, match="No module named 'not_there'") as caught:
            await executor.open()
        assert type(caught.value) is SandboxError
        await executor.close()

    asyncio.run(steps())


def test_a_node_whose_executor_cannot_be_made_is_an_error_of_ours(nodes: Nodes) -> None:
    async def steps() -> None:
        executor = RayExecutor(lambda: LocalExecutor(max_memory_bytes=1))
        with pytest.raises(SandboxError, match="Ray node .* has no sandbox: .*max_memory_bytes must be at least"):
            await executor.open()
        await executor.close()

    asyncio.run(steps())


def test_an_actor_that_dies_is_replaced(nodes: Nodes) -> None:
    import ray

    async def steps() -> None:
        executor = RayExecutor(local)
        session = await executor.open()
        ray.kill(executor._nodes[node_of(session).id]._actor)
        with pytest.raises(SessionError, match="The session was lost with its node"):
            await session.run("1", 60.0)
        result = await (await executor.open()).run("1", 60.0)
        assert result.status == ExecStatus.OK
        await executor.close()

    asyncio.run(steps())


HOST = """
import asyncio, ray
from trl_rollouts.sandbox.local import LocalExecutor
from trl_rollouts.sandbox.ray import RayExecutor

async def main():
    executor = RayExecutor(lambda: LocalExecutor(modules=()))
    session = await executor.open()
    {steps}

asyncio.run(main())
"""


def host(*steps: str, **env: str) -> "subprocess.Popen[str]":
    """A process of its own that opens a session and does this."""
    command = [sys.executable, "-c", HOST.format(steps="\n    ".join(steps))]
    return subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_host_that_is_killed_leaves_no_process_and_no_file(nodes: Nodes) -> None:
    process = host(
        "print((await session.run('import os; print(os.getcwd())', 60.0)).stdout.strip(), flush=True)",
        "await session.run('while True: pass', 1000.0)",
        RAY_ADDRESS=nodes.address,
    )
    assert process.stdout is not None
    base = Path(process.stdout.readline().strip()).parent
    assert processes_in(base)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    deadline = time.monotonic() + 30.0
    while (base.parent.exists() or processes_in(base)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not base.parent.exists()
    assert not processes_in(base)


def test_ray_that_was_shut_down_is_not_started_again(nodes: Nodes) -> None:
    process = host(
        "ray.shutdown()",
        "try: await session.run('1', 60.0)",
        "except Exception as error: print(type(error).__name__)",
        "await session.close()",
        "await executor.close()",
        "print(session.is_alive, ray.is_initialized())",
        RAY_ADDRESS=nodes.address,
    )
    assert process.communicate(timeout=60)[0].split() == ["SessionError", "False", "False"]


def processes_in(base: Path) -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(folder / "cwd").startswith(str(base)):
                found.append(folder.name)
        except OSError:
            continue
    return found


def test_what_is_no_factory_is_refused() -> None:
    with pytest.raises(SetupError, match="executor_factory must be a function that makes an executor"):
        RayExecutor(local())  # type: ignore[arg-type]


def test_a_node_that_joins_is_used_and_one_that_dies_takes_its_own_sessions_only(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl_rollouts.sandbox.ray.REFRESH_S", 0.0)

    async def steps() -> None:
        executor = RayExecutor(local)
        first = [await executor.open() for _ in range(3)]
        joined = nodes.add()  # Ray asks for the main thread
        while len(executor._nodes) < 2:
            first.append(await executor.open())
        theirs = [await executor.open() for _ in range(4)]
        doomed = [one for one in first + theirs if node_of(one).id == joined.node_id]
        others = [one for one in first + theirs if one not in doomed]
        assert len(others) >= 2 * len(doomed) - 2
        await doomed[0].run("x = 1", 60.0)
        running = asyncio.create_task(doomed[0].run(WAIT, 1000.0))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(nodes.cluster.remove_node, joined, allow_graceful=False)
        with pytest.raises(SessionError, match=f"The session was lost with its node, Ray node {joined.node_id[:8]}"):
            await running
        for session in doomed:
            with pytest.raises(SessionError, match="The session was lost"):
                await session.run("x", 60.0)
            assert not session.is_alive
            await session.close()
        results = [await session.run("40 + 2", 60.0) for session in others]
        assert [one.value for one in results] == ["42"] * len(others)
        again = [await executor.open() for _ in range(4)]
        assert [(await one.run("1", 60.0)).value for one in again] == ["1"] * 4
        await executor.close()

    asyncio.run(steps())
