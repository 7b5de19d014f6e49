"""Sessions on every node of a Ray cluster: each node has one actor, which owns an executor and confines as it does.

Sessions are processes of the node and hold no process of Ray's; opening one takes a message to its node's actor and
back. Functions of the host's run where the executor is used, not on the node. The actors end with the process that
uses the executor, or by `close`.

The nodes need this package, in the same version, and what their executor needs. Ray is imported when a session is
first opened.
"""

import asyncio
import importlib.util
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SandboxError, SessionError, SetupError, boundary
from . import Executor, HostCall, Session
from .exchange import Desk, DistantSession
from .local import LocalExecutor

logger = logging.getLogger(__name__)

REFRESH_S = 10.0
"""Between two looks at which nodes there are."""
HOLD_OFF_S = 30.0
"""For which a node that was lost gets no new actor, unless there is no other: a cluster notices a dead one late."""
OPEN_TIMEOUT_S = 300.0
"""With the start of the actor and of its executor."""
CLOSE_TIMEOUT_S = CONNECT_TIMEOUT_S = 10.0
_NUM_ATTEMPTS = 3
_MAX_CONCURRENCY = 10_000

_REMOVE_AFTER_END = """
import os, select, sys, time
root, pid, folder = sys.argv[1:]
process = os.pidfd_open(int(pid))
sys.path.append(root)
from trl_rollouts.sandbox.folders import remove
select.select([process], [], [])
time.sleep(1.0)  # its sessions are being killed
remove(folder)
"""


class RayExecutor:
    """Runs model-written Python on the nodes of a Ray cluster. May be shared by rollouts.

    Args:
        executor_factory: makes the executor of a node, over there: `LocalExecutor`, or
            `lambda: LocalExecutor(modules=["pandas"])`. It is pickled.

    Uses the cluster that this process is connected to, else the one that `RAY_ADDRESS` names or that runs on this
    machine; it never starts one. A node without processors (`ray start --num-cpus=0`) gets no sessions; on the others
    a new session goes where the fewest of this executor's are open for each processor. No processor is reserved.
    Nodes that join are used; the sessions of a node that is lost raise SessionError, and later ones open elsewhere.
    """

    def __init__(self, executor_factory: Callable[[], Executor] = LocalExecutor) -> None:
        if not callable(executor_factory):
            raise SetupError(f"executor_factory must be a function that makes an executor, not {executor_factory!r}.")
        if importlib.util.find_spec("ray") is None:
            raise SetupError("RayExecutor needs Ray: pip install 'trl-rollouts[ray]'.")
        self._factory = executor_factory
        self._nodes: dict[str, _Node] = {}
        self._refreshed_at = -REFRESH_S
        self._refreshing, self._lock = threading.Lock(), threading.Lock()

    @property
    def isolation(self) -> dict[str, Any]:
        """By node id, what holds the sessions there (`LocalExecutor.isolation`), once one has been opened."""
        return {node.id: node.isolation for node in self._nodes.values() if node.isolation is not None}

    async def open(self, functions: Sequence[str] = (), call: HostCall | None = None) -> Session:
        """A new session, on one of the nodes. See `Executor`.

        Raises:
            SandboxError: there is no cluster, no node, or one that cannot confine sessions as it must.
            SessionError: nodes were lost while it was being opened.
        """
        for _ in range(_NUM_ATTEMPTS):
            node = await self._reserved()
            session = DistantSession(node.carry, call, on_end=partial(self._count, node, -1))
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await session.open(functions)
            except (SessionError, TimeoutError) as error:
                last = error
                if isinstance(error, TimeoutError):
                    node.lose(f"it did not open a session within {OPEN_TIMEOUT_S:g} s")
                elif not node.is_lost:
                    raise
            else:
                return session
        raise SessionError(f"No session could be opened in {_NUM_ATTEMPTS} attempts: {last}")

    async def close(self) -> None:
        """End all sessions, their nodes' executors and the actors."""
        nodes, self._nodes = self._nodes, {}
        await asyncio.gather(*(node.close() for node in nodes.values()))

    async def _reserved(self) -> "_Node":
        """The node for a further session, which is counted."""
        if self._must_look():
            await asyncio.to_thread(self._refresh)
        if not (nodes := self._usable()):
            raise SandboxError(
                "The Ray cluster has no node with processors to run model-written code on. Add one with `ray start "
                "--address=...`; a node started with --num-cpus=0 does not count."
            )
        with self._lock:
            node = min(nodes, key=lambda one: one.load)
            node.num_sessions += 1
        return node

    def _usable(self) -> list["_Node"]:
        return [node for node in self._nodes.values() if not node.is_lost]

    def _must_look(self) -> bool:
        return not self._usable() or time.monotonic() >= self._refreshed_at + REFRESH_S

    def _refresh(self) -> None:
        """Look which nodes there are, and give those an actor that have none."""
        with self._refreshing:
            if not self._must_look():
                return  # another thread has
            ray = _connected()
            alive = {one["NodeID"]: one for one in ray.nodes() if one["Alive"] and one["Resources"].get("CPU")}
            long_ago = time.monotonic() - HOLD_OFF_S
            kept = {id_: node for id_, node in self._nodes.items() if not node.is_lost or node.lost_at > long_ago}
            if all(id_ in kept and kept[id_].is_lost for id_ in alive):
                kept = {}  # there is no other
            self._nodes = {id_: kept.get(id_) or _Node(ray, one, self._factory) for id_, one in alive.items()}
            self._refreshed_at = time.monotonic()

    def _count(self, node: "_Node", change: int) -> None:
        with self._lock:
            node.num_sessions += change


