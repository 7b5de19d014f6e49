"""Sessions as processes of this machine, confined by its kernel: no root, no container and no daemon needed.

Linux only. A fork server (`zygote`) holds the libraries; a session is a fork of it that gives up its rights
(`confinement`) before it runs anything. Which layers hold is found out in a session, by trying what they forbid.

The idea of forking confined workers from a warmed-up process is Android's zygote; the layers' lists were made and
measured for this package, see docs/security.md.
"""

import asyncio
import json
import logging
import os
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import SandboxError, SetupError
from . import HostCall, Session
from .confinement import LAYERS
from .fork_server import ForkServer, bubblewrapped

logger = logging.getLogger(__name__)

_PROBE = """
import json, mmap, os, socket
def is_refused(action, *arguments):
    try:
        action(*arguments)
    except (OSError, MemoryError):
        return True
    return False
print(json.dumps({{
    "landlock": is_refused(open, {canary!r}),
    "seccomp": is_refused(socket.socket),
    "limits": is_refused(mmap.mmap, -1, {num_bytes}),
}}))
"""


@dataclass(frozen=True, slots=True)
class Isolation:
    """What holds the sessions of an executor, as found out on this machine."""

    layers: tuple[str, ...]
    """Of "limits", "landlock", "seccomp" and "namespaces", those that a session could not get around."""
    missing: dict[str, str]
    """The others of the first three, with the reason."""
    user: str
    landlock_abi: int

    def __str__(self) -> str:
        without = "".join(f"; without {name}: {why}" for name, why in self.missing.items())
        return f"{', '.join(self.layers) or 'nothing'}, as {self.user}{without}"


class LocalExecutor:
    """Runs model-written Python on this machine, stateful and confined. May be shared by rollouts.

    Args:
        modules: imported once, before the first session; a session then has them at no cost.
        max_memory_bytes: that a session may allocate.
        folder: for the sessions' own folders; the system's for temporary files by default.
        bubblewrap: whether to put namespaces around all sessions, by `bwrap`: no process and no network of the host's
            exists for them. Needs bubblewrap, and user namespaces or root.
        allow_missing: layers ("limits", "landlock", "seccomp") that this machine may lack. docs/security.md says what
            is then not stopped.

    `isolation` says what holds, once a session has been opened.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str] = ("numpy", "sympy"),
        max_memory_bytes: int = 1 << 30,
        folder: str | os.PathLike[str] | None = None,
        bubblewrap: bool = False,
        allow_missing: Collection[str] = (),
    ) -> None:
        if isinstance(modules, str) or not all(isinstance(name, str) for name in modules):
            raise SetupError(f"modules must be a list of names, not {modules!r}.")
        if isinstance(allow_missing, str) or not set(allow_missing) <= set(LAYERS):
            raise SetupError(f"allow_missing must be a list of layers among {list(LAYERS)}, not {allow_missing!r}.")
        if type(max_memory_bytes) is not int or max_memory_bytes < 64 << 20:
            raise SetupError(f"max_memory_bytes must be at least {64 << 20}, not {max_memory_bytes!r}.")
        if folder is not None and not Path(folder).is_dir():
            raise SetupError(f"folder={str(folder)!r} is no folder.")
        self._modules = list(modules)
        self._max_memory_bytes = max_memory_bytes
        self._folder = None if folder is None else os.path.abspath(folder)
        self._wrapper = bubblewrapped if bubblewrap else None
        self._allow_missing = frozenset(allow_missing)
        self._server: ForkServer | None = None
        self._lock = threading.Lock()
        self._num_starts = 0
        self._failure: SandboxError | None = None
        """Of the last start."""
        self.isolation: Isolation | None = None

    async def open(self, functions: Sequence[str] = (), call: HostCall | None = None) -> Session:
        """A new session, in a few milliseconds; the first one waits for the modules' import. See `Executor`."""
        server = self._server
        if server is None or not server.is_alive:
            server = await asyncio.to_thread(self._started, self._num_starts)
        return await server.open(functions, call)

    async def close(self) -> None:
        """End all sessions and the fork server."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._lock:  # one that is being started ends as well
            server, self._server, self.isolation = self._server, None, None
            if server is not None:
                server.close()

    def _started(self, num_starts: int) -> ForkServer:
        """The fork server, started and tried out by the first who needs it. Who waits meanwhile shares the outcome.

        Args:
            num_starts: how often one had been started when the caller found none.
        """
        with self._lock:
            if self._server is not None and self._server.is_alive:
                return self._server
            if self._failure is not None and self._num_starts > num_starts:
                raise type(self._failure)(str(self._failure)) from self._failure
            if self._server is not None:
                logger.warning("The fork server of the sandbox had ended; it is started again.")
                self._server.close()
            self._num_starts += 1
            self._server, self._failure = None, None
            try:
                self._server = self._start()
            except SandboxError as error:
                self._failure = error
                raise
            return self._server

    def _start(self) -> ForkServer:
        try:
            server = ForkServer(self._modules, self._max_memory_bytes, self._folder, self._wrapper)
        except OSError as error:
            raise SandboxError(f"The sandbox's fork server cannot be started: {error}") from error
        try:
            asyncio.run(self._find_out(server))
        except BaseException:
            server.close()
            raise
        return server

    async def _find_out(self, server: ForkServer) -> None:
        """What holds a session here; refuse where that is less than must be.

        Raises:
            SandboxError: a layer is missing that was not allowed to be.
        """
        session = await server.open((), None)
        try:
            canary, num_bytes = server.canary, self._max_memory_bytes + (512 << 20)
            result = await session.run(_PROBE.format(canary=canary, num_bytes=num_bytes), timeout_s=30.0)
        finally:
            await session.close()
        try:
            held = json.loads(result.stdout)
        except ValueError:
            raise SandboxError(f"The sandbox does not work here: {result.error or result.stdout!r}") from None
        missing = {name: server.missing.get(name, "installed, and did not hold") for name in LAYERS if not held[name]}
        layers = tuple(name for name in LAYERS if held[name]) + (("namespaces",) if server.has_namespaces else ())
        isolation = Isolation(layers, missing, server.user, server.landlock_abi)
        if refused := [name for name in missing if name not in self._allow_missing]:
            raise SandboxError(
                f"This machine lacks {' and '.join(refused)} to confine model-written code (it has: {isolation}). "
                "docs/security.md says which kernels and containers have them. Run the code on another machine "
                f"(HttpExecutor, RayExecutor), or accept it with LocalExecutor(allow_missing={refused})."
            )
        level = logging.WARNING if missing else logging.INFO
        logger.log(level, "Model-written code is confined by %s.", isolation)
        self.isolation = isolation
