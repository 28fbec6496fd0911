"""A file lock between processes that share a disk; the system releases it when its holder dies.

with file_lock(folder / ".lock", 120, TimeoutError("another process holds it")):
    ...
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

POLL_S = 0.05
UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a network drive without locks. The caller then runs unlocked, and has to handle others' changes itself."""


@contextmanager
def file_lock(path: Path, timeout_s: float, timeout_error: Exception | None = None) -> Iterator[None]:
    """Creates a file, for all who may write in its folder, and holds an exclusive lock on it.

    If another process holds it for `timeout_s` seconds, raises `timeout_error`, or continues without the lock if that is
    None. Raises OSError if the file cannot be opened.
    """
    with _open_shared(path) as handle:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    if timeout_error:
                        raise timeout_error from None
                    break
                time.sleep(POLL_S)
            except OSError as error:
                if error.errno not in UNSUPPORTED_ERRNOS:
                    raise
                break
        yield


def _open_shared(path: Path) -> IO[str]:
    """Opens a lock's file; for reading, which a local lock does with, if another user's version did not share it."""
    is_new = not path.exists()
    try:
        handle = path.open("a")
    except PermissionError:
        if is_new:
            raise
        return path.open()
    if is_new:
        share_with_group(path)
    return handle


def share_with_group(path: Path) -> None:
    """Gives a file or folder the group of its folder, and lets the group write if it may write there.

    So does git's core.sharedRepository. Does nothing for what another user owns.
    """
    folder = path.parent.stat()
    if not folder.st_mode & stat.S_IWGRP:
        return
    with suppress(PermissionError):
        if path.stat().st_gid != folder.st_gid:
            os.chown(path, -1, folder.st_gid)
        mode = path.stat().st_mode
        inherited = folder.st_mode & stat.S_ISGID if path.is_dir() else 0
        os.chmod(path, stat.S_IMODE(mode) | (folder.st_mode & (stat.S_IRWXG if path.is_dir() else 0o060)) | inherited)
