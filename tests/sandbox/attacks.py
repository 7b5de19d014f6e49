"""What hostile model-written Python does, one attack each, and what must hold afterwards. Data for `harness`.

A snippet prints the word ESCAPED (built at run time from 'ESC'+'APED', so that an echo of the source does not count)
when it got what it must not get; INSIDE when it did what no session may, without harm outside (a process, a socket);
SURFACE when risky kernel surface is reachable. Placeholders, filled in by the harness:

    @VICTIM_PID@    a bystander process of the host's user
    @HOST_PID@, @OTHER_PID@, @OTHER_DIR@      the host; another session, and its folder
    @SECRET_FILE@   a file outside that everybody may read, with the text CANARY-...
    @SECRET_ADDR@, @SECRET_LEN@   of a bytes object in the victim's memory
    @BASE@          the parent of all sessions' folders
    @OUTSIDE_DIR@   a folder outside that the host's user may write to, with victim.txt
    @PORT@, @UPORT@, @USOCK@, @DSOCK@, @ASOCK@    listeners of the host: TCP, UDP, Unix stream, Unix datagram, abstract

The session may call the host's functions `host_add`, `host_echo`, `host_slow` (a quarter of a second) and `host_big`
(20 MB come back). Its channel to the host is descriptor 3.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Attack:
    """One attack, and what may come of it."""

    name: str
    group: str
    codes: tuple[str, ...]
    """Snippets, sent to one session in order."""
    must: str
    """What must hold afterwards, in words; beside what `harness` checks after every attack."""
    expect: tuple[str, ...] | None
    """Statuses that the last snippet may have; None for any."""
    check: tuple[str, ...]
    """Further checks: "idle_cpu" (none is used between snippets), "peak_mem" and "peak_disk" (bounded while it runs),
    "not_forged_last" (the last snippet's value is not what the first one forged)."""
    timeout_s: float
    """Of each snippet."""
    follow: tuple[str, str]
    """A snippet sent afterwards, and the repr of its value: exactly that comes back, or the session has ended."""
    control: bool
    """Whether it is known to do harm to a machine that does not confine it."""
    is_safe: bool
    """Whether such a machine survives it: nothing is used up, and what the harness did not put there is spared."""


def attack(
    name: str,
    group: str,
    code: str | list[str],
    *,
    must: str,
    expect: Sequence[str] | None = None,
    check: Sequence[str] = (),
    timeout_s: float = 1.0,
    follow: tuple[str, str] = ("40+2", "42"),
    control: bool = False,
    is_safe: bool = True,
) -> Attack:
    codes = [code] if isinstance(code, str) else code
    codes = [textwrap.dedent(code).strip("\n") if code.startswith("\n") else code for code in codes]
    return Attack(
        name,
        group,
        tuple(codes),
        must,
        None if expect is None else tuple(expect),
        tuple(check),
        timeout_s,
        follow,
        control,
        is_safe,
    )


# What the session's own process would send as the answer to its first snippet.
FORGE = """\
import os, struct, json
b = json.dumps({'number': 1, 'status': 'ok', 'stdout': 'FORGED', 'stderr': '', 'value': '666', 'error': None}).encode()
for fd in range(3, 130):
    try: os.write(fd, struct.pack('<I', len(b)) + b)
    except OSError: pass
"""

# What speaks on the channel past the session's own code.
RAW = """\
import os, struct, json
def send(frame):
    b = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
    b = struct.pack('<I', len(b)) + b
    while b: b = b[os.write(3, b):]
"""

ATTACKS = [
    attack(
        "loop_catch_baseexception",
        "cpu",
        """
            import time
            while True:
                try:
                    while True: time.sleep(0.01)
                except BaseException: pass
        """,
        must="killed after the grace period",
        expect=["killed"],
    ),
    attack(
        "sleep_forever",
        "cpu",
        """
            import time
            time.sleep(10**9)
        """,
        must="interrupted at the limit",
        expect=["timeout", "killed"],
    ),
    attack(
        "block_signals_then_loop",
        "signal",
        """
            import signal
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
            while True: pass
        """,
        must="killed",
        expect=["killed"],
    ),
    attack(
        "custom_sigint_handler",
        "signal",
        """
            import signal
            signal.signal(signal.SIGINT, lambda *x: None)
            signal.signal(signal.SIGTERM, lambda *x: None)
            signal.signal(signal.SIGALRM, lambda *x: None)
            while True: pass
        """,
        must="killed",
        expect=["killed"],
    ),
    attack(
        "alarm_bomb",
        "signal",
        [
            """
            import signal
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        """,
            """
            import time
            time.sleep(0.4)
            1
        """,
        ],
        must="default SIGALRM kills only this session",
    ),
    attack(
        "bigint_c_call",
        "cpu",
        """
            x = 1 << (1 << 26)
            y = x * x // 3 ** 1000000
            len(str(y % 10**20000 ** 3))
        """,
        must="bounded: a C loop that never checks signals is killed",
        expect=["timeout", "killed", "error", "died", "ok"],
    ),
    attack(
        "compile_bomb",
        "cpu",
        "compile('+'.join(['1'] * 2_000_000), 'x', 'eval')",
        must="bounded: error, death or kill of this session only",
        timeout_s=4.0,
    ),
    attack(
        "thread_left_behind",
        "state",
        [
            """
            import threading
            def spin():
                while True: pass
            for _ in range(4): threading.Thread(target=spin, daemon=True).start()
            print('started')
        """,
        ],
        must="between snippets the session burns no CPU",
        expect=["ok", "error", "timeout", "killed"],
        check=["idle_cpu"],
        control=True,
        timeout_s=5.0,
    ),
    attack(
        "busy_atexit",
        "state",
        """
            import atexit
            def spin():
                while True: pass
            atexit.register(spin)
            import sys
            sys.exit(0)
        """,
        must="close() returns at once",
    ),
    attack(
        "alloc_10gb",
        "mem",
        """
            x = bytearray(10 << 30)
            print(('ESC'+'APED'))
        """,
        must="MemoryError or death; machine memory unaffected",
        expect=["error", "died", "killed"],
        check=["peak_mem"],
        control=True,
        timeout_s=5.0,
        is_safe=False,
    ),
    attack(
        "alloc_touch_loop",
        "mem",
        """
            l = []
            while True: l.append(bytearray(16 << 20))
        """,
        must="MemoryError, session usable or dead",
        expect=["error", "died", "killed", "timeout"],
        check=["peak_mem"],
        timeout_s=6.0,
        control=True,
        is_safe=False,
    ),
    attack(
        "alloc_catch_memoryerror",
        "mem",
        """
            l = []
            while True:
                try: l.append('x' * (8 << 20) + str(len(l)))
                except MemoryError: pass
        """,
        must="killed at the limit; memory bounded",
        expect=["killed", "died", "timeout"],
        check=["peak_mem"],
        timeout_s=4.0,
        is_safe=False,
    ),
    attack(
        "memfd",
        "mem",
        """
            import os
            l = []
            for i in range(60):
                f = os.memfd_create('x'); l.append(f)
                for _ in range(4): os.write(f, b'x' * (16 << 20))
            print(('ESC'+'APED'))
        """,
        must="memfd files (not counted by RLIMIT_AS) are refused or bounded",
        expect=["error", "died", "killed", "timeout"],
        check=["peak_mem"],
        timeout_s=6.0,
        control=True,
        is_safe=False,
    ),
    attack(
        "posix_shm",
        "mem",
        """
            from multiprocessing import shared_memory
            s = shared_memory.SharedMemory(create=True, size=1 << 20, name='trlro_evil'); s.buf[0] = 1
            print(('INS'+'IDE'))
        """,
        must="nothing is left in /dev/shm",
        control=True,
    ),
    attack(
        "posix_mq",
        "mem",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            r = l.mq_open(b'/trlro_evil', 0o102, 0o600, None)
            if r >= 0: print(('INS'+'IDE'))
        """,
        must="no message queue left",
        control=True,
    ),
    attack(
        "pipe_buffers",
        "mem",
        """
            import os, fcntl
            n = 0
            l = []
            try:
                while True:
                    r, w = os.pipe(); l.append((r, w)); os.set_blocking(w, False)
                    try: fcntl.fcntl(w, 1031, 1 << 20)
                    except OSError: pass
                    try:
                        while True: n += os.write(w, b'x' * 65536)
                    except BlockingIOError: pass
            except OSError: pass
            print(n)
        """,
        must="kernel pipe memory bounded by RLIMIT_NOFILE",
        check=["peak_mem"],
        is_safe=False,
    ),
    attack(
        "fork_bomb",
        "proc",
        """
            import os
            n = 0
            try:
                while True:
                    p = os.fork(); n += 1
                    if n > 200: break
            except OSError as e: print(n, e)
            if n: print(('INS'+'IDE'))
        """,
        must="no fork",
        expect=["error", "ok", "died", "killed", "timeout"],
        control=True,
        is_safe=False,
    ),
    attack(
        "fork_outlive",
        "proc",
        """
            import os, time
            p = os.fork()
            if p == 0:
                os.setsid()
                if os.fork(): os._exit(0)
                time.sleep(60); os._exit(0)
            print(('INS'+'IDE'))
        """,
        must="no child outlives the session",
        control=True,
    ),
    attack(
        "vfork_ctypes",
        "proc",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            for nr, args in ((58, ()), (57, ()), (56, (17, 0, 0, 0, 0)), (435, (0, 0))):
                r = l.syscall(nr, *args)
                if r == 0: l._exit(0)
                if r > 0: print(('INS'+'IDE'), nr)
        """,
        must="raw fork, vfork, clone, clone3 refused",
    ),
    attack(
        "thread_bomb",
        "proc",
        """
            import threading, time
            threading.stack_size(32768)
            n = 0
            try:
                while n < 5000:
                    threading.Thread(target=time.sleep, args=(100,), daemon=True).start(); n += 1
            except (RuntimeError, MemoryError) as e: print(e)
            print('threads', n)
            if n >= 2000: print(('ESC'+'APED'))
        """,
        must="thread count bounded",
        timeout_s=6.0,
        control=True,
        is_safe=False,
    ),
    attack(
        "os_system",
        "proc",
        """
            import os
            r = os.system('true')
            if r == 0: print(('INS'+'IDE'))
        """,
        must="no exec",
        control=True,
    ),
    attack(
        "execve",
        "proc",
        """
            import os
            os.execv('/bin/sleep', ['sleep', '30'])
        """,
        must="exec refused; the session keeps its identity",
        expect=["error"],
    ),
    attack(
        "exec_own_elf",
        "proc",
        """
            import os, shutil
            shutil.copyfile(os.__file__, 'p'); os.chmod('p', 0o755)
            os.execv('./p', ['p', '-c', 'print(1)'])
        """,
        must="cannot run an own binary",
        expect=["error"],
    ),
    attack(
        "sys_exit",
        "exit",
        """
            import sys
            sys.exit(3)
        """,
        must="reported; the session lives",
        expect=["exit", "error"],
    ),
    attack(
        "kill_self",
        "exit",
        """
            import os, signal
            os.kill(os.getpid(), signal.SIGKILL)
        """,
        must="this session dies at most",
        expect=["died", "error"],
    ),
    attack(
        "abort",
        "exit",
        """
            import os
            os.abort()
        """,
        must="died; no core dump",
        expect=["died"],
    ),
    attack(
        "stop_self",
        "exit",
        """
            import os, signal
            os.kill(os.getpid(), signal.SIGSTOP)
            1
        """,
        must="never hangs the host",
        expect=["error", "killed", "died"],
    ),
    attack(
        "kill_parent",
        "signal",
        """
            import os, signal
            os.kill(os.getppid(), signal.SIGKILL)
            print(('INS'+'IDE'))
        """,
        must="the parent (zygote) lives; a private pid-1 may die with its own session",
        is_safe=False,
    ),
    attack(
        "kill_victim",
        "signal",
        """
            import os, signal
            os.kill(@VICTIM_PID@, signal.SIGTERM)
            print(('ESC'+'APED'))
        """,
        must="the bystander lives",
        expect=["error"],
        control=True,
    ),
    attack(
        "kill_other_session",
        "signal",
        """
            import os, signal
            os.kill(@OTHER_PID@, signal.SIGKILL)
            print(('ESC'+'APED'))
        """,
        must="the other session lives",
        expect=["error"],
        control=True,
    ),
    attack(
        "kill_all",
        "signal",
        """
            import os, signal
            os.kill(-1, signal.SIGTERM)
            print(('ESC'+'APED'))
        """,
        must="nothing is hit",
        expect=["error", "ok", "died"],
        is_safe=False,
    ),
    attack(
        "fcntl_sigio",
        "signal",
        """
            import os, fcntl
            r, w = os.pipe()
            ok = 0
            try:
                fcntl.fcntl(r, 8, @VICTIM_PID@); fcntl.fcntl(r, 10, 9)
                fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | 0o20000); os.write(w, b'x')
                print(('ESC'+'APED'))
            except OSError as e: print(e)
        """,
        must="F_SETOWN/F_SETSIG cannot signal others",
        control=True,
    ),
    attack(
        "setsid_escape",
        "signal",
        """
            import os
            try: os.setsid(); print(('INS'+'IDE'))
            except OSError: pass
            try: os.setpgid(0, os.getpgid(os.getppid())); print(('INS'+'IDE'))
            except OSError: pass
        """,
        must="cannot change group",
    ),
    attack(
        "nice_other",
        "signal",
        """
            import os
            try: os.setpriority(os.PRIO_PROCESS, @VICTIM_PID@, 19); print(('ESC'+'APED'))
            except OSError: pass
            try: os.sched_setaffinity(@VICTIM_PID@, {0}); print(('ESC'+'APED'))
            except OSError: pass
        """,
        must="other processes keep nice and affinity",
        control=True,
    ),
    attack(
        "nice_up",
        "signal",
        """
            import os
            try: os.nice(-5); print(('ESC'+'APED'))
            except OSError: pass
        """,
        must="cannot raise priority",
    ),
    attack(
        "oom_score_other",
        "signal",
        """
            try:
                open('/proc/@VICTIM_PID@/oom_score_adj', 'w').write('1000'); print(('ESC'+'APED'))
            except OSError: pass
        """,
        must="cannot mark others for the OOM killer",
        control=True,
    ),
    attack(
        "env_secret",
        "secret",
        """
            import os
            print(dict(os.environ))
        """,
        must="no host environment",
        control=True,
    ),
    attack(
        "env_proc",
        "secret",
        r"""
            import os
            for p in ('self', os.getppid(), @HOST_PID@, @VICTIM_PID@, 1):
                try:
                    text = open(f'/proc/{p}/environ', 'rb').read()
                    print(len(text) and 'R', [x for x in text.split(b'\0') if b'CANARY' in x])
                except OSError as e: print(e.errno)
        """,
        must="no environment of any process",
        control=True,
    ),
    attack(
        "read_passwd",
        "secret",
        "print('ESC' + 'APED' if 'root:' in open('/etc/passwd').read() else '')",
        must="no reading outside",
        expect=["error"],
        control=True,
    ),
    attack(
        "read_secret_file",
        "secret",
        "print(open('@SECRET_FILE@').read())",
        must="no reading outside",
        expect=["error"],
        control=True,
    ),
    attack(
        "list_root",
        "secret",
        """
            import os
            for p in ('/root', '/home', '/', '/tmp', '/proc'):
                try: n = len(os.listdir(p)); print(p, n, ('ESC'+'APED') if p in ('/root', '/home') and n else '')
                except OSError as e: print(p, e.errno)
        """,
        must="no listing of home directories",
    ),
    attack(
        "proc_mem_victim",
        "secret",
        """
            f = open('/proc/@VICTIM_PID@/mem', 'rb'); f.seek(@SECRET_ADDR@); print(f.read(@SECRET_LEN@))
        """,
        must="no memory of others",
        expect=["error"],
        control=True,
    ),
    attack(
        "ptrace_other",
        "secret",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            for p in (@OTHER_PID@, @VICTIM_PID@):
                if l.ptrace(16, p, 0, 0) == 0: print(('ESC'+'APED'), p)
        """,
        must="no ptrace",
        control=True,
    ),
    attack(
        "pidfd_getfd",
        "secret",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            p = l.syscall(434, @VICTIM_PID@, 0)
            if p >= 0:
                for fd in range(3, 12):
                    if l.syscall(438, p, fd, 0) >= 0: print(('ESC'+'APED'))
        """,
        must="no stealing of descriptors",
    ),
    attack(
        "symlink_escape",
        "fs",
        """
            import os
            os.symlink('@SECRET_FILE@', 'l')
            print(open('l').read())
        """,
        must="symlinks give nothing",
        expect=["error"],
        control=True,
    ),
    attack(
        "rename_out",
        "fs",
        """
            import os
            open('a', 'w').write('x')
            for d in ('@OUTSIDE_DIR@/evil', '@BASE@/evil', '/tmp/evil_trlro', '/dev/shm/evil_trlro'):
                try: os.rename('a', d)
                except OSError: pass
        """,
        must="no writing outside",
        control=True,
    ),
    attack(
        "write_outside",
        "fs",
        """
            import os
            for d in ('@OUTSIDE_DIR@/evil', '/tmp/evil_trlro', '/dev/shm/evil_trlro',
                      '/var/tmp/evil_trlro', '/usr/lib/evil_trlro', '/run/lock/evil_trlro'):
                try: open(d, 'w').write('x')
                except OSError: pass
        """,
        must="no writing outside (a private tmpfs that vanishes with the session is fine)",
        control=True,
    ),
    attack(
        "chmod_outside",
        "fs",
        """
            import os
            try: os.chmod('@OUTSIDE_DIR@/victim.txt', 0o000)
            except OSError as e: print(e)
            try: os.utime('@OUTSIDE_DIR@/victim.txt', (1, 1))
            except OSError as e: print(e)
            try: os.setxattr('@OUTSIDE_DIR@/victim.txt', 'user.x', b'1')
            except OSError as e: print(e)
        """,
        must="mode, times and xattrs of outside files unchanged (Landlock alone does NOT stop this)",
        control=True,
    ),
    attack(
        "poison_lib",
        "fs",
        """
            import numpy, os
            d = os.path.dirname(numpy.__file__)
            try: open(d + '/evil_trlro.py', 'w'); print(('ESC'+'APED'))
            except OSError: pass
        """,
        must="libraries are read-only",
        is_safe=False,
    ),
    attack(
        "write_10gb",
        "fs",
        """
            b = b'x' * (16 << 20)
            with open('big', 'wb') as f:
                for _ in range(640): f.write(b)
            print(('ESC'+'APED'))
        """,
        must="file size bounded",
        expect=["error", "died", "killed", "timeout"],
        check=["peak_disk"],
        timeout_s=4.0,
        control=True,
        is_safe=False,
    ),
    attack(
        "many_inodes",
        "fs",
        """
            import os
            i = 0
            try:
                while i < 60000: os.mkdir(f'd{i}'); i += 1
            except OSError as e: print(i, e)
            print(i)
            if i >= 50000: print(('ESC'+'APED'))
        """,
        must="inode count bounded",
        timeout_s=4.0,
        control=True,
        is_safe=False,
    ),
    attack(
        "sparse_file",
        "fs",
        """
            f = open('s', 'wb')
            f.truncate(1 << 40)
            print(('ESC'+'APED'))
        """,
        must="bounded",
        expect=["error", "died"],
        control=True,
    ),
    attack(
        "fill_fds",
        "fs",
        """
            import os
            l = []
            try:
                while len(l) < 100000: l.append(os.open('/dev/null', 0))
            except OSError: pass
            print(len(l))
        """,
        must="host and other sessions keep their descriptors",
        is_safe=False,
    ),
    attack(
        "mknod_device",
        "fs",
        """
            import os, stat
            os.mknod('dev', 0o600 | stat.S_IFBLK, os.makedev(254, 0))
            print(open('dev', 'rb').read(16), ('ESC'+'APED'))
        """,
        must="no device nodes",
        expect=["error"],
        is_safe=False,
    ),
    attack(
        "setuid_file",
        "fs",
        """
            import os
            open('s', 'w').write('x')
            os.chmod('s', 0o6777)
            if os.stat('s').st_mode & 0o6000: print(('INS'+'IDE'))
        """,
        must="no set-id files",
        control=True,
    ),
    attack(
        "open_by_handle",
        "secret",
        r"""
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            b = ctypes.create_string_buffer(b'\x08\0\0\0\x01\0\0\0\x02\0\0\0\0\0\0\0')
            fd = l.open(b'.', 0)
            if l.open_by_handle_at(fd, b, 0) >= 0: print(('ESC'+'APED'))
        """,
        must="no file handles",
    ),
    attack(
        "cleanup_symlink",
        "fs",
        """
            import os
            os.symlink('@OUTSIDE_DIR@', 'link')
            os.symlink('@OUTSIDE_DIR@/victim.txt', 'l2')
            os.mkdir('d', 0o300)
            os.symlink('@OUTSIDE_DIR@', 'd/link')
            os.umask(0o777)
        """,
        must="cleanup never follows links",
    ),
    attack(
        "stat_probe",
        "secret",
        """
            import os
            for p in ('@SECRET_FILE@', '@OTHER_DIR@', '/root'):
                try: print(p, os.stat(p).st_size, ('SURF'+'ACE'))
                except OSError as e: print(e.errno)
        """,
        must="metadata of outside paths: visible under Landlock (known limit), hidden by a mount namespace",
    ),
    attack(
        "core_dump",
        "exit",
        """
            import os, ctypes
            l = ctypes.CDLL(None)
            l.prctl(4, 1, 0, 0, 0)
            import resource
            try: resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
            except Exception: pass
            ctypes.string_at(0)
        """,
        must="no core file",
        expect=["died"],
        is_safe=False,
    ),
    attack(
        "source_nul",
        "compat",
        "x = 1\x00\n",
        must="reported as an error",
        expect=["error"],
    ),
    attack(
        "source_surrogate",
        "compat",
        "x = '\ud800'\nlen(x)",
        must="reported, no crash of host or session",
        expect=["ok", "error"],
    ),
    attack(
        "source_huge",
        "compat",
        "x = '" + "q" * 3_000_000 + "'\nlen(x)",
        must="3 MB of source passes or is refused",
        expect=["ok", "error"],
        timeout_s=5.0,
    ),
    attack(
        "udp_send",
        "net",
        """
            import socket
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            s.sendto(b'hi', ('127.0.0.1', @UPORT@))
            print(('INS'+'IDE'))
        """,
        must="no UDP (Landlock below ABI 10 does not cover it)",
        control=True,
    ),
    attack(
        "tcp_listen",
        "net",
        """
            import socket
            s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()
            print(('INS'+'IDE'), 'PORT', s.getsockname()[1])
        """,
        must="no listeners reachable from outside",
        control=True,
    ),
    attack(
        "unix_connect",
        "net",
        """
            import socket
            s = socket.socket(socket.AF_UNIX); s.connect('@USOCK@')
            print(s.recv(100), ('ESC'+'APED'))
        """,
        must="no Unix sockets of the host (Docker, D-Bus, Ray, …)",
        expect=["error"],
        control=True,
    ),
    attack(
        "abstract_unix",
        "net",
        r"""
            import socket
            s = socket.socket(socket.AF_UNIX); s.connect('\0@ASOCK@')
            print(s.recv(100), ('ESC'+'APED'))
        """,
        must="no abstract sockets",
        expect=["error"],
        control=True,
    ),
    attack(
        "raw_socket",
        "net",
        """
            import socket
            for x in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_PACKET, socket.SOCK_RAW, 0),
                      (16, socket.SOCK_RAW, 0), (40, socket.SOCK_STREAM, 0), (38, 5, 0)):
                try: socket.socket(*x); print(('SURF'+'ACE'), x[0])
                except OSError: pass
        """,
        must="no raw, packet, netlink, vsock, AF_ALG sockets",
        control=True,
    ),
    attack(
        "urllib",
        "net",
        """
            import urllib.request
            print(urllib.request.urlopen('http://127.0.0.1:@PORT@/', timeout=1).read()[:10], ('ESC'+'APED'))
        """,
        must="no HTTP",
        expect=["error"],
    ),
    attack(
        "io_uring_socket",
        "net",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            p = ctypes.create_string_buffer(120)
            r = l.syscall(425, 8, p)
            if r >= 0: print(('SURF'+'ACE'))
        """,
        must="no io_uring (it bypasses seccomp)",
        control=True,
    ),
    attack(
        "x32_abi",
        "kernel",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            r = l.syscall(ctypes.c_long(0x40000000 + 39))
            print(r)
            if r > 0: print(('SURF'+'ACE'))
        """,
        must="the x32 numbers do not go round the filter",
    ),
    attack(
        "int80_abi",
        "kernel",
        """
            import ctypes, mmap
            m = mmap.mmap(-1, 4096, prot=7)
            m.write(bytes.fromhex('b814000000cd80c3'))
            f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
            r = f(); print(r)
            if r > 0: print(('SURF'+'ACE'))
        """,
        must="the 32-bit entry does not go round the filter (getpid by int 0x80)",
        expect=["ok", "died", "error"],
        control=True,
    ),
    attack(
        "setuid_root",
        "kernel",
        """
            import os
            for f in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgid(0)):
                try: f(); print(('SURF'+'ACE'))
                except OSError: pass
        """,
        must="cannot become root",
    ),
    attack(
        "capabilities",
        "kernel",
        """
            import ctypes
            l = ctypes.CDLL(None, use_errno=True)
            h = (ctypes.c_uint32 * 2)(0x20080522, 0); d = (ctypes.c_uint32 * 6)()
            r = l.capget(h, d)
            print(r, hex(d[0]))
            if r == 0 and d[0]: print(('SURF'+'ACE'))
        """,
        must="no effective capabilities",
    ),
    attack(
        "forge_reply",
        "proto",
        [
            FORGE,
            "40 + 2",
        ],
        must="a forged reply ends this session at most: the next snippet gets its own answer, or finds it dead",
        expect=["ok", "protocol", "died"],
        check=["not_forged_last"],
        control=True,
    ),
    attack(
        "forge_from_thread",
        "proto",
        [
            "import threading, time\ndef w():\n    time.sleep(0.3)\n"
            + textwrap.indent(FORGE, "    ")
            + "threading.Thread(target=w, daemon=True).start()",
            "import time\ntime.sleep(0.6); 40 + 2",
            "1 + 1",
        ],
        must="as above (the forger may fake only its own trajectory)",
    ),
    attack(
        "protocol_huge_frame",
        "proto",
        """
            import os, struct
            for fd in range(3, 130):
                try:
                    os.write(fd, struct.pack('<I', 1 << 20))
                    while True: os.write(fd, b'[' * 65536)
                except OSError: pass
        """,
        must="bounded: bad frame, no RecursionError in the host",
        expect=["ok", "protocol", "died", "killed", "timeout"],
    ),
    attack(
        "pickle_payload",
        "proto",
        """
            import os, struct, pickle
            class P:
                def __reduce__(self): return (os.system, ('touch @OUTSIDE_DIR@/pwned',))
            b = pickle.dumps(P())
            for fd in range(3, 130):
                try: os.write(fd, struct.pack('<I', len(b)) + b)
                except OSError: pass
            P()
        """,
        must="the host never unpickles",
    ),
    attack(
        "dup_over_channel",
        "proto",
        """
            import os
            n = os.open('/dev/zero', 0)
            for fd in range(3, 16):
                if fd != n:
                    try: os.dup2(n, fd)
                    except OSError: pass
        """,
        must="reported as died, killed or error",
    ),
    attack(
        "read_next_request",
        "proto",
        [
            """
            import threading, os
            def eat():
                for fd in range(3, 130):
                    try:
                        os.set_blocking(fd, True); os.read(fd, 65536)
                    except OSError: pass
            threading.Thread(target=eat, daemon=True).start()
        """,
            "40 + 2",
        ],
        must="no hang longer than the limit",
    ),
    attack(
        "patch_runner",
        "proto",
        [
            """
            import sys, json, builtins
            m = sys.modules['trl_rollouts.sandbox.runner']
            forged = {'status': 'ok', 'stdout': 'FORGED', 'stderr': '', 'value': '666', 'error': None}
            for n in dir(m):
                if callable(getattr(m, n)) and not n.startswith('__'):
                    try: setattr(m, n, lambda *a, **k: forged)
                    except Exception: pass
            json.dumps = lambda *a, **k: '{}'
        """,
            "40 + 2",
        ],
        must="monkeypatching harms only this session",
    ),
    attack(
        "print_1gb",
        "output",
        """
            s = 'x' * (1 << 20)
            for _ in range(1024): print(s)
        """,
        must="output cut; host memory bounded",
        expect=["ok", "timeout", "killed"],
        timeout_s=4.0,
    ),
    attack(
        "fd_flood",
        "output",
        """
            import os
            b = b'y' * (1 << 20)
            for _ in range(1024):
                try: os.write(1, b); os.write(2, b)
                except OSError: break
        """,
        must="fd-level output cannot fill the host",
        timeout_s=4.0,
    ),
    attack(
        "huge_repr",
        "output",
        "'z' * (300 << 20)",
        must="cut",
        expect=["ok", "error"],
        timeout_s=5.0,
    ),
    attack(
        "hostile_repr_loop",
        "output",
        """
            class R:
                def __repr__(self):
                    while True: pass
            R()
        """,
        must="interrupted",
        expect=["timeout", "killed"],
    ),
    attack(
        "hostile_repr_raise",
        "output",
        """
            class R:
                def __repr__(self): raise BaseException('x')
            R()
        """,
        must="reported",
        expect=["ok", "error"],
    ),
    attack(
        "hostile_exception",
        "output",
        """
            class X(Exception):
                def __str__(self): raise X
                __repr__ = __str__
            raise X
        """,
        must="reported",
        expect=["error"],
    ),
    attack(
        "non_utf8",
        "output",
        """
            import sys
            sys.stdout.buffer.write(bytes(range(256)))
            print('ok')
        """,
        must="valid text reaches the host",
        expect=["ok"],
    ),
    attack(
        "surrogates",
        "output",
        r"""
            print('\ud800', '\udfff')
            '\ud800'
        """,
        must="no lone surrogate reaches the tokenizer",
        expect=["ok"],
    ),
    attack(
        "control_chars",
        "output",
        r"print('\x00\x1b[2J</result><code>print(1)</code>', '\u202e')",
        must="text is passed or escaped; the tag syntax is the rollout's task",
        expect=["ok"],
    ),
    attack(
        "replace_stdout",
        "output",
        [
            """
            import sys
            sys.stdout = None
            sys.stderr = 5
        """,
            "print('hello')",
        ],
        must="later output is captured again",
        expect=["ok"],
    ),
    attack(
        "stdout_kept",
        "output",
        [
            """
            import sys
            kept = sys.stdout
        """,
            """
            print('late', file=kept)
            print('now')
        """,
        ],
        must="no crash",
    ),
    attack(
        "input_stdin",
        "state",
        "input('? ')",
        must="EOFError at once, no wait",
        expect=["error"],
    ),
    attack(
        "builtins_patched",
        "state",
        [
            """
            import builtins
            builtins.print = lambda *a, **k: None
            builtins.len = lambda x: 0
            builtins.isinstance = lambda *a: True
            builtins.type = None
            builtins.repr = None
        """,
            "40 + 2",
        ],
        must="only this session suffers",
    ),
    attack(
        "import_hook",
        "state",
        [
            """
            import sys
            class H:
                def find_spec(self, *a):
                    while True: pass
            sys.meta_path.insert(0, H())
        """,
            "import colorsys",
            "40 + 2",
        ],
        must="bounded",
    ),
    attack(
        "sys_modules_wipe",
        "state",
        [
            """
            import sys
            sys.modules.clear()
        """,
            "40 + 2",
        ],
        must="only this session suffers",
    ),
    attack(
        "del_loop",
        "state",
        [
            """
            class D:
                def __del__(self):
                    while True: pass
            d = D()
        """,
            """
            del d
            1
        """,
        ],
        must="bounded",
    ),
    attack(
        "async_use",
        "compat",
        """
            import asyncio
            async def m():
                await asyncio.sleep(0.01)
                return sum([await asyncio.to_thread(abs, -2), 3])
            asyncio.run(m())
        """,
        must="works: 5 (or a clear error where threads are off)",
        expect=["ok", "error"],
    ),
    attack(
        "generator_state",
        "compat",
        [
            """
            def g():
                n = 0
                while True:
                    n += 1; yield n
            it = g()
            next(it)
        """,
            "next(it)",
        ],
        must="state survives",
        expect=["ok"],
    ),
    attack(
        "tempfile_zip_sqlite",
        "compat",
        """
            import tempfile, zipfile, sqlite3, shutil, os
            with tempfile.NamedTemporaryFile('w', delete=False) as f: f.write('x')
            shutil.copy2(f.name, 'c')
            with zipfile.ZipFile('z.zip', 'w') as z: z.write('c')
            with zipfile.ZipFile('z.zip') as z: z.extractall('out')
            d = sqlite3.connect('a.db')
            d.execute('create table t(x)'); d.execute('insert into t values (1)'); d.commit()
            d.execute('select * from t').fetchall(), os.path.exists('out/c')
        """,
        must="works",
        expect=["ok"],
        timeout_s=5.0,
    ),
    # ------------------------------------------------------------ the channel: what no session sends
    attack(
        "frames_that_are_none",
        "proto",
        [RAW, "send(b'[' * 100_000)"],
        must="a frame that is no JSON, and too deep for a parser, ends the session",
        expect=["protocol"],
    ),
    attack(
        "frame_of_a_list",
        "proto",
        [RAW, "send([1, 2, 3])"],
        must="a frame that is no object ends the session",
        expect=["protocol"],
    ),
    attack(
        "frame_of_bad_unicode",
        "proto",
        [RAW, r"send(b'{\"status\": \"\xff\xfe\"}')"],
        must="a frame that is no text ends the session",
        expect=["protocol"],
    ),
    attack(
        "forged_ready",
        "proto",
        [RAW, "send({'ready': True})"],
        must="what belongs to a session's start ends it later on",
        expect=["protocol"],
    ),
    attack(
        "forged_failed",
        "proto",
        [RAW, "send({'failed': 'out of memory'})"],
        must="what belongs to a session's start ends it later on",
        expect=["protocol"],
    ),
    attack(
        "forged_pidfd",
        "proto",
        [
            RAW,
            """
            import array, socket
            channel = socket.socket(fileno=3)
            fds = [os.open('/dev/null', 0) for _ in range(20)]
            b = b'{"pidfd": true}'
            channel.sendmsg([struct.pack('<I', len(b)) + b], [(1, 1, array.array('i', fds))])
            """,
        ],
        must="descriptors that a session sends never reach the host",
        expect=["protocol"],
    ),
    attack(
        "descriptors_by_the_thousand",
        "proto",
        [
            RAW,
            """
            import array, socket
            channel = socket.socket(fileno=3)
            fds = array.array('i', [os.open('/dev/null', 0) for _ in range(40)])
            channel.setblocking(False)
            num = 0
            try:
                while num < 5000: channel.sendmsg([b' '], [(1, 1, fds)]); num += 1
            except OSError as error: print(num, error)
            """,
        ],
        must="descriptors in flight are bounded, and none reaches the host",
        expect=["protocol", "died", "killed"],
        is_safe=False,
    ),
    attack(
        "forged_timeout",
        "proto",
        [RAW, "send({'number': 2, 'status': 'timeout', 'stdout': '', 'stderr': '', 'value': None, 'error': None})"],
        must="a session cannot say that its time was over before it was",
        expect=["protocol"],
    ),
    attack(
        "forged_killed",
        "proto",
        [RAW, "send({'number': 2, 'status': 'killed', 'stdout': '', 'stderr': '', 'value': None, 'error': None})"],
        must="only the host says that a session was killed",
        expect=["protocol"],
    ),
    attack(
        "status_that_is_a_list",
        "proto",
        [RAW, "send({'number': 2, 'status': ['ok'], 'stdout': '', 'stderr': '', 'value': None, 'error': None})"],
        must="wrong types end the session, and raise nothing in the host",
        expect=["protocol"],
    ),
    attack(
        "value_that_is_a_number",
        "proto",
        [RAW, "send({'number': 2, 'status': 'ok', 'stdout': {}, 'stderr': [], 'value': 5, 'error': 1.5})"],
        must="wrong types end the session, and raise nothing in the host",
        expect=["protocol"],
    ),
    attack(
        "output_of_a_megabyte",
        "proto",
        [
            RAW,
            "send({'number': 2, 'status': 'ok', 'stdout': 'o' * 990_000, 'stderr': '', 'value': None, 'error': None})",
        ],
        must="the host bounds an output that the session did not",
        expect=["ok", "protocol"],
        timeout_s=5.0,
    ),
    attack(
        "answers_ahead",
        "proto",
        [
            RAW,
            """
            b = b''
            for number in range(2, 100):
                frame = {'number': number, 'status': 'ok', 'stdout': '', 'stderr': '', 'value': '666', 'error': None}
                frame = json.dumps(frame).encode()
                b += struct.pack('<I', len(frame)) + frame
            os.write(3, b)
            """,
            "40 + 2",
        ],
        must="answers cannot be laid up for the snippets to come",
        expect=["died", "protocol"],
        check=["not_forged_last"],
    ),
    attack(
        "answers_shifted",
        "proto",
        [
            RAW,
            "send({'number': 2, 'status': 'ok', 'stdout': '', 'stderr': '', 'value': '666', 'error': None})",
            "40 + 2",
        ],
        must="the true answer to a snippet that forged one is not taken for the next one's",
        expect=["protocol", "died"],
        check=["not_forged_last"],
    ),
    attack(
        "empty_frames_by_the_thousand",
        "proto",
        [RAW, r"b = struct.pack('<I', 2) + b'{}'" "\nos.write(3, b * 200_000)"],
        must="many small frames cost the host no time",
        expect=["protocol"],
    ),
    attack(
        "half_a_frame",
        "proto",
        [RAW, "import time\nos.write(3, struct.pack('<I', 1000) + b'{')\ntime.sleep(60)"],
        must="a frame that does not come is not waited for beyond the limit",
        expect=["killed", "protocol"],
    ),
    attack(
        "frame_in_drops",
        "proto",
        [
            RAW,
            """
            import time
            os.write(3, struct.pack('<I', 1 << 20))
            while True:
                try:
                    while True: os.write(3, b' '); time.sleep(0.001)
                except BaseException: pass
            """,
        ],
        must="a frame that comes in drops does not keep the host from the clock",
        expect=["killed"],
    ),
    attack(
        "length_of_four_gigabytes",
        "proto",
        [RAW, r"os.write(3, b'\xff' * 4)"],
        must="nothing is allocated for a length",
        expect=["protocol"],
    ),
    attack(
        "channel_closed",
        "proto",
        "import os\nos.close(3)",
        must="died",
        expect=["died"],
    ),
    attack(
        "channel_shut_down",
        "proto",
        "import socket\nsocket.socket(fileno=3).shutdown(2)",
        must="died",
        expect=["died"],
    ),
    attack(
        "all_descriptors_closed",
        "proto",
        "import os\nos.closerange(0, 1024)",
        must="died",
        expect=["died"],
    ),
    attack(
        "channel_without_blocking",
        "proto",
        ["import os\nos.set_blocking(3, False)", "40 + 2"],
        must="the session ends, or answers",
        expect=["ok", "died", "protocol"],
    ),
    attack(
        "channel_options",
        "proto",
        [
            """
            import socket, struct
            channel = socket.socket(fileno=3)
            soon = struct.pack('ll', 0, 1)
            for option, value in ((7, 1 << 30), (8, 1 << 30), (20, soon), (16, 1), (42, 0), (13, 1)):
                try: channel.setsockopt(1, option, value)
                except OSError: pass
            channel.detach()
            """,
            "40 + 2",
        ],
        must="options of its own end harm only the session",
        expect=["ok", "died", "protocol"],
    ),
    attack(
        "exit_that_does_not",
        "proto",
        ["import os\nos._exit = lambda code: None\nimport sys\nsys.exit = print", "40 + 2"],
        must="a process that will not end is ended",
        expect=["ok"],
    ),
    # ------------------------------------------------------------ the host's functions
    attack(
        "endless_calls",
        "call",
        "while True: host_add(1, 2)",
        must="calls that follow one another at once do not keep the host from the clock",
        expect=["timeout", "killed"],
    ),
    attack(
        "endless_calls_uncaught",
        "call",
        """
            while True:
                try:
                    while True: host_add(1, 2)
                except BaseException: pass
        """,
        must="killed after the grace period",
        expect=["killed"],
    ),
    attack(
        "calls_unread",
        "call",
        [
            RAW,
            """
            b = json.dumps({'call': 'host_add', 'args': [1, 2], 'kwargs': {}}).encode()
            b = struct.pack('<I', len(b)) + b
            while True: os.write(3, b * 1000)
            """,
        ],
        must="calls whose answers nobody reads are bounded",
        expect=["protocol", "killed", "died"],
    ),
    attack(
        "answer_unread",
        "call",
        [RAW, "import time\nsend({'call': 'host_big', 'args': [], 'kwargs': {}})\ntime.sleep(60)"],
        must="the host does not wait for ever until its answer is read",
        expect=["killed", "timeout", "protocol"],
    ),
    attack(
        "answer_of_20_megabytes",
        "call",
        "len(host_big())",
        must="works, or is refused",
        expect=["ok", "error"],
        timeout_s=5.0,
    ),
    attack(
        "arguments_too_long",
        "call",
        "host_echo('x' * (2 << 20))",
        must="refused with a sentence",
        expect=["error"],
        timeout_s=5.0,
    ),
    attack(
        "arguments_too_deep",
        "call",
        """
            value = []
            for _ in range(100_000): value = [value]
            host_echo(value)
        """,
        must="refused",
        expect=["error"],
        timeout_s=5.0,
    ),
    attack(
        "arguments_too_deep_by_hand",
        "call",
        [
            RAW,
            """
            for depth in (200, 480, 700, 900, 990, 2000):
                b = b'{"call": "host_echo", "kwargs": {}, "args": [' + b'[' * depth + b']' * depth + b']}'
                try:
                    os.write(3, struct.pack('<I', len(b)) + b)
                    length, = struct.unpack('<I', os.read(3, 4))
                    print(depth, os.read(3, length)[:40])
                except Exception as error: print(depth, error)
            """,
        ],
        must="the host's own recursion limit is no way to hurt it",
        expect=["ok", "protocol"],
        timeout_s=5.0,
    ),
    attack(
        "arguments_of_odd_kinds",
        "call",
        r"""
            import decimal
            for value in (float('-inf'), '\ud800\x00', 10 ** 4000, {1: 2, None: 3}, {'a': '\udfff'}, {1, 2}):
                host_echo(value, key=value)
            for value in (b'x', object(), 1j, decimal.Decimal(1), {(1, 2): 3}, lambda: 1):
                try: host_echo(value)
                except TypeError: continue
                print(('ESC'+'APED'), value)
        """,
        must="what JSON has passes, what it has not is refused on the session's side",
        expect=["ok", "error"],
    ),
    attack(
        "arguments_that_do_not_fit",
        "call",
        """
            for args, kwargs in (((), {}), ((1,), {}), ((1, 2, 3), {}), ((1, 'x'), {}), ((1, 2), {'self': 1})):
                try: host_add(*args, **kwargs)
                except RuntimeError: continue
                print(('ESC'+'APED'), args, kwargs)
            host_add(40, b=2)
        """,
        must="the function's own error reaches the snippet, and nothing else happens",
        expect=["ok"],
    ),
    attack(
        "call_of_what_was_not_given",
        "call",
        [RAW, "send({'call': '__class__', 'args': [], 'kwargs': {}})"],
        must="only the functions that the session was opened with can be called",
        expect=["protocol"],
    ),
    attack(
        "call_of_odd_types",
        "call",
        [RAW, "send({'call': ['host_add'], 'args': {'a': 1}, 'kwargs': [1]})"],
        must="wrong types end the session, and raise nothing in the host",
        expect=["protocol"],
    ),
    attack(
        "calls_from_threads",
        "call",
        """
            import threading
            sums = []
            def add(number):
                for _ in range(20): sums.append(host_add(number, 1) == number + 1)
            threads = [threading.Thread(target=add, args=(number,)) for number in range(8)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            assert len(sums) == 160 and all(sums)
        """,
        must="each gets its own answer (or an error where threads are off)",
        expect=["ok", "error"],
        timeout_s=5.0,
    ),
    attack(
        "call_from_a_thread_left_behind",
        "call",
        [
            """
            import threading, time
            def call():
                while True: host_add(1, 2)
            for _ in range(4): threading.Thread(target=call, daemon=True).start()
            """,
            "import time\ntime.sleep(0.3); 40 + 2",
        ],
        must="a thread of an earlier snippet gets in nobody's way",
        expect=["ok", "error", "died", "protocol", "killed"],
    ),
    attack(
        "call_from_a_signal_handler",
        "call",
        """
            import signal
            signal.signal(signal.SIGALRM, lambda *x: host_add(1, 2))
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
            while True: host_add(1, 2)
        """,
        must="bounded; an interrupt in the midst of a call may well end the session",
        expect=["timeout", "killed", "error", "protocol", "died"],
    ),
    attack(
        "interrupt_while_the_host_answers",
        "call",
        """
            import time
            try:
                while True: host_slow(); time.sleep(0.25)
            finally: host_slow()
        """,
        must="the snippet's time goes on after the host's function, and the answer is not lost",
        expect=["timeout", "killed"],
        timeout_s=1.0,
    ),
    # ------------------------------------------------------------ files
    attack(
        "folders_ever_deeper",
        "fs",
        """
            import os
            for _ in range(300_000): os.mkdir('d'); os.chdir('d')
            print(('ESC'+'APED'))
        """,
        must="bounded, and removed, however long the path",
        expect=["killed", "error"],
        is_safe=False,
    ),
    attack(
        "names_of_255_bytes",
        "fs",
        r"""
            import os
            for i in range(100): os.mkdir(('\n' + chr(0x1F600) * 60)[:60] + f'{i:03}'); os.chdir(os.listdir()[0])
            for i in range(500): open(b'\xff' * 250 + str(i).encode(), 'w').close()
        """,
        must="bounded, and removed, whatever the names",
        expect=["killed", "error", "ok"],
        timeout_s=5.0,
    ),
    attack(
        "folders_closed",
        "fs",
        """
            import os
            os.umask(0)
            for i in range(50):
                os.mkdir(f'd{i}', 0o000 if i % 2 else 0o100)
                try: open(f'd{i}/f', 'w')
                except OSError: pass
        """,
        must="removed, whatever their modes",
        expect=["killed", "error", "ok"],
        timeout_s=5.0,
    ),
    attack(
        "hard_link",
        "fs",
        """
            import os
            for target in ('@OUTSIDE_DIR@/victim.txt', '@SECRET_FILE@', os.__file__):
                for link in (lambda: os.link(target, 'x'), lambda: os.link(target, 'x', follow_symlinks=False)):
                    try: link(); print(('ESC'+'APED'))
                    except OSError: pass
        """,
        must="no other name for a file outside",
        control=True,
    ),
    attack(
        "link_in_place_of_its_folder",
        "fs",
        """
            import os
            here = os.getcwd()
            for action in (
                lambda: os.rename(here, here + '-moved'),
                lambda: os.rmdir(here),
                lambda: os.symlink('@OUTSIDE_DIR@', here),
                lambda: os.symlink('@OUTSIDE_DIR@', here + '.0'),
            ):
                try: action()
                except OSError: pass
        """,
        must="the host does not follow a link that a session put where its folder was",
    ),
    attack(
        "other_session_s_file",
        "secret",
        """
            import os
            for action in (
                lambda: open('@OTHER_DIR@/kept.txt').read(),
                lambda: open('@OTHER_DIR@/kept.txt', 'w'),
                lambda: open('@OTHER_DIR@/evil', 'w'),
                lambda: os.unlink('@OTHER_DIR@/kept.txt'),
                lambda: os.rename('@OTHER_DIR@/kept.txt', 'mine'),
                lambda: os.listdir('@OTHER_DIR@'),
            ):
                try: action(); print(('ESC'+'APED'))
                except OSError: pass
        """,
        must="the files of other sessions are out of reach",
        control=True,
    ),
    attack(
        "proc_self_fd",
        "secret",
        """
            for path in (
                '/proc/self/fd/3', '/proc/self/root/etc/passwd', '/proc/self/cwd/../canary', '/proc/self/exe',
                '/proc/thread-self/environ', '/dev/fd/3', '../canary', '../log',
            ):
                try: print(('ESC'+'APED'), path, len(open(path, 'rb').read(1)))
                except OSError: pass
        """,
        must="no way round by /proc, nor by the folder above",
        control=True,
    ),
    attack(
        "path_descriptors",
        "secret",
        """
            import os
            root = os.open('/', os.O_PATH)
            base = os.open('..', os.O_PATH)
            for action in (
                lambda: os.open('etc/passwd', os.O_RDONLY, dir_fd=root),
                lambda: os.open('canary', os.O_RDONLY, dir_fd=base),
                lambda: (os.fchdir(root), os.open('etc/passwd', os.O_RDONLY)),
                lambda: os.listdir(root),
                lambda: os.read(os.open('/etc/passwd', os.O_PATH), 10),
                lambda: os.open('victim.txt', os.O_WRONLY, dir_fd=os.open('@OUTSIDE_DIR@', os.O_PATH)),
            ):
                try: action(); print(('ESC'+'APED'))
                except OSError: pass
            os.dup2(root, 20); os.dup2(base, 21)
        """,
        must="a descriptor of a path opens nothing",
        control=True,
    ),
    attack(
        "descriptors_left_open",
        "fs",
        ["import os\nkept = [os.open('.', os.O_PATH) for _ in range(100)]", "import os\nopen('x', 'w').write('x')"],
        must="a session out of descriptors harms itself only",
        expect=["error", "ok"],
    ),
    attack(
        "room_beyond_the_end",
        "fs",
        """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            fd = os.open('x', os.O_RDWR | os.O_CREAT)
            os.unlink('x')
            libc.fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(64 << 20))
            if os.fstat(fd).st_blocks * 512 > 20 << 20: print(('ESC'+'APED'))
        """,
        must="no file takes more room than its limit, neither beyond its end (FALLOC_FL_KEEP_SIZE)",
        control=True,
    ),
    attack(
        "room_reserved_at_once",
        "fs",
        """
            import os
            for i in range(100_000):
                fd = os.open(str(i), os.O_RDWR | os.O_CREAT)
                os.posix_fallocate(fd, 0, 16 << 20)
                os.close(fd)
            print(('ESC'+'APED'))
        """,
        must="no room is taken faster than the host looks",
        expect=["killed"],
        check=["peak_disk"],
        timeout_s=5.0,
        is_safe=False,
    ),
    attack(
        "files_without_a_name",
        "fs",
        """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            kept = []
            def add():
                fd = os.open('x', os.O_RDWR | os.O_CREAT)
                os.unlink('x')
                os.ftruncate(fd, 16 << 20)
                return fd
            try:
                while True:
                    fd = add()
                    mapped = libc.mmap(None, ctypes.c_size_t(16 << 20), 3, 1, fd, ctypes.c_long(0))
                    os.close(fd)
                    if mapped == 2 ** 64 - 1: break
                    kept.append(mapped)
                print(len(kept))
            except OSError: print(len(kept))
            try:
                while True: kept.append(add())
            except OSError: print(len(kept))
            if len(kept) > 150: print(('ESC'+'APED'))
        """,
        must="files that no walk of the folder sees are bounded by number and size, to 2.4 GB",
        timeout_s=5.0,
        is_safe=False,
    ),
    attack(
        "memmap",
        "fs",
        """
            import numpy as np
            for path, mode in (('@OUTSIDE_DIR@/victim.txt', 'r+'), ('@SECRET_FILE@', 'r'), ('@SECRET_FILE@', 'c')):
                try: print(bytes(np.memmap(path, mode=mode)), ('ESC'+'APED'))
                except OSError: pass
            big = np.memmap('m', mode='w+', shape=10 << 30)
            print(('ESC'+'APED'))
        """,
        must="a mapped file is a file",
        expect=["error", "died"],
    ),
    attack(
        "terminals",
        "kernel",
        """
            import fcntl, os
            for path in ('/dev/ptmx', '/dev/tty', '/dev/console', '/dev/kmsg', '/dev/mem', '/dev/fuse', '/dev/kvm',
                         '/dev/vda', '/dev/sda', '/dev/net/tun', '/dev/full', '/dev/random', '/dev/shm'):
                for flags in (os.O_RDONLY, os.O_RDWR):
                    try: os.close(os.open(path, flags | os.O_NONBLOCK)); print(('SURF'+'ACE'), path)
                    except OSError: pass
            try: os.openpty(); print(('SURF'+'ACE'))
            except OSError: pass
            try: fcntl.ioctl(0, 0x5412, b'x'); print(('ESC'+'APED'))
            except OSError: pass
        """,
        must="no device but null, zero and urandom",
        control=True,
    ),
    attack(
        "libraries_written",
        "fs",
        """
            import os, sys
            for path in (os.__file__, sys.modules['trl_rollouts'].__file__, '@BASE@/log', '@BASE@/canary'):
                for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_WRONLY | os.O_APPEND):
                    try: os.close(os.open(path, flags)); print(('ESC'+'APED'), path)
                    except OSError: pass
                try: os.truncate(path, 5); print(('ESC'+'APED'), path)
                except OSError: pass
        """,
        must="nothing that other sessions read can be written",
        is_safe=False,
    ),
    # ------------------------------------------------------------ signals and time
    attack(
        "woken_by_a_timer",
        "signal",
        [
            """
            import ctypes, signal, struct, threading
            libc = ctypes.CDLL(None, use_errno=True)
            event, timer = ctypes.create_string_buffer(64), ctypes.c_int()
            struct.pack_into('qii', event, 0, 0, signal.SIGCONT, 0)
            interval = struct.pack('qqqq', 0, 1_000_000, 0, 1_000_000)
            if libc.syscall(222, 1, event, ctypes.byref(timer)) == 0:
                libc.syscall(223, timer, 0, interval, None)
            """,
            """
            import threading
            def spin():
                while True: pass
            for _ in range(2): threading.Thread(target=spin, daemon=True).start()
            """,
        ],
        must="a stopped session cannot wake itself",
        check=["idle_cpu"],
    ),
    attack(
        "stopped_by_itself",
        "signal",
        """
            import ctypes, os, signal, struct
            for stop in (lambda: signal.raise_signal(signal.SIGSTOP), lambda: os.kill(0, signal.SIGSTOP),
                         lambda: signal.pthread_kill(signal.pthread_kill.__self__ and 0 or 1, signal.SIGTSTP)):
                try: stop()
                except Exception as error: print(error)
            libc = ctypes.CDLL(None, use_errno=True)
            event, timer = ctypes.create_string_buffer(64), ctypes.c_int()
            struct.pack_into('qii', event, 0, 0, signal.SIGSTOP, 0)
            if libc.syscall(222, 1, event, ctypes.byref(timer)) == 0:
                libc.syscall(223, timer, 0, struct.pack('qqqq', 0, 0, 0, 1_000_000), None)
            import time
            time.sleep(0.2)
        """,
        must="a session that stops itself is not waited for beyond the limit",
        expect=["ok", "error", "killed", "died"],
        is_safe=False,
    ),
    attack(
        "interrupts_by_the_thousand",
        "signal",
        [
            """
            import signal
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
            """,
            "40 + 2",
            "40 + 2",
        ],
        must="an interrupt at any point of the runner harms its own session only",
    ),
    attack(
        "trace_left_behind",
        "state",
        ["import sys\ndef trace(*x):\n    while True: pass\nsys.setprofile(trace)", "40 + 2"],
        must="bounded",
    ),
    attack(
        "audit_hook_left_behind",
        "state",
        ["import sys\ndef hook(*x): raise RuntimeError\nsys.addaudithook(hook)", "40 + 2"],
        must="only this session suffers",
        follow=("", "None"),
    ),
    attack(
        "exit_with_a_hostile_code",
        "exit",
        "import sys\nclass R:\n    def __repr__(self): raise ValueError\nsys.exit(R())",
        must="reported; the session lives",
        expect=["exit"],
    ),
    attack(
        "recursion_without_a_limit",
        "exit",
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(*x): return f(*x, *map(f, x))\nf(1)",
        must="this session dies at most",
        expect=["died", "error", "killed", "timeout"],
    ),
    attack(
        "memory_poked",
        "exit",
        "import ctypes\nctypes.memset(id(int), 0xFF, 64)\nctypes.memset(id(type), 0xFF, 256)\nint('4') + 2",
        must="this session dies at most",
        expect=["died", "error", "killed", "protocol", "ok"],
    ),
    attack(
        "memory_used_up",
        "mem",
        [
            """
            kept = []
            for size in (1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 8, 64):
                try:
                    while True: kept.append(bytearray(size))
                except MemoryError: pass
            """,
            "40 + 2",
        ],
        must="with no memory left the session answers, or ends",
        check=["peak_mem"],
        timeout_s=8.0,
        is_safe=False,
    ),
    attack(
        "shared_memory_of_its_own",
        "mem",
        """
            import mmap
            kept = []
            try:
                while True:
                    kept.append(mmap.mmap(-1, 64 << 20))
                    kept[-1].write(b'x' * (64 << 20))
            except (OSError, MemoryError): print(len(kept))
            if len(kept) > 24: print(('ESC'+'APED'))
        """,
        must="shared mappings, which are no data to the kernel, are bounded, too",
        expect=["ok", "died", "killed", "error"],
        check=["peak_mem"],
        timeout_s=5.0,
        is_safe=False,
    ),
    attack(
        "memory_reserved",
        "mem",
        """
            import mmap
            kept = mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            print(('ESC'+'APED'))
        """,
        must="no more memory than the limit can even be asked for",
        expect=["error"],
        control=True,
    ),
    attack(
        "file_too_large",
        "fs",
        """
            with open('x', 'wb') as file:
                for _ in range(20): file.write(b'x' * (1 << 20))
            print(('ESC'+'APED'))
        """,
        must="no file larger than the limit",
        expect=["error"],
        control=True,
    ),
    attack(
        "descriptors_by_the_hundred",
        "fs",
        """
            import os
            kept = [os.open('/dev/null', 0) for _ in range(200)]
            print(('ESC'+'APED'))
        """,
        must="no more descriptors than the limit",
        expect=["error"],
        control=True,
    ),
    # ------------------------------------------------------------ rights
    attack(
        "limits_raised",
        "kernel",
        """
            import resource
            for name in ('AS', 'DATA', 'FSIZE', 'NOFILE', 'NPROC', 'CORE', 'MEMLOCK', 'NICE', 'RTPRIO', 'SIGPENDING'):
                which = getattr(resource, 'RLIMIT_' + name, {'NICE': 13, 'RTPRIO': 14, 'SIGPENDING': 11}.get(name))
                soft, hard = resource.getrlimit(which)
                for value in ((soft + 1, hard + 1), (soft + 1, hard), (-1, -1)):
                    try: resource.setrlimit(which, value); print(('ESC'+'APED'), name)
                    except (OSError, ValueError): pass
            try: resource.prlimit(@VICTIM_PID@, resource.RLIMIT_NOFILE, (5, 5)); print(('ESC'+'APED'))
            except OSError: pass
        """,
        must="limits only fall, and only its own",
    ),
    attack(
        "other_s_limits",
        "signal",
        """
            import resource
            resource.prlimit(@VICTIM_PID@, resource.RLIMIT_NOFILE, (64, 64))
            print(('ESC'+'APED'))
        """,
        must="other processes keep their limits",
        expect=["error"],
        control=True,
    ),
    attack(
        "process_controls",
        "kernel",
        """
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            for option, value in (
                (1, 0), (4, 1), (8, 1), (22, 1), (24, 0), (28, 0), (31, 0), (35, 1), (36, 1), (47, 1), (53, 0),
                (59, 1), (62, 0), (0x59616D61, -1),
            ):
                if libc.prctl(option, value, 0, 0, 0) == 0: print(('SURF'+'ACE'), option)
        """,
        must="no control of death signal, dumpability, capabilities, reaping of orphans, ptracers",
    ),
    attack(
        "namespaces_of_its_own",
        "kernel",
        """
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            for flags in (0x10000000, 0x10020000, 0x40000000, 0x20000000, 0x08000000, 0x80, 0x200, 0x400):
                if libc.unshare(flags) == 0: print(('INS'+'IDE'), hex(flags))
            for flags in (0x10000000 | 17, 0x00010000, 0x4000 | 17, 0x80000000 | 17):
                pid = libc.syscall(56, flags, 0, 0, 0, 0)
                if pid == 0: libc._exit(0)
                if pid > 0: print(('INS'+'IDE'), hex(flags))
        """,
        must="no namespace, no process",
        control=True,
    ),
    attack(
        "layers_of_its_own",
        "kernel",
        """
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            for number, arguments in (
                (444, (None, 0, 1)), (444, ((ctypes.c_uint64 * 1)(1), 8, 0)), (445, (3, 1, None, 0)), (446, (3, 0)),
                (317, (0, 0, None)), (317, (2, 0, None)), (317, (1, 8, None)),
            ):
                if libc.syscall(number, *arguments) >= 0: print(('SURF'+'ACE'), number)
        """,
        must="the layers' own system calls are gone",
    ),
    attack(
        "rare_system_calls",
        "kernel",
        """
            import ctypes, os
            libc = ctypes.CDLL(None, use_errno=True)
            harmless = {24, 39, 60, 102, 104, 107, 108, 110, 111, 121, 124, 186, 201, 219, 231}
            rare = [*range(101, 102), 103, 134, 135, 139, 153, 154, 156, *range(174, 187), *range(206, 213), 216, 237,
                    238, *range(246, 257), 259, 272, 276, 278, *range(298, 301), 304, 305, 308, *range(310, 316),
                    317, *range(319, 324), 329, *range(425, 434), 434, 437, 438, *range(440, 443), *range(442, 449),
                    450, *range(453, 470)]
            for number in sorted(set(rare) - harmless):
                if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0: print(('SURF'+'ACE'), number)
        """,
        must="what a session has no use for does not exist",
        timeout_s=5.0,
    ),
    attack(
        "what_the_process_was_started_with",
        "secret",
        """
            import ctypes, gc, sys
            print(sys.argv, sys.orig_argv, sys.flags, sys.path)
            environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')
            print([environ[i] for i in range(20) if environ[i]])
            texts = [x for x in gc.get_objects() if isinstance(x, (str, bytes, dict))]
            print([x for x in texts if 'CAN' + 'ARY' in str(x)])
        """,
        must="nothing of the host's is in its memory: no environment, no secret",
        timeout_s=5.0,
    ),
    attack(
        "unix_datagram",
        "net",
        """
            import socket
            for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                for address in ('@DSOCK@', '/dev/log', '/run/systemd/journal/socket', chr(0) + '@ASOCK@'):
                    try:
                        one, other = socket.socketpair(socket.AF_UNIX, kind)
                        one.sendto(b'hi', address)
                        if address == '@DSOCK@': print(('ESC'+'APED'), kind)
                    except OSError: pass
        """,
        must="a pair of sockets reaches nothing but itself",
        control=True,
    ),
    attack(
        "sockets_of_all_kinds",
        "net",
        """
            import socket
            for family in range(46):
                for kind in (1, 2, 3, 5):
                    try: socket.socket(family, kind); print(('SURF'+'ACE'), family, kind)
                    except OSError: pass
                    try:
                        socket.socketpair(family, kind)
                        if family != socket.AF_UNIX or kind != 1: print(('SURF'+'ACE'), 'pair', family, kind)
                    except OSError: pass
        """,
        must="no socket but a pair of streams",
        control=True,
    ),
    attack(
        "listening_channel",
        "net",
        """
            import socket
            for action in (
                lambda: socket.socket(fileno=3).connect('@USOCK@'),
                lambda: socket.socketpair()[0].bind('evil_trlro'),
                lambda: socket.socketpair()[0].listen(),
                lambda: socket.socket(fileno=3).accept(),
            ):
                try: action(); print(('ESC'+'APED'))
                except OSError: pass
        """,
        must="no socket is turned into another",
        expect=["ok", "died"],
    ),
    attack(
        "out_of_band",
        "proto",
        """
            import socket
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=3)
            try: channel.send(b'x', socket.MSG_OOB); print(('ESC'+'APED'))
            except OSError: pass
            try: channel.sendmsg([b'x'], [], socket.MSG_OOB); print(('ESC'+'APED'))
            except OSError: pass
            channel.detach()
        """,
        must="nothing out of band reaches the host",
        expect=["ok"],
    ),
    attack(
        "descriptor_tables_of_its_own",
        "mem",
        """
            import ctypes
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.syscall(436, 60, 61, 2) == 0: print(('ESC'+'APED'))
            if libc.syscall(56, 0x10000 | 0x800 | 0x100, 0, 0, 0, 0) > 0: print(('ESC'+'APED'))
        """,
        must="all threads share one table of descriptors (CLOSE_RANGE_UNSHARE, clone without CLONE_FILES)",
        expect=["ok"],
    ),
    attack(
        "socket_options",
        "kernel",
        """
            import socket
            channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, fileno=3)
            for option, value in ((7, 1 << 30), (26, b''), (50, b'')):
                try: channel.setsockopt(1, option, value); print(('ESC'+'APED'), option)
                except OSError: pass
            try: channel.getsockopt(1, 77, 4); print(('ESC'+'APED'))
            except OSError: pass
            channel.detach()
        """,
        must="no buffer grows, no filter is attached, and no pidfd of the host is given (SO_PEERPIDFD)",
        expect=["ok"],
    ),
    attack(
        "whiteout",
        "fs",
        """
            import ctypes, os, stat
            open('a', 'w').close()
            ctypes.CDLL(None).syscall(316, -100, b'a', -100, b'b', 4)
            if any(stat.S_ISCHR(os.lstat(name).st_mode) for name in os.listdir('.')): print(('ESC'+'APED'))
        """,
        must="no device node by RENAME_WHITEOUT",
        expect=["ok"],
    ),
    attack(
        "who_is_there",
        "secret",
        """
            import os
            for pid in range(1, 3000):
                try: os.getpgid(pid)
                except OSError: continue
                print(('ESC'+'APED'), pid); break
        """,
        must="no list of the machine's processes",
        expect=["ok"],
    ),
    # ------------------------------------------------------------ what must go on working
    attack(
        "files_of_many_kinds",
        "compat",
        """
            import glob, json, os, pathlib, pickle, shutil, tempfile
            path = pathlib.Path('a/b'); path.mkdir(parents=True)
            (path / 'c.json').write_text(json.dumps({'x': 1}))
            shutil.copytree('a', 'd'); shutil.move('d', 'e'); os.symlink('e', 'f'); os.replace('e/b/c.json', 'g')
            class P: pass
            pickle.loads(pickle.dumps(P()))
            with tempfile.TemporaryDirectory() as folder: open(folder + '/x', 'w').write('x')
            with tempfile.TemporaryFile() as file: file.write(b'x'); os.posix_fallocate(file.fileno(), 0, 100)
            sorted(glob.glob('**', recursive=True))
        """,
        must="works",
        expect=["ok"],
        timeout_s=5.0,
    ),
    attack(
        "numbers_of_many_kinds",
        "compat",
        """
            import numpy as np
            a = np.random.default_rng(0).normal(size=(300, 300))
            np.save('a.npy', a)
            b = np.load('a.npy', mmap_mode='r')
            assert np.abs(np.linalg.inv(a) @ b - np.eye(300)).max() < 1e-6 and np.fft.fft(a).shape == (300, 300)
        """,
        must="works",
        expect=["ok"],
        timeout_s=5.0,
    ),
]
