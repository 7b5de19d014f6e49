"""Runs a command on a kernel that lacks one layer of the sandbox: an outer filter answers in its place.

python without_layer.py landlock|seccomp|limits COMMAND ...
"""

import errno
import os
import sys

import pyseccomp
from pyseccomp import ERRNO, NE, Arg

_LANDLOCK_CREATE_RULESET = 444
_PR_SET_SECCOMP = 22


def take_away(layer: str) -> None:
    rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    if layer == "landlock":  # as a kernel before 5.13 does
        rules.add_rule(ERRNO(errno.ENOSYS), _LANDLOCK_CREATE_RULESET)
    elif layer == "seccomp":  # as a kernel that was built without it does
        rules.add_rule(ERRNO(errno.EINVAL), "prctl", Arg(0, pyseccomp.EQ, _PR_SET_SECCOMP))
        rules.add_rule(ERRNO(errno.EINVAL), "seccomp")
    elif layer == "limits":  # claims success and does nothing, as no kernel does
        rules.add_rule(ERRNO(0), "prlimit64", Arg(2, NE, 0))
        rules.add_rule(ERRNO(0), "setrlimit")
    else:
        sys.exit(f"no layer {layer!r}")
    rules.load()


if __name__ == "__main__":
    take_away(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])
