"""A machine to attack: an executor, and around it all that an attack must leave alone. Needs no pytest.

    python harness.py                    runs every attack, and prints what each did as JSON
    python harness.py NAME ...           runs these
    python harness.py --without LAYER    runs those that an unconfined machine survives, where the kernel lacks LAYER

Run by another user, or by another Python, it shows what holds there.
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attacks import ATTACKS, Attack

from trl_rollouts.sandbox import ExecResult, ExecStatus
from trl_rollouts.sandbox.folders import remove, usage
from trl_rollouts.sandbox.local import LocalExecutor
from trl_rollouts.sandbox.session import GRACE_S, LocalSession

LATE_S = 1.5
"""By which a reply may come after the time limit and the grace period."""
MAX_TEXT_CHARS = 50_000
MAX_HOST_GROWTH_BYTES = 64 << 20
MAX_SESSION_BYTES, MAX_FALL_BYTES = int(1.6e9), int(3.2e9)
"""In use by a session; and missing to the machine, which may have other work meanwhile."""
MAX_FOLDER_BYTES = 300 << 20
ENDED = (ExecStatus.DIED, ExecStatus.KILLED, ExecStatus.PROTOCOL)
WRITABLE_BY_ALL = ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/usr/lib")

_VICTIM = """
import os, sys
secret = b'CANARY-' + os.urandom(8).hex().encode()
print(id(secret) + bytes.__basicsize__ - 1, len(secret), flush=True)
for line in sys.stdin: print(line.strip(), secret[:0].decode(), flush=True)
"""


@dataclass
class Verdict:
    """What an attack did."""

    harm: list[str] = field(default_factory=list)
    """To anything but its own session; or it did what no session may."""
    odd: list[str] = field(default_factory=list)
    """Another end than the attack's list has."""


class Victim:
    """A process of the host's user with a secret in its memory and in its environment."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _VICTIM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CANARY": "CANARY-of-the-victim"},
        )
        self.pid = self.process.pid
        self.address, self.length = self._line().split()
        self._before = self._state()

    def _line(self) -> str:
        assert self.process.stdout is not None
        answer: list[str] = []
        reader = threading.Thread(target=lambda: answer.append(self.process.stdout.readline()), daemon=True)
        reader.start()
        reader.join(10.0)
        return answer[0] if answer else ""

    def _state(self) -> dict[str, Any]:
        limits = {
            name: resource.prlimit(self.pid, getattr(resource, name))
            for name in vars(resource)
            if name[:7] == "RLIMIT_"
        }
        return {
            "limits": limits,
            "nice": os.getpriority(os.PRIO_PROCESS, self.pid),
            "affinity": os.sched_getaffinity(self.pid),
            "oom_score_adj": Path(f"/proc/{self.pid}/oom_score_adj").read_text(),
        }

    def harm(self) -> list[str]:
        if self.process.poll() is not None:
            return [f"the victim ended with {self.process.returncode}"]
        assert self.process.stdin is not None
        self.process.stdin.write("still here\n")
        self.process.stdin.flush()
        if not self._line().startswith("still here"):
            return ["the victim does not answer"]
        after = self._state()
        return [
            f"the victim's {name}: {self._before[name]}, then {after[name]}"
            for name in after
            if after[name] != self._before[name]
        ]

    def end(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()


class Outside:
    """A folder that the host's user may write to, a file that all may read, and places where all may write."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "outside"
        self.folder.mkdir(exist_ok=True)
        self.secret_file = root / "secret.txt"
        self.secret_file.write_text("CANARY-in-a-file")
        self.secret_file.chmod(0o644)
        self.victim_file = self.folder / "victim.txt"
        self.victim_file.write_text("untouched")
        self.victim_file.chmod(0o644)
        os.utime(self.victim_file, (1e9, 1e9))
        self._before = self._state()

    def _state(self) -> dict[str, Any]:
        status = self.victim_file.stat()
        xattrs = []
        with suppress(OSError):
            xattrs = os.listxattr(self.victim_file)
        return {
            "names": sorted(os.listdir(self.folder)),
            "mode": oct(status.st_mode),
            "mtime": status.st_mtime,
            "links": status.st_nlink,
            "xattrs": xattrs,
            "size": status.st_size,
        }

    def harm(self) -> list[str]:
        try:
            after = self._state()
        except OSError as error:
            return [f"outside: {error}"]
        harm = [
            f"outside, {name}: {self._before[name]}, then {after[name]}"
            for name in after
            if after[name] != self._before[name]
        ]
        return harm + [f"{path} was written" for path in self._left()]

    @staticmethod
    def _left() -> Iterator[str]:
        for folder in WRITABLE_BY_ALL:
            with suppress(OSError):
                yield from (os.path.join(folder, name) for name in os.listdir(folder) if "trlro" in name)

    def tidy(self) -> None:
        for path in self._left():
            with suppress(OSError):
                os.unlink(path)


