"""Landlock: the files that a process may touch, held by the kernel without any privilege (Linux 5.13 and later).

Three system calls that have not changed since; no binding on PyPI is widely kept. All rights that the kernel knows are
handled, so what no rule allows is denied. Landlock does not govern chmod, chown, utime, xattrs and stat; the system
call filter does. See the kernel's Documentation/userspace-api/landlock.rst.
"""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # of later ABIs: 16

_READ = _READ_FILE | _READ_DIR
_OWN = _READ | _WRITE_FILE | _TRUNCATE | _MAKE_REG | _MAKE_DIR | _MAKE_SYM | _REMOVE_FILE | _REMOVE_DIR | _REFER

_NULL = os.makedev(1, 3)  # /dev/null

_libc = ctypes.CDLL(None, use_errno=True)


def abi_version() -> int:
    """The kernel's Landlock ABI, 0 where there is none (or a container's filter denies it)."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_VERSION))))


class Ruleset:
    """What any process of a fork server may read; each adds a folder of its own.

    Args:
        readable: folders and files. Those that do not exist are left out.
    """

    def __init__(self, readable: Iterable[str]) -> None:
        self._abi = abi_version()
        self._rights = (1 << _NUM_FILE_RIGHTS.get(self._abi, 16)) - 1
        attributes = struct.pack("<Q", self._rights)
        if self._abi >= 4:
            attributes += struct.pack("<Q", 0b11)  # TCP: bind, connect
        if self._abi >= 6:
            attributes += struct.pack("<Q", 0b11)  # abstract Unix sockets and signals outside
        self._attributes = attributes
        self._readable = [os.open(path, os.O_PATH | os.O_CLOEXEC) for path in readable if os.path.exists(path)]

    def restrict_self(self, own_folder: str) -> None:
        """Confine this process, for good, to the readable files and to `own_folder`.

        Raises:
            OSError: the kernel refused.
        """
        fd = _call(_CREATE_RULESET, self._attributes, ctypes.c_size_t(len(self._attributes)), ctypes.c_uint32(0))
        for path_fd in self._readable:
            self._allow(fd, path_fd, _rights_of(os.fstat(path_fd)))
        self._allow(fd, os.open(own_folder, os.O_PATH | os.O_CLOEXEC), _OWN)
        _call(_RESTRICT_SELF, ctypes.c_int(fd), ctypes.c_uint32(0))
        os.close(fd)

    def _allow(self, ruleset_fd: int, path_fd: int, rights: int) -> None:
        rule = struct.pack("<Qi", rights & self._rights, path_fd)  # packed in the kernel's header as well
        _call(_ADD_RULE, ctypes.c_int(ruleset_fd), ctypes.c_int(_RULE_PATH_BENEATH), rule, ctypes.c_uint32(0))


def _rights_of(found: os.stat_result) -> int:
    if found.st_rdev == _NULL:
        return _READ_FILE | _WRITE_FILE | _TRUNCATE  # libraries silence themselves with it
    return _READ if stat.S_ISDIR(found.st_mode) else _READ_FILE


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(number, *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"Landlock: {os.strerror(code)}")
    return result
