"""The system calls that a sandboxed process may make: an allow list, compiled once and loaded by each process.

What is not listed does not exist for it (ENOSYS, from which glibc falls back to older calls). Some answer otherwise:

- `_DENIED` say EPERM, so that errors read well.
- `_PRETENDED` succeed and do nothing: modes, owners and times of files, which Landlock does not govern and which
  shutil, zipfile and tempfile set in passing.
- Files may not be emptied by `open(O_TRUNC)` for reading nor by `truncate`: Landlock before ABI 3 lets both through.
- No room on a disk is reserved without writing (`fallocate`): faster than anybody looks, and, beyond a file's end,
  past all limits. glibc's `posix_fallocate` then writes.
- No process sends itself a signal, neither by a timer: SIGCONT would wake one that the host has stopped.
- A pair of sockets is one of streams: those of datagrams can be sent to any socket whose path is known.
- No process is started: `clone` makes threads only, and the newer `clone3`, whose flags no filter can see, is absent.

Foreign system call tables (32-bit, x32) are killed. libseccomp compiles the list, by way of pyseccomp.
"""

import ctypes
import errno
import os
import socket
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_ALLOWED = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 close stat fstat lstat newfstatat
fstatat64 statx statfs fstatfs access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir getdents getdents64
lseek _llseek dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait
epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime mkdir mkdirat rmdir unlink
unlinkat rename renameat symlink symlinkat ftruncate fsync fdatasync sync_file_range flock
copy_file_range sendfile umask fadvise64 readahead mmap mmap2 munmap mprotect mremap madvise brk msync mincore futex
futex_waitv set_robust_list get_robust_list rseq set_tid_address arch_prctl sched_yield sched_getaffinity
sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getpid gettid getppid getuid geteuid
getgid getegid getresuid getresgid getgroups getpgrp getpriority uname sysinfo times getrusage getrlimit
ugetrlimit clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time getitimer setitimer alarm
pause rt_sigaction rt_sigprocmask rt_sigreturn
sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait sigaltstack getrandom exit exit_group restart_syscall wait4
waitid recvfrom recvmsg shutdown getsockname getpeername membarrier getcpu get_mempolicy
""".split()

_PRETENDED = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes utimensat futimesat".split()

_UNSUPPORTED = """
setxattr lsetxattr fsetxattr getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr removexattr lremovexattr
fremovexattr fallocate
""".split()

_DENIED = """
truncate fork vfork execve execveat setsockopt socket connect bind listen accept accept4 kill tkill tgkill
rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal pidfd_open pidfd_getfd ptrace process_vm_readv process_vm_writev
kcmp link linkat mknod mknodat mount umount2 move_mount fsopen fsconfig fsmount fspick open_tree mount_setattr
pivot_root chroot unshare setns setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid capset
setrlimit setpriority sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set setpgid setsid
sethostname setdomainname shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open
mq_unlink mq_notify memfd_create mlock mlock2 mlockall munlockall bpf perf_event_open userfaultfd keyctl add_key
request_key init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff syslog acct
quotactl quotactl_fd settimeofday clock_settime clock_adjtime adjtimex iopl ioperm modify_ldt personality vhangup
name_to_handle_at open_by_handle_at fanotify_init fanotify_mark inotify_init inotify_init1 inotify_add_watch move_pages
migrate_pages mbind set_mempolicy lookup_dcookie seccomp pkey_mprotect remap_file_pages signalfd signalfd4 vmsplice
splice tee sync syncfs io_uring_setup io_uring_enter io_uring_register timer_create
""".split()

_FCNTL = [*range(8), 36, 37, 38, *range(1030, 1035)]  # no F_SETOWN, F_SETSIG, F_NOTIFY: they signal other processes
_IOCTL = [termios.TCGETS, termios.TIOCGWINSZ, termios.FIONREAD, termios.FIONBIO, termios.FIONCLEX, termios.FIOCLEX]
_PRCTL = [15, 16, 0x53564D41]  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
_SOCKET_OPTIONS = [3, 4, 38, 39]  # SO_TYPE, SO_ERROR, SO_PROTOCOL, SO_DOMAIN: of others, one gives a pidfd
_CLONE_FILES, _CLONE_THREAD = 0x400, 0x10000
_MSG_OOB, _RENAME_WHITEOUT, _CLOSE_RANGE_UNSHARE = 1, 4, 2
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2

_libc = ctypes.CDLL(None, use_errno=True)


def compiled(*, allow_threads: bool) -> bytes:
    """The filter as a BPF program.

    Raises:
        ImportError, RuntimeError, OSError: pyseccomp or libseccomp is missing.
    """
    import pyseccomp

    refused = pyseccomp.ERRNO(errno.EPERM)
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.ENOSYS))

    def add(action: int, name: str, *conditions: Any) -> None:
        # This architecture, or this libseccomp, may not know the call; then it is not allowed either.
        with suppress(OSError, ValueError, RuntimeError):
            rules.add_rule(action, name, *conditions)

    for action, names in (
        (pyseccomp.ALLOW, _ALLOWED),
        (pyseccomp.ERRNO(0), _PRETENDED),
        (pyseccomp.ERRNO(errno.ENOTSUP), _UNSUPPORTED),
        (refused, _DENIED),
    ):
        for name in names:
            add(action, name)
    _add_conditional(add, allow_threads)

    fd = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    with os.fdopen(fd, "w+b") as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _add_conditional(add: Callable[..., None], allow_threads: bool) -> None:
    """The calls that are allowed with some arguments only. `add` takes an action, a name and conditions."""
    from pyseccomp import ALLOW, EQ, MASKED_EQ, Arg

    for name, index in (("open", 1), ("openat", 2)):
        for mask, value in ((os.O_ACCMODE, os.O_WRONLY), (os.O_ACCMODE, os.O_RDWR), (os.O_ACCMODE | os.O_TRUNC, 0)):
            add(ALLOW, name, Arg(index, MASKED_EQ, mask, value))
    if allow_threads:
        shared = _CLONE_THREAD | _CLONE_FILES  # or each thread would have as many descriptors as the limit
        add(ALLOW, "clone", Arg(0, MASKED_EQ, shared, shared))
    for name, index, flag in (
        ("close_range", 2, _CLOSE_RANGE_UNSHARE),
        ("sendto", 3, _MSG_OOB),
        ("sendmsg", 2, _MSG_OOB),
        ("renameat2", 4, _RENAME_WHITEOUT),
    ):
        add(ALLOW, name, Arg(index, MASKED_EQ, flag, 0))
    for name in ("getpgid", "getsid"):  # of others, they tell who is there
        add(ALLOW, name, Arg(0, EQ, 0))
    for option in _SOCKET_OPTIONS:
        add(ALLOW, "getsockopt", Arg(1, EQ, socket.SOL_SOCKET), Arg(2, EQ, option))
    add(ALLOW, "socketpair", Arg(0, EQ, socket.AF_UNIX), Arg(1, MASKED_EQ, 0xF, socket.SOCK_STREAM))
    add(ALLOW, "prlimit64", Arg(0, EQ, 0))
    for name, index, values in (("fcntl", 1, _FCNTL), ("ioctl", 1, _IOCTL), ("prctl", 0, _PRCTL)):
        for value in values:
            add(ALLOW, name, Arg(index, EQ, value))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def no_new_privileges() -> None:
    """No later exec gives this process more rights; a filter needs it."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def load(program: bytes) -> None:
    """Put this process under the filter, for good.

    Raises:
        OSError: the kernel refused.
    """
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(_Program(len(program) // 8, program)))


def _prctl(option: int, *arguments: Any) -> None:
    values = [ctypes.c_ulong(value) if isinstance(value, int) else value for value in arguments]
    values += [ctypes.c_ulong(0)] * (4 - len(values))
    if _libc.prctl(option, *values) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
