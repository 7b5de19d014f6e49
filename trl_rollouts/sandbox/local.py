"""Sessions as processes of this machine, confined by its kernel: no root, no container and no daemon needed.

Linux only. A fork server (`zygote`) holds the libraries; a session is a fork of it that gives up its rights
(`confinement`) before it runs anything. Which layers hold is found out in a session, by trying what they forbid.

The idea of forking confined workers from a warmed-up process is Android's zygote; the layers' lists were made and
measured for this package, see docs/security.md.
"""

import asyncio
import itertools
import json
import logging
import os
import resource
import shutil
import site
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SandboxError, SessionError, SetupError
from . import HostCall, Session
from .confinement import LAYERS
from .folders import remove
from .session import LocalSession

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
_FIRST_UID, _NUM_UIDS = 60_000, 4_000
_WANTED_DESCRIPTORS = 65_536
_uids_in_use = set[int | None]()
"""By the sessions of all executors of this process."""
_choosing_uid = threading.Lock()

_BOOT = "import sys; sys.path.append({root!r}); from trl_rollouts.sandbox.zygote import main; main()"

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
        self._wrapper = _bubblewrap if bubblewrap else None
        self._allow_missing = frozenset(allow_missing)
        self._server: _ForkServer | None = None
        self._lock = threading.Lock()
        self.isolation: Isolation | None = None

    async def open(self, functions: Sequence[str] = (), call: HostCall | None = None) -> Session:
        """A new session, in a few milliseconds; the first one waits for the modules' import. See `Executor`."""
        server = self._server
        if server is None or not server.is_alive or self.isolation is None:
            server = await asyncio.to_thread(self._started)
            if self.isolation is None:
                await self._find_out(server)
        return await server.open(functions, call)

    async def close(self) -> None:
        """End all sessions and the fork server."""
        server, self._server, self.isolation = self._server, None, None
        if server is not None:
            await asyncio.to_thread(server.close)

    def _started(self) -> "_ForkServer":
        with self._lock:
            if self._server is None or not self._server.is_alive:
                if self._server is not None:
                    logger.warning("The fork server of the sandbox had ended; it is started again.")
                    self._server.close()
                self.isolation = None
                self._server = _ForkServer(self._modules, self._max_memory_bytes, self._folder, self._wrapper)
            return self._server

    async def _find_out(self, server: "_ForkServer") -> None:
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
                "docs/security.md says which kernels and containers have them. Run the code elsewhere (RayExecutor, a "
                f"virtual machine), or accept it with LocalExecutor(allow_missing={refused})."
            )
        level = logging.WARNING if missing else logging.INFO
        logger.log(level, "Model-written code is confined by %s.", isolation)
        self.isolation = isolation


