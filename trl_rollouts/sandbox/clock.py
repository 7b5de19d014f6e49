"""What counts as a snippet's own time, and when it is time to look."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

WATCH_S = 0.05
"""Between two looks at what a running snippet has written."""


class Clock:
    """A snippet's own time: the wall's, less what it waited for a processor and for the host's functions."""

    def __init__(self, pidfd: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.interrupted_at_s: float | None = None
        """In the snippet's time."""
        self._pidfd = pidfd
        self._pid: int | None = None
        self._started_at = time.monotonic()
        self._look_at = self._started_at + min(WATCH_S, timeout_s)
        self._paused_s = 0.0
        self._waited_s = self._cpu_s = 0.0
        """As the kernel counted them at the first look."""

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at - self._paused_s

    def next_look_s(self) -> float:
        """Seconds until somebody must look at what the snippet does; 0 where that is due."""
        return max(0.0, self._look_at - time.monotonic())

    def looked(self) -> None:
        rest = self.timeout_s - self.elapsed_s()
        self._look_at = time.monotonic() + (min(WATCH_S, rest) if rest > 0.001 else WATCH_S / 5)

    def is_over(self) -> bool:
        """Whether the time limit has passed. With threads, the processor time of them all has a limit, too."""
        pid = self._find_process()
        elapsed_s = self.elapsed_s()
        if elapsed_s < self.timeout_s:
            return False
        waited_s, cpu_s = _scheduled(pid)
        return elapsed_s - (waited_s - self._waited_s) >= self.timeout_s or cpu_s - self._cpu_s >= 2 * self.timeout_s

    def num_threads(self) -> int:
        """Of the process, 0 where it is gone. RLIMIT_NPROC bounds them only for all sessions of a user together."""
        with suppress(OSError), open(f"/proc/{self._find_process()}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[17])
        return 0

    def _find_process(self) -> int:
        if self._pid is None:
            self._pid = _pid_of(self._pidfd)
            self._waited_s, self._cpu_s = _scheduled(self._pid)
        return self._pid

    @contextmanager
    def paused(self) -> Iterator[None]:
        started_at = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - started_at


def _pid_of(pidfd: int) -> int:
    """As this process's namespace numbers it."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    return int(fields["Pid"])


def _scheduled(pid: int) -> tuple[float, float]:
    """Seconds that the process's main thread has waited for a processor, and that all its threads have used one.

    Zeros where the kernel does not say, or the process is gone.
    """
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            waited_s = int(file.read().split()[1]) / 1e9
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except (OSError, IndexError):
        return 0.0, 0.0
    return waited_s, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
