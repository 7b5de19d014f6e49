"""The host's end of a fork server: its process, its folder, and the sessions that it opens.

Started by exec and with an empty environment, in namespaces where that is asked for; `zygote` is what runs there.
"""

import asyncio
import itertools
import json
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SandboxError, SessionError
from . import HostCall
from .folders import CANARY, make_owned, remove
from .session import LocalSession

START_TIMEOUT_S = 120.0
_MAX_SESSIONS = 2_000
_FIRST_UIDS = 0x7000_0000, 60_000
"""Of a range that is each process's own, above all that systemd assigns; and of one for user namespaces, which have no
uid above 65535 and where the ranges of processes may overlap."""
_WANTED_DESCRIPTORS = 65_536
_uids_in_use = set[int | None]()
"""By the sessions of all executors of this process."""
_choosing_uid = threading.Lock()

Wrapper = Callable[[list[str], str], list[str]]
"""Takes the fork server's command and its folder, and returns the command to start in its place."""

_BOOT = "import sys; sys.path.insert(0, {root!r}); from trl_rollouts.sandbox.zygote import main; main()"


class ForkServer:
    """A running fork server. Ends with its owner, with the interpreter, and with this process."""

    def __init__(self, modules: list[str], max_memory_bytes: int, folder: str | None, wrapper: Wrapper | None) -> None:
        if sys.platform != "linux":
            raise SandboxError(
                f"LocalExecutor needs Linux, whose kernel confines the code; this is {sys.platform}. Run the "
                "training, or a RayExecutor's nodes, in a Linux container or virtual machine."
            )
        _raise_descriptor_limit()
        self._base, self._lock_fd = make_owned(folder or tempfile.gettempdir(), prefix="trl_rollouts-")
        self.canary = os.path.join(self._base, CANARY)
        self._log = os.path.join(self._base, "log")
        self._numbers = itertools.count()
        try:
            self._control, self._process = self._start(modules, max_memory_bytes, wrapper)
        except BaseException:
            os.close(self._lock_fd)
            remove(self._base)
            raise
        self.close = weakref.finalize(self, _end, os.getpid(), self._control, self._process, self._base, self._lock_fd)
        report = self._report()
        self.missing: dict[str, str] = report["missing"]
        self.landlock_abi: int = report["landlock_abi"]
        self.has_namespaces = report["pid_namespace"] != os.readlink("/proc/self/ns/pid")
        self._first_uid: int | None = report["first_uid"]
        self.user = (
            "a user of its own"
            if self._first_uid is not None
            else "the same user"
            if report["threads"]
            else "root without capabilities and threads (another user could not read Python's files)"
        )
        self._control.setblocking(False)

    def _start(
        self, modules: list[str], max_memory_bytes: int, wrapper: Wrapper | None
    ) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, _own_pidfd() as host_pidfd, open(self._log, "wb") as log:
            config = {
                "control_fd": theirs.fileno(),
                "host_pidfd": host_pidfd,
                "modules": modules,
                "site_packages": _site_packages(),
                "max_memory_bytes": max_memory_bytes,
                "first_uids": [
                    _FIRST_UIDS[0] + os.getpid() % 0x1_0000 * 0x1000,
                    _FIRST_UIDS[1] + os.getpid() * 61 % _MAX_SESSIONS,
                ],
                "base": self._base,
            }
            root = str(Path(__file__).parents[2])
            command = [sys.executable, "-I", "-c", _BOOT.format(root=root), json.dumps(config)]
            process = subprocess.Popen(
                command if wrapper is None else wrapper(command, self._base),
                pass_fds=[theirs.fileno(), host_pidfd],
                env={"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
                cwd=self._base,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return control, process

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
        with suppress(OSError):  # closed meanwhile
            if words := Path(self._log).read_text(errors="replace").strip()[-2000:]:
                return words
        return f"no answer in {START_TIMEOUT_S:g} s"

    async def open(self, functions: Sequence[str], call: HostCall | None) -> LocalSession:
        folder = os.path.join(self._base, f"session-{next(self._numbers)}")
        uid = self._free_uid(self._first_uid) if self._first_uid is not None else None
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

    def _free_uid(self, first: int) -> int:
        with _choosing_uid:
            for uid in range(first, first + _MAX_SESSIONS):
                if uid not in _uids_in_use:
                    _uids_in_use.add(uid)
                    return uid
        raise SessionError(f"More than {_MAX_SESSIONS} sessions are open at a time.")


@contextmanager
def _own_pidfd() -> Iterator[int]:
    """By which others see this process end."""
    pidfd = os.pidfd_open(os.getpid())
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def _end(pid: int, control: socket.socket, process: "subprocess.Popen[bytes]", base: str, lock_fd: int) -> None:
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
    os.close(lock_fd)


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


def bubblewrapped(command: list[str], base: str) -> list[str]:
    """The command within namespaces of its own: no process, no network, no file of the host's but what Python needs.

    As root without a user namespace, so that sessions can still have users of their own.
    """
    if (bwrap := shutil.which("bwrap")) is None:
        raise SandboxError("bubblewrap=True needs bubblewrap (Debian: apt-get install bubblewrap).")
    if os.geteuid() == 0:
        options = ["--unshare-ipc", "--unshare-net", "--unshare-pid", "--unshare-uts", "--cap-drop", "ALL"]
        for capability in (
            "CAP_SETUID",
            "CAP_SETGID",
            "CAP_SETPCAP",
            "CAP_KILL",
            "CAP_FOWNER",
            "CAP_CHOWN",
            "CAP_DAC_OVERRIDE",
        ):
            options += ["--cap-add", capability]
    else:
        options = ["--unshare-all"]
    # No --die-with-parent: it would die with the thread that started it. The fork server ends when its host does.
    options += ["--new-session", "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/usr", "/usr"]
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
