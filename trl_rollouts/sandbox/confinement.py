"""What a session's process gives up before it runs anything: the layers, each installed by the process itself.

    limits     memory, file size, descriptors, tasks, core dumps; dies with the fork server; oom-killed first
    user       where the host is root: an own uid, or root without capabilities where that could not read the libraries
    landlock   the files it may read, and the one folder it may write to
    seccomp    the system calls it may make: no process, no socket, no signal

Neither of the last two is enough alone. What is installed is found out at the start (`zygote`), not assumed.
"""

import ctypes
import os
import resource
import signal
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from . import landlock, seccomp

LAYERS = ("limits", "landlock", "seccomp")

MAX_THREADS = 32
MAX_FILE_BYTES = 16 << 20
MAX_DESCRIPTORS = 64
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_CAP_VERSION_3 = 0x20080522
_NUM_CAPS = 64

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Layers:
    """What the sessions of a fork server are confined with, made once; None where a layer is missing."""

    ruleset: landlock.Ruleset | None
    program: bytes | None
    has_limits: bool
    max_memory_bytes: int
    max_tasks: int
    """RLIMIT_NPROC: of a uid of its own, or of all that the host's user runs."""


def confine(layers: Layers, *, folder: str, uid: int | None, parent: int) -> None:
    """Give up all rights but those to run Python in `folder`.

    Args:
        layers: what to install.
        folder: the session's own, the working directory from here on.
        uid: the user to become; None to stay the same one.
        parent: the fork server's process id, with which this process dies.

    Raises:
        OSError: a layer could not be installed. Nothing may be run then.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _drop_capabilities()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after setuid, which clears it
    if os.getppid() != parent:
        raise OSError("the fork server has ended")
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.chdir(folder)
    if layers.has_limits:
        limit(layers)
    if layers.ruleset is not None or layers.program is not None:
        seccomp.no_new_privileges()
    if layers.ruleset is not None:
        layers.ruleset.restrict_self(folder)
    if layers.program is not None:
        seccomp.load(layers.program)


def limit(layers: Layers) -> None:
    """Bound what this process may use, for good."""
    with open("/proc/self/statm") as file:
        pages = file.read().split()
    size, data = (int(pages[index]) * resource.getpagesize() for index in (0, 5))
    limits = {
        # malloc's arenas reserve address space that is never used: the budget is that of data.
        resource.RLIMIT_DATA: data + layers.max_memory_bytes,
        resource.RLIMIT_AS: size + layers.max_memory_bytes + (256 << 20),
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_NPROC: layers.max_tasks,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    for which, limit in limits.items():
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))


def _drop_capabilities() -> None:
    for capability in range(_NUM_CAPS):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # not root, or past the last one: the set below is emptied in any case
    header = struct.pack("<Ii", _CAP_VERSION_3, 0)
    if _libc.capset(header, bytes(24)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"capset: {os.strerror(code)}")


def prefer_to_be_killed() -> None:
    """Where memory runs out, let the kernel end this process, or one that it forks, and not the trainer."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def num_tasks_of_user() -> int:
    """Tasks that the kernel counts for this process's user, found by trying.

    /proc does not show those of the same uid in other containers, and the kernel counts them. Call it in a child.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    low, high = 0, hard if hard != resource.RLIM_INFINITY else 1 << 22
    while low < high:
        middle = (low + high) // 2
        resource.setrlimit(resource.RLIMIT_NPROC, (middle, hard))
        if _can_start_thread():
            high = middle
        else:
            low = middle + 1
    return low


def _can_start_thread() -> bool:
    thread = threading.Thread(target=int)
    try:
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    return True
