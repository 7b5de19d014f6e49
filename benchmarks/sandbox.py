"""What a sandboxed session costs, beside other ways to run a snippet of Python: milliseconds, in one run.

    make bench

open: until a session can take its first snippet. round_trip: of `x = 1`, to a session that has run some already. The
others are measured where they are installed (`pip install -e '.[bench]'`); none of them confines the code. Of many
sessions: what one that idles holds for itself with numpy loaded, and 512 that open, run and close together.
"""

import asyncio
import importlib.util
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from trl_rollouts import LocalExecutor

NUM_OPENED, NUM_RUN, NUM_IDLE, NUM_TOGETHER = 40, 300, 200, 512
SNIPPET = "x = 1"

Pair = tuple[float | None, float]  # seconds until it is open, where it can be, and of a round trip


async def timed(action: Callable[[], Awaitable[Any]], num: int) -> float:
    """Median seconds of the action."""
    seconds = []
    for _ in range(num):
        started = time.perf_counter()
        await action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


async def sandboxed(executor: LocalExecutor) -> Pair:
    sessions = []

    async def open_one() -> None:
        sessions.append(await executor.open())

    await open_one()
    opened = await timed(open_one, NUM_OPENED)
    round_trip = await timed(lambda: sessions[0].run(SNIPPET, 5.0), NUM_RUN)
    await asyncio.gather(*(session.close() for session in sessions))
    return opened, round_trip


async def python_c() -> Pair:
    async def run() -> None:
        subprocess.run([sys.executable, "-I", "-c", "import numpy; " + SNIPPET], check=True)

    return None, await timed(run, 5)


async def jupyter() -> Pair:
    from jupyter_client.manager import AsyncKernelManager

    async def start() -> tuple[Any, Any]:
        manager = AsyncKernelManager()
        await manager.start_kernel()
        client = manager.client()
        client.start_channels()
        await client.wait_for_ready(timeout=60)
        return manager, client

    started = time.perf_counter()
    manager, client = await start()
    opened = time.perf_counter() - started
    round_trip = await timed(lambda: client.execute_interactive(SNIPPET, store_history=False), 50)
    client.stop_channels()
    await manager.shutdown_kernel(now=True)
    return opened, round_trip


async def ray_actor() -> Pair:
    import ray

    class Interpreter:
        def __init__(self) -> None:
            self._namespace: dict[str, Any] = {}

        def run(self, code: str) -> None:
            exec(code, self._namespace)

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    actors = []

    async def start() -> None:
        actors.append(ray.remote(num_cpus=0)(Interpreter).remote())
        await actors[-1].run.remote(SNIPPET)

    await start()
    opened = await timed(start, 5)

    async def run() -> None:
        await actors[0].run.remote(SNIPPET)

    round_trip = await timed(run, NUM_RUN)
    ray.shutdown()
    return opened, round_trip


async def smolagents() -> Pair:
    from smolagents.local_python_executor import LocalPythonExecutor

    async def start() -> None:
        LocalPythonExecutor([]).send_tools({})

    executor = LocalPythonExecutor([])
    executor.send_tools({})

    async def run() -> None:
        executor(SNIPPET)

    return await timed(start, NUM_OPENED), await timed(run, NUM_RUN)


OTHERS = {"jupyter_client": jupyter, "ray": ray_actor, "smolagents": smolagents}


def private_mb(pid: int) -> float:
    """Memory that the process shares with no other."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kb) for kb in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) / 1024


async def idle(executor: LocalExecutor) -> float:
    """Mean private megabytes of a session that has run a snippet and waits."""
    sessions = await asyncio.gather(*(executor.open() for _ in range(NUM_IDLE)))
    await asyncio.gather(*(session.run("import numpy; " + SNIPPET, 30.0) for session in sessions))
    server = executor._server._process.pid  # type: ignore[union-attr]
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    mean = statistics.fmean(private_mb(int(pid)) for pid in children)
    await asyncio.gather(*(session.close() for session in sessions))
    return mean


async def together(executor: LocalExecutor) -> float:
    """Seconds in which many sessions open, run a snippet and close, all at once."""

    async def one() -> None:
        session = await executor.open()
        await session.run("sum(i * i for i in range(10_000))", 30.0)
        await session.close()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(NUM_TOGETHER)))
    return time.perf_counter() - started


async def main() -> dict[str, Any]:
    executor = LocalExecutor()
    rows = {"sandbox": await sandboxed(executor), "python -c": await python_c()}
    for library, measure in OTHERS.items():
        if importlib.util.find_spec(library) is not None:
            rows[library] = await measure()
    figures: dict[str, Any] = {
        name: {"open_ms": opened and round(1e3 * opened, 2), "round_trip_ms": round(1e3 * round_trip, 3)}
        for name, (opened, round_trip) in rows.items()
    }
    figures["idle_mb"] = round(await idle(executor), 2)
    figures["together_s"] = round(await together(executor), 2)
    await executor.close()
    return figures


if __name__ == "__main__":
    print(json.dumps({"benchmark": "sandbox", "idle": NUM_IDLE, "together": NUM_TOGETHER, **asyncio.run(main())}))