class _Node:
    """A node's actor, from the host's side."""

    def __init__(self, ray: Any, found: dict[str, Any], factory: Callable[[], Executor]) -> None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self.id: str = found["NodeID"]
        self.isolation: Any = None
        self.is_lost = False
        self.lost_at = 0.0
        self.num_sessions = 0
        self._num_cpus = float(found["Resources"]["CPU"])
        self._address = found["NodeManagerAddress"]
        self._ray = ray
        options = {
            "num_cpus": 0,  # a trainer that has reserved them all must not keep it waiting
            "max_concurrency": _MAX_CONCURRENCY,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.id, soft=False),
        }
        with boundary(SetupError, "executor_factory cannot be sent to the nodes"):
            self._actor = ray.remote(_Actor).options(**options).remote(factory)

    def __str__(self) -> str:
        return f"Ray node {self.id[:8]} ({self._address})"

    @property
    def load(self) -> float:
        return self.num_sessions / self._num_cpus

    async def carry(self, id_: str, what: str, request: str) -> str:
        """A request to the actor; see `exchange.Carry`."""
        answer = str(await self._remote("ask", id_, what, request))
        if what == "open" and self.isolation is None:
            self.isolation = await self._remote("isolation")
            logger.info("Model-written code on %s is confined by %s.", self, self.isolation)
        return answer

    def lose(self, why: str) -> None:
        """Use this actor no more. The node gets a new one, if it is still there."""
        if not self.is_lost:
            self.is_lost, self.lost_at = True, time.monotonic()
            logger.warning("No more sessions are opened by the actor of %s: %s", self, why)

    async def close(self) -> None:
        """End the actor, once its executor has ended."""
        if not self.is_lost:
            with suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._remote("close")
            self.is_lost = True
        if self._ray.is_initialized():
            self._ray.kill(self._actor)

    async def _remote(self, method: str, *arguments: str) -> Any:
        if self.is_lost or not self._ray.is_initialized():  # Ray would start a cluster of its own
            self.is_lost = True
            raise SessionError(f"The session was lost: the actor of {self} has ended.")
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except Exception as error:
            self.lose(_last_words(error))
            if getattr(error, "actor_init_failed", False):
                raise SandboxError(f"{self} has no sandbox: {_last_words(error)}") from error
            raise SessionError(f"The session was lost with its node, {self}: {_last_words(error)}") from error


class _Actor:
    """Runs on a node. All its methods are coroutines, so that Ray serves them at the same time, in one event loop."""

    def __init__(self, factory: Callable[[], Executor]) -> None:
        tempfile.tempdir = _temporary_folder()
        self._executor = factory()
        self._desk = Desk(self._executor)

    async def ask(self, id_: str, what: str, request: str) -> str:
        return await self._desk.ask(id_, what, request)

    async def isolation(self) -> Any:
        return getattr(self._executor, "isolation", None)

    async def close(self) -> None:
        await self._desk.close()


def _temporary_folder() -> str:
    """A folder for temporary files that is removed when this process ends, however it does.

    With an actor, Ray kills its child processes and its process group, so a fork server has no time to clean up.
    """
    folder = tempfile.mkdtemp(prefix="trl_rollouts-")
    os.chmod(folder, 0o711)  # sessions of other users pass through
    root = str(Path(__file__).parents[2])
    script = [sys.executable, "-I", "-c", _REMOVE_AFTER_END, root, str(os.getpid()), folder]
    null = subprocess.DEVNULL
    command = ["/bin/sh", "-c", '"$@" &', "sh", *script]
    subprocess.run(command, stdin=null, stdout=null, stderr=null, start_new_session=True, check=True)
    return folder


def _connected() -> Any:
    """Ray, connected to a cluster.

    Raises:
        SandboxError: there is none.
    """
    import ray

    if not ray.is_initialized():
        try:
            _reach(os.environ.get("RAY_ADDRESS", ""))
            ray.init(address="auto")
        except OSError as error:
            raise SandboxError(
                f"There is no Ray cluster to run model-written code on: {error} Start one with `ray start --head`, "
                "name it in RAY_ADDRESS, or call `ray.init()` before the training."
            ) from error
        logger.info("Connected to the Ray cluster at %s.", ray.get_runtime_context().gcs_address)
    return ray


def _reach(address: str) -> None:
    """Fail where nobody listens at `host:port`, which Ray would try for more than ten minutes.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "//" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _last_words(error: Exception) -> str:
    """What happened, without Ray's traceback of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
