"""Folders that hostile code has filled: how much is in one, and how to remove it."""

import itertools
import os
import time
from contextlib import suppress

_MAX_PATH_CHARS = 1024


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

    A folder in it is moved up beside it first, so that no path becomes too long and nothing recurses. A process that
    is being killed may still write a last file.

    Raises:
        OSError: it could not be removed, or is still written to.
    """
    if os.path.islink(folder):
        os.unlink(folder)
    numbers, patience = itertools.count(), 100
    pending = [folder] if os.path.exists(folder) else []
    while pending:
        current = pending.pop()
        os.chmod(current, 0o700)
        with os.scandir(current) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    with suppress(OSError):  # an empty one
                        os.rmdir(entry.path)
                        continue
                    os.chmod(entry.path, 0o700)  # moving a folder writes its ".."
                    moved = f"{folder}.{next(numbers)}"
                    os.rename(entry.path, moved)
                    pending.append(moved)
                else:
                    os.unlink(entry.path)
        try:
            os.rmdir(current)
        except OSError:
            if (patience := patience - 1) < 0:
                raise
            time.sleep(0.01)
            pending.append(current)
