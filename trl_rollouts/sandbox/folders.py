"""Folders that hostile code fills: whose one is, how much is in it, and how to remove it."""

import fcntl
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from uuid import uuid4

CANARY = "canary"
"""The file that is locked; world-readable, and no session must be able to read it."""

_FRESH_S = 60.0
_MAX_PATH_CHARS = 1024


def make_owned(parent: str, prefix: str) -> tuple[str, int]:
    """A new folder, which is this process's as long as the returned descriptor of its lock is open.

    Folders of processes that were killed before they could remove them are removed.
    """
    for name in os.listdir(parent):
        if name.startswith(prefix):
            _remove_orphan(os.path.join(parent, name))
    folder = tempfile.mkdtemp(prefix=prefix, dir=parent)
    os.chmod(folder, 0o711)  # sessions of other users pass through
    lock_fd = os.open(os.path.join(folder, CANARY), os.O_RDWR | os.O_CREAT, 0o644)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    return folder, lock_fd


def _remove_orphan(folder: str) -> None:
    with suppress(OSError):  # no lock in it, or its process lives, or another one removes it
        found = os.lstat(folder)
        is_fresh = time.time() < found.st_mtime + _FRESH_S  # not locked yet, or about to remove itself
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or is_fresh:
            return
        lock_fd = os.open(os.path.join(folder, CANARY), os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(folder)
        finally:
            os.close(lock_fd)


def usage(folder: str, *, max_entries: int) -> tuple[int, int]:
    """Entries and bytes below `folder`, links not followed. Counting stops at `max_entries`.

    A folder that cannot be counted, or not in reasonable time, has as many.
    """
    num_entries = num_bytes = 0
    pending = [folder]
    while pending:
        current = pending.pop()
        if len(current) > len(folder) + _MAX_PATH_CHARS:  # to walk down a path takes time with each step
            return max_entries, num_bytes
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    num_entries += 1
                    if num_entries >= max_entries:
                        return num_entries, num_bytes
                    with suppress(FileNotFoundError):
                        num_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:  # without the right to list it
            return max_entries, num_bytes
    return num_entries, num_bytes


def remove(folder: str) -> None:
    """Remove `folder` and all below it, where it exists. Follows no link, at any depth.

    A folder deep in it is moved up first, so that no path becomes too long and nothing recurses. A process that is
    being killed may still write a last file. The lock goes last: what could not be removed is still an orphan's.

    Raises:
        OSError: it could not be removed, or is still written to.
    """
    if os.path.islink(folder):
        os.unlink(folder)
    moved, patience = (os.path.join(folder, f"{uuid4().hex}-{number}") for number in itertools.count()), 100
    pending = [folder] if os.path.exists(folder) else []
    while pending:
        current = pending.pop()
        is_top = current == folder
        pending += _emptied(current, None if is_top else moved)
        if is_top and pending:
            pending.insert(0, folder)
            continue
        try:
            if is_top:
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, CANARY))
            os.rmdir(current)
        except OSError:
            if (patience := patience - 1) < 0:
                raise
            time.sleep(0.01)
            pending.append(current)


def _emptied(folder: str, moved: Iterator[str] | None) -> list[str]:
    """Remove the files in `folder`, and return its folders that are not empty, moved to the names if there are any."""
    left = []
    os.chmod(folder, 0o700)
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if not entry.is_dir(follow_symlinks=False):
                if moved is not None or entry.name != CANARY:
                    os.unlink(entry.path)
                continue
            with suppress(OSError):  # an empty one
                os.rmdir(entry.path)
                continue
            os.chmod(entry.path, 0o700)  # moving a folder writes its ".."
            left.append(entry.path if moved is None else next(moved))
            if moved is not None:
                os.rename(entry.path, left[-1])
    return left