class Listeners:
    """Sockets of the host's, and whether anything came in."""

    def __init__(self, root: Path) -> None:
        self.paths = {"unix": str(root / "stream.sock"), "datagram": str(root / "datagram.sock")}
        self.abstract = f"trlro-{os.getpid()}-{time.monotonic_ns()}"
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self._datagrams = [
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM),
        ]
        self._datagrams[0].bind(("127.0.0.1", 0))
        self._datagrams[1].bind(self.paths["datagram"])
        self._streams = [self.tcp]
        for address in (self.paths["unix"], "\0" + self.abstract):
            self._streams.append(socket.socket(socket.AF_UNIX))
            self._streams[-1].bind(address)
            self._streams[-1].listen()
        for path in self.paths.values():
            os.chmod(path, 0o777)
        for listener in self._streams:
            threading.Thread(target=self._greet, args=(listener,), daemon=True).start()
        for listener in self._datagrams:
            listener.setblocking(False)
        self.udp_port = self._datagrams[0].getsockname()[1]
        self._num_callers = 0

    def _greet(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                self._num_callers += 1
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\nCANARY-of-the-listener")
                connection.close()

    def harm(self) -> list[str]:
        harm = [f"{self._num_callers} connections to the host"] if self._num_callers else []
        self._num_callers = 0
        for listener in self._datagrams:
            with suppress(BlockingIOError):
                while True:
                    harm.append(f"the host got {listener.recv(100)!r} on {listener.getsockname()}")
        return harm

    def close(self) -> None:
        for listener in (*self._streams, *self._datagrams):
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            listener.close()


class Stage:
    """An executor with everything that an attack must leave alone, made anew after harm."""

    FUNCTIONS = ("host_add", "host_echo", "host_slow", "host_big")

    def __init__(self, executor: LocalExecutor, root: Path) -> None:
        self.executor = executor
        self._root = root
        self._parts: list[Any] = []
        self._called: set[str] = set()

    async def set_up(self) -> None:
        folder = Path(tempfile.mkdtemp(dir=self._root))
        folder.chmod(0o755)
        self.victim, self.outside, self.listeners = Victim(), Outside(folder), Listeners(folder)
        self._folder = folder
        self.other = await self._open()
        await self.other.run("kept = 12345\nwith open('kept.txt', 'w') as file: _ = file.write('kept')", 20.0)
        self.server_pid = self._server._process.pid
        self._known_processes = set(processes_of(self._server._base))

    async def tear_down(self) -> None:
        self.victim.end()
        self.listeners.close()
        self.outside.tidy()
        with suppress(Exception):
            await self.other.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _server(self) -> Any:
        return self.executor._server

    async def _open(self) -> LocalSession:
        session = await self.executor.open(self.FUNCTIONS, self._call)
        assert isinstance(session, LocalSession)
        return session

    async def _call(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self._called.add(name)
        if name == "host_add":
            return (lambda a, b: a + b)(*args, **kwargs)
        if name == "host_slow":
            await asyncio.sleep(0.25)
        return "b" * (20 << 20) if name == "host_big" else {"args": args, "kwargs": kwargs}

    def _filled(self, code: str) -> str:
        values = {
            "VICTIM_PID": self.victim.pid,
            "HOST_PID": os.getpid(),
            "OTHER_PID": pid_of(self.other),
            "OTHER_DIR": self.other._folder,
            "SECRET_FILE": self.outside.secret_file,
            "SECRET_ADDR": self.victim.address,
            "SECRET_LEN": self.victim.length,
            "BASE": self._server._base,
            "OUTSIDE_DIR": self.outside.folder,
            "PORT": self.listeners.tcp.getsockname()[1],
            "UPORT": self.listeners.udp_port,
            "USOCK": self.listeners.paths["unix"],
            "DSOCK": self.listeners.paths["datagram"],
            "ASOCK": self.listeners.abstract,
        }
        for name, value in values.items():
            code = code.replace(f"@{name}@", str(value))
        return code

    async def run(self, attack: Attack) -> Verdict:
        """Run the attack, and look at everything that it must have left alone."""
        verdict = Verdict()
        num_fds = len(os.listdir("/proc/self/fd"))
        session = await self._open()
        pid = pid_of(session)
        async with self._watched(attack, session, verdict):
            results = await self._attacked(attack, session, verdict)
        if "idle_cpu" in attack.check and session.is_alive:
            before_s = cpu_s(pid)
            await asyncio.sleep(0.5)
            if cpu_s(pid) - before_s > 0.1:
                verdict.harm.append(f"idle, it used {cpu_s(pid) - before_s:.2f} s of 0.5 s")
        verdict.harm += self._reachable(results)
        await self._followed(attack, session, verdict)
        await self._closed(session, verdict)
        await self._looked_around(verdict)
        if len(os.listdir("/proc/self/fd")) > num_fds:
            verdict.harm.append(f"{num_fds} descriptors in the host, then {len(os.listdir('/proc/self/fd'))}")
        if verdict.harm:
            await self.tear_down()
            await self.set_up()
        return verdict

    async def _attacked(self, attack: Attack, session: LocalSession, verdict: Verdict) -> list[ExecResult]:
        results = []
        for code in attack.codes:
            started_at = time.monotonic()
            results.append(await session.run(self._filled(code), attack.timeout_s))
            took_s = time.monotonic() - started_at
            if took_s > attack.timeout_s + GRACE_S + LATE_S + _load_slack_s():
                verdict.harm.append(f"the reply took {took_s:.1f} s of {attack.timeout_s:g} s")
            verdict.harm += _harm_in(results[-1], may_see=attack.name == "stat_probe")
        last = results[-1]
        if attack.expect is not None and last.status not in attack.expect:
            verdict.odd.append(f"{last.status}: {last.error}")
        if "not_forged_last" in attack.check and last.value == "666":
            verdict.harm.append("the last snippet got a forged answer")
        return results

    @asynccontextmanager
    async def _watched(self, attack: Attack, session: LocalSession, verdict: Verdict) -> AsyncIterator[None]:
        """Measures what the attack takes while it runs."""
        peaks = {"session": 0, "fall": 0, "growth": 0, "folder": 0}
        available, resident, pid = _available_bytes(), _resident_bytes(), pid_of(session)

        async def watch() -> None:
            while True:
                peaks["fall"] = max(peaks["fall"], available - _available_bytes())
                with suppress(OSError):  # it has ended
                    peaks["session"] = max(peaks["session"], _resident_bytes(pid))
                peaks["growth"] = max(peaks["growth"], _resident_bytes() - resident)
                if "peak_disk" in attack.check:
                    peaks["folder"] = max(peaks["folder"], usage(session._folder, max_entries=10_000)[1])
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        try:
            yield
        finally:
            watching.cancel()
        if peaks["session"] > MAX_SESSION_BYTES:
            verdict.harm.append(f"the session used {peaks['session'] >> 20} MB")
        if "peak_mem" in attack.check and peaks["fall"] > MAX_FALL_BYTES:
            verdict.harm.append(f"available memory fell by {peaks['fall'] >> 20} MB")
        if peaks["growth"] > MAX_HOST_GROWTH_BYTES + (len(max(attack.codes, key=len)) << 3) + _answers_bytes(attack):
            verdict.harm.append(f"the host grew by {peaks['growth'] >> 20} MB")
        if peaks["folder"] > MAX_FOLDER_BYTES:
            verdict.harm.append(f"its folder held {peaks['folder'] >> 20} MB")

    @staticmethod
    def _reachable(results: list[ExecResult]) -> list[str]:
        """Listeners of the session's, which prints its port."""
        harm = []
        for word in (result.stdout.partition("PORT ")[2].split() for result in results):
            with suppress(OSError, IndexError, ValueError):
                socket.create_connection(("127.0.0.1", int(word[0])), timeout=1.0).close()
                harm.append("its listener can be reached")
        return harm

    async def _followed(self, attack: Attack, session: LocalSession, verdict: Verdict) -> None:
        code, value = attack.follow
        result = await session.run(code, 5.0)
        verdict.harm += _harm_in(result, may_see=False)
        if result.status in ENDED:
            if session.is_alive:
                verdict.harm.append(f"{result.status}, and still alive")
        elif result.value != value and not (value == "None" and result.value is None):
            verdict.odd.append(f"then {code} gave {result}")

    async def _closed(self, session: LocalSession, verdict: Verdict) -> None:
        started_at = time.monotonic()
        try:
            await session.close()
        except Exception as error:
            verdict.harm.append(f"close: {type(error).__name__}: {error}")
        if time.monotonic() - started_at > 3.0 + _load_slack_s():
            verdict.harm.append(f"close took {time.monotonic() - started_at:.1f} s")
        expected = {"canary", "log", os.path.basename(self.other._folder)}
        if left := set(os.listdir(self._server._base)) - expected:
            verdict.harm.append(f"left behind: {sorted(left)[:5]}")
            for name in left:
                with suppress(OSError):
                    path = os.path.join(self._server._base, name)
                    os.unlink(path) if not os.path.isdir(path) else remove(path)
        if strays := set(processes_of(self._server._base)) - self._known_processes:
            verdict.harm.append(f"processes left: {len(strays)}")
            for pid in strays:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _looked_around(self, verdict: Verdict) -> None:
        verdict.harm += self.victim.harm() + self.outside.harm() + self.listeners.harm()
        if unknown := self._called - set(self.FUNCTIONS):
            verdict.harm.append(f"{unknown} were called")
        result = await self.other.run("kept, open('kept.txt').read()", 20.0)
        if result.value != "(12345, 'kept')":
            verdict.harm.append(f"another session: {result}")
        fresh = await self._open()
        if (await fresh.run("40 + 2", 20.0)).value != "42":
            verdict.harm.append("a new session does not answer")
        await fresh.close()
        if not self._server.is_alive or self._server._process.pid != self.server_pid:
            verdict.harm.append("the fork server ended")


def pid_of(session: LocalSession) -> int:
    with open(f"/proc/self/fdinfo/{session._pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def processes_of(base: str) -> list[int]:
    """The fork server that has this folder, and its forks, wherever they are by now: they share a command line."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if base.encode() in Path(f"/proc/{name}/cmdline").read_bytes() and int(name) != os.getpid():
                found.append(int(name))
    return found


def without(layer: str) -> Callable[[list[str], str], list[str]]:
    """For `LocalExecutor._wrapper`: start the fork server where the kernel lacks `layer`."""
    script = str(Path(__file__).with_name("without_layer.py"))
    return lambda command, base: [sys.executable, script, layer, *command]


def _harm_in(result: ExecResult, *, may_see: bool) -> list[str]:
    texts = [text for text in (result.stdout, result.stderr, result.value, result.error) if text is not None]
    words = ("ESCAPED", "INSIDE", "CANARY") if may_see else ("ESCAPED", "INSIDE", "CANARY", "SURFACE")
    harm = [f"{word}: {_around(text, word)}" for word in words for text in texts if word in text]
    for text in texts:
        if type(text) is not str or len(text) > MAX_TEXT_CHARS:
            harm.append(f"a text of {len(text)} characters")
        try:
            text.encode()
        except UnicodeEncodeError:
            harm.append("a text that is no Unicode")
    return harm


def _around(text: str, word: str) -> str:
    at = text.index(word)
    return text[max(0, at - 40) : at + 40]


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))


def _resident_bytes(pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _answers_bytes(attack: Attack) -> int:
    """What the host's own large answers may take."""
    return 200 << 20 if any("host_big" in code for code in attack.codes) else 0


def _load_slack_s() -> float:
    """A busy machine is late; time for which a session waits for a processor is not held against it."""
    return 2.0 + os.getloadavg()[0]


@contextmanager
def stage_folder() -> Iterator[Path]:
    """In the system's own place, which other users can enter."""
    root = Path(tempfile.mkdtemp(prefix="trl_stage-"))
    root.chmod(0o755)
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


async def run_all(attacks: Iterable[Attack], root: Path, layer: str | None, bubblewrap: bool) -> dict[str, Any]:
    """Run attacks one after the other. The verdicts, and how the executor describes its isolation."""
    missing = [layer] if layer else []
    executor = LocalExecutor(modules=["numpy"], folder=root, allow_missing=missing, bubblewrap=bubblewrap)
    if layer:
        executor._wrapper = without(layer)
    stage = Stage(executor, root)
    await stage.set_up()
    assert executor.isolation is not None
    report: dict[str, Any] = {
        "isolation": str(executor.isolation),
        "missing": executor.isolation.missing,
        "landlock_abi": executor.isolation.landlock_abi,
        "verdicts": {},
    }
    for attack in attacks:
        started_at = time.monotonic()
        verdict = await stage.run(attack)
        took_s = round(time.monotonic() - started_at, 2)
        report["verdicts"][attack.name] = {"harm": verdict.harm, "odd": verdict.odd, "took_s": took_s}
    await stage.tear_down()
    await executor.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", metavar="LAYER")
    parser.add_argument("--bubblewrap", action="store_true")
    parser.add_argument("names", metavar="NAME", nargs="*")
    arguments = parser.parse_args()
    chosen = [attack for attack in ATTACKS if not arguments.names or attack.name in arguments.names]
    if arguments.without:
        chosen = [attack for attack in chosen if attack.control and attack.is_safe]
    os.environ["CANARY"] = "CANARY-of-the-host"
    with stage_folder() as root:
        print(json.dumps(asyncio.run(run_all(chosen, root, arguments.without, arguments.bubblewrap))))


if __name__ == "__main__":
    main()
