"""The fork server: a process with the libraries in memory that becomes a session by forking, in milliseconds.

Started by the host (`local`) with an empty environment, never forked from it: the trainer has threads, secrets and a
GPU. It runs no model-written code itself. Its control socket takes one message a session, with the session's own
socket as a descriptor; the process goes back on that, as a pidfd. It ends when the control socket closes, and its
sessions end with it.

Single-threaded: what forks must be.
"""

import dataclasses
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from . import landlock, seccomp
from .confinement import MAX_THREADS, Layers, confine, limit, num_tasks_of_user, prefer_to_be_killed
from .folders import remove
from .runner import Runner, prepare
from .wire import encode

_READABLE = ("/usr/lib", "/lib", "/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_CAP_KILL = 5
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Config:
    """What the host asks of its fork server, as JSON on the command line."""

    control_fd: int
    host_pidfd: int
    """The control socket alone does not tell its end: a process that the host forked has a copy."""
    modules: list[str]
    site_packages: list[str]
    max_memory_bytes: int
    first_uids: list[int]
    """Of the users to become where this one is root; the first range of which one can be."""
    base: str
    """Holds the sessions' folders."""


def main() -> NoReturn:
    """Serve until the control socket closes."""
    config = Config(**json.loads(sys.argv[1]))
    control = socket.socket(fileno=config.control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prefer_to_be_killed()
    os.environ.clear()
    os.environ.update(LANG="C.UTF-8", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    try:
        folders = library_folders(config.site_packages)
        # Isolated mode leaves out the user's own (`pip install --user`), and what PYTHONPATH says.
        sys.path += [path for path in config.site_packages if path not in sys.path]
        sys.path[:] = [path for path in sys.path if any(_is_inside(path, folder) for folder in folders)]
        for name in config.modules:
            importlib.import_module(name)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random")  # else each session's `prepare` would
        layers, report = _layers(config, [*folders, *_READABLE, *_DEVICES])
    except Exception as error:
        control.send(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        raise
    with suppress(OSError):  # the host has gone meanwhile: `_serve` finds the socket closed
        control.send(json.dumps(report).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    gc.collect()
    gc.freeze()  # a collection in a session would copy every page that it looks at
    _serve(control, layers, config)


def library_folders(site_packages: Sequence[str]) -> list[str]:
    """The standard library and installed packages. Never a folder above them, nor that of a script or a checkout."""
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)]
    folders += [os.path.join(sys.prefix, "pyvenv.cfg"), *site_packages]
    return [folder for folder in dict.fromkeys(map(os.path.realpath, folders)) if folder != "/"]


def _is_inside(path: str, folder: str) -> bool:
    return os.path.realpath(path) == folder or os.path.realpath(path).startswith(folder + os.sep)


def _layers(config: Config, readable: list[str]) -> tuple[Layers, dict[str, Any]]:
    """What sessions are confined with here, and what there is to say about it."""
    missing: dict[str, str] = {}
    is_root = os.geteuid() == 0
    there = [path for path in readable if os.path.exists(path)]
    uids = [uid for uid in config.first_uids if _in_child(partial(_can_be, uid, there))] if _may_kill() else []
    first_uid = uids[0] if is_root and uids else None
    shares_root = is_root and first_uid is None
    ruleset = program = None
    abi = landlock.abi_version()
    if abi >= 1:
        ruleset = landlock.Ruleset(readable)
    else:
        missing["landlock"] = "the kernel has no Landlock (Linux 5.13 and later), or this container denies it"
    try:
        program = seccomp.compiled(allow_threads=not shares_root)
    except Exception as error:
        missing["seccomp"] = f"no system call filter could be compiled ({error}); install libseccomp2"
    layers = Layers(
        ruleset=ruleset,
        program=program,
        has_limits=True,
        max_memory_bytes=config.max_memory_bytes,
        max_tasks=MAX_THREADS if first_uid is not None else int(_in_child(num_tasks_of_user) or 0) + 8 * MAX_THREADS,
    )
    missing |= _refused(layers, config.base)
    layers = dataclasses.replace(
        layers,
        ruleset=None if "landlock" in missing else ruleset,
        program=None if "seccomp" in missing else program,
        has_limits="limits" not in missing,
    )
    return layers, {
        "landlock_abi": abi,
        "first_uid": first_uid,
        "threads": not shares_root,
        "missing": missing,
        "pid_namespace": os.readlink("/proc/self/ns/pid"),
    }


def _refused(layers: Layers, folder: str) -> dict[str, str]:
    """The layers that the kernel, or a container's own filter, does not let a process install, with the reason."""
    installs: dict[str, Callable[[], None]] = {"limits": lambda: limit(layers)}
    if layers.ruleset is not None:
        installs["landlock"] = partial(layers.ruleset.restrict_self, folder)
    if layers.program is not None:
        installs["seccomp"] = partial(seccomp.load, layers.program)

    def attempt(install: Callable[[], None]) -> str:
        try:
            seccomp.no_new_privileges()
            install()
        except (OSError, ValueError) as error:
            return str(error)
        return "installed"

    answers = {name: _in_child(partial(attempt, install)) for name, install in installs.items()}
    return {
        name: f"it cannot be installed here ({answer or 'the process that tried to died'})"
        for name, answer in answers.items()
        if answer != "installed"
    }


def _may_kill() -> bool:
    """Whether the end of this process would end sessions of other users: the signal needs CAP_KILL."""
    with open("/proc/self/status") as file:
        effective = next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))
    return bool(effective >> _CAP_KILL & 1)


def _can_be(uid: int, readable: list[str]) -> str:
    """Whether that user could read the libraries, empty if not: Python may be installed under /root."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        return ""
    can_read = all(os.access(path, os.R_OK | (os.X_OK if os.path.isdir(path) else 0)) for path in readable)
    return "yes" if can_read else ""


def _in_child(function: Callable[[], object]) -> str:
    """What the function returns, found in a process of its own since it cannot be undone. Empty if that died."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, str(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer.decode(errors="replace")


def _serve(control: socket.socket, layers: Layers, config: Config) -> NoReturn:
    while True:
        ready, _, _ = select.select([control.fileno(), config.host_pidfd], [], [])
        is_asked = control.fileno() in ready
        message, fds = socket.recv_fds(control, 1 << 16, 1)[:2] if is_asked else (b"", [])
        if not fds:
            if not message:  # the host is gone without a word, and nobody else removes its folders
                _remove_after_end(config.base)
            os._exit(0)
        channel = socket.socket(fileno=fds[0])
        try:
            _open(channel, json.loads(message), layers)
        except Exception as error:  # no process, no descriptor
            _tell(channel, {"failed": f"{type(error).__name__}: {error}"})
        channel.close()


def _remove_after_end(base: str) -> None:
    parent = os.pidfd_open(os.getpid())
    if os.fork() == 0:
        select.select([parent], [], [], 10.0)
        time.sleep(0.5)  # the sessions are killed as this process's parent ends
        remove(base)
        os._exit(0)


def _open(channel: socket.socket, request: dict[str, Any], layers: Layers) -> None:
    parent = os.getpid()
    if (pid := os.fork()) == 0:
        try:
            _become_session(channel, request, layers, parent)
        finally:
            os._exit(1)
    pidfd = os.pidfd_open(pid)
    try:
        socket.send_fds(channel, [encode({"pidfd": True})], [pidfd])
    finally:
        os.close(pidfd)


def _become_session(channel: socket.socket, request: dict[str, Any], layers: Layers, parent: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        prepare(request["folder"])
        confine(layers, folder=request["folder"], uid=request["uid"], parent=parent)
        os.dup2(channel.detach(), 3)
        channel = socket.socket(fileno=3)
        os.closerange(4, 1 << 16)  # the control socket, the ruleset's folders
    except BaseException as error:
        _tell(channel, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(1)
    Runner(channel, request["functions"]).serve()


def _tell(channel: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the host has given up on this session
        channel.sendall(encode(message))