class _ForkServer:
    """A running fork server. Ends with its owner, with the interpreter, and with this process."""

    def __init__(self, modules: list[str], max_memory_bytes: int, folder: str | None, wrapper: Any) -> None:
        if sys.platform != "linux":
            raise SandboxError(
                f"LocalExecutor needs Linux, whose kernel confines the code; this is {sys.platform}. Run the "
                "training, or a RayExecutor's nodes, in a Linux container or virtual machine."
            )
        _raise_descriptor_limit()
        self._base = tempfile.mkdtemp(prefix="trl_rollouts-", dir=folder)
        os.chmod(self._base, 0o711)  # sessions of other users pass through
        self.canary = os.path.join(self._base, "canary")
        Path(self.canary).write_text("what a session must not read")
        self._log = os.path.join(self._base, "log")
        self._numbers = itertools.count()
        self._first_uid = _FIRST_UID + os.getpid() * 61 % (_NUM_UIDS // 2)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "control_fd": theirs.fileno(),
            "modules": modules,
            "site_packages": _site_packages(),
            "max_memory_bytes": max_memory_bytes,
            "first_uid": self._first_uid,
            "base": self._base,
        }
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-I", "-c", _BOOT.format(root=root), json.dumps(config)]
        if wrapper is not None:
            command = wrapper(command, self._base)
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
                cwd=self._base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        self.close = weakref.finalize(self, _end, os.getpid(), self._control, self._process, self._base)
        report = self._report()
        self.missing: dict[str, str] = report["missing"]
        self.landlock_abi: int = report["landlock_abi"]
        self.has_namespaces = report["pid_namespace"] != os.readlink("/proc/self/ns/pid")
        self._own_uid: bool = report["own_uid"]
        self.user = (
            "a user of its own"
            if self._own_uid
            else "the same user"
            if report["threads"]
            else "root without capabilities and threads (another user could not read Python's files)"
        )
        self._control.setblocking(False)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _report(self) -> dict[str, Any]:
        self._control.settimeout(START_TIMEOUT_S)
        try:
            message = self._control.recv(1 << 16)
        except TimeoutError:
            message = b""
        report: dict[str, Any] = json.loads(message) if message else {"failed": self._last_words()}
        if "failed" in report:
            self.close()
            raise SandboxError(f"The sandbox's fork server did not start: {report['failed']}")
        return report

    def _last_words(self) -> str:
        return Path(self._log).read_text(errors="replace").strip()[-2000:] or f"no answer in {START_TIMEOUT_S:g} s"

    async def open(self, functions: Sequence[str], call: HostCall | None) -> LocalSession:
        folder = os.path.join(self._base, f"session-{next(self._numbers)}")
        uid = self._free_uid() if self._own_uid else None
        try:
            os.mkdir(folder, 0o700)
            if uid is not None:
                os.chown(folder, uid, uid)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:  # the disk is full, the descriptors are used up
            _uids_in_use.discard(uid)
            raise SessionError(f"A sandboxed session could not be prepared: {error}") from error
        # By the bound method a session keeps its fork server alive.
        session = LocalSession(ours, folder, functions, call, on_close=partial(self._give_back, uid))
        try:
            request = json.dumps({"folder": folder, "uid": uid, "functions": list(functions)}).encode()
            with theirs:
                await self._ask(request, theirs.fileno())
            await session.wait_ready()
        except BaseException:
            with suppress(SessionError):
                await session.close()
            raise
        return session

    async def _ask(self, request: bytes, fd: int) -> None:
        while True:
            try:
                socket.send_fds(self._control, [request], [fd])
                return
            except BlockingIOError:  # many at once
                await asyncio.sleep(0.001)
            except OSError as error:
                raise SessionError(f"The sandbox's fork server has ended ({error}): {self._last_words()}") from error

    def _give_back(self, uid: int | None) -> None:
        _uids_in_use.discard(uid)

    def _free_uid(self) -> int:
        with _choosing_uid:
            for uid in range(self._first_uid, self._first_uid + _NUM_UIDS // 2):
                if uid not in _uids_in_use:
                    _uids_in_use.add(uid)
                    return uid
        raise SessionError(f"More than {_NUM_UIDS // 2} sessions are open at a time.")


def _end(pid: int, control: socket.socket, process: "subprocess.Popen[bytes]", base: str) -> None:
    if os.getpid() != pid:  # a forked child has the objects, and no right to the fork server
        return
    with suppress(OSError):
        control.setblocking(True)
        control.send(b"close")
    control.close()
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(OSError):
        remove(base)


def _site_packages() -> list[str]:
    """Where installed packages are: what pip wrote, and no folder of a script or a checkout."""
    names = ("site-packages", "dist-packages")
    own = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [path for path in dict.fromkeys([*own, *sys.path]) if Path(path).name in names and os.path.isdir(path)]


def _raise_descriptor_limit() -> None:
    """Two descriptors a session: the usual soft limit of 1024 would be used up by the connections of 512."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _WANTED_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _bubblewrap(command: list[str], base: str) -> list[str]:
    """The command within namespaces of its own: no process, no network, no file of the host's but what Python needs.

    As root without a user namespace, so that sessions can still have users of their own.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise SandboxError("bubblewrap=True needs bubblewrap (Debian: apt-get install bubblewrap).")
    if os.geteuid() == 0:
        options = ["--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--cap-drop", "ALL"]
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_CHOWN", "CAP_DAC_OVERRIDE"):
            options += ["--cap-add", capability]
    else:
        options = ["--unshare-all"]
    options += ["--die-with-parent", "--new-session", "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"):
        options += [*_folders_above(path), "--ro-bind-try", path, path]
    roots = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable)), *_site_packages()]
    roots.append(str(Path(__file__).parents[1]))
    for path in dict.fromkeys(map(os.path.realpath, roots)):
        if not path.startswith("/usr/"):
            options += [*_folders_above(path), "--ro-bind", path, path]
    options += [*_folders_above(base), "--bind", base, base, "--chdir", base]
    return [bwrap, *options, "--", *command]


def _folders_above(path: str) -> list[str]:
    """Options to make them. Those that bubblewrap makes by itself, other users cannot enter."""
    above = reversed(Path(path).parents[:-1])
    return [option for folder in above for option in ("--perms", "0755", "--dir", str(folder))]
