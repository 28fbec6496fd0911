"""A file lock between processes that share a disk; the system releases it when its holder dies.

Who may write a folder may hold its locks, and nobody else: whoever can open a lock's file could hold it for ever.

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
    with _open_for_members(path) as handle:
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


def _open_for_members(path: Path) -> IO[bytes]:
    """Opens a lock's file, made if it is missing; its group and mode are those of writers to its folder."""
    try:
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as error:
        remedy = "have its owner give the folder's group `chmod g+w` for the folder and this file, or name another storage"
        raise PermissionError(error.errno, f"who may not write here cannot hold its lock: {remedy}", str(path)) from None
    handle = os.fdopen(opened, "r+b", buffering=0)
    folder, own = path.parent.stat(), os.fstat(opened)
    with suppress(OSError):  # its owner is no member of that group
        if own.st_gid != folder.st_gid:
            os.fchown(opened, -1, folder.st_gid)
    is_shared = folder.st_mode & 0o020 and os.fstat(opened).st_gid == folder.st_gid
    mode = 0o600 | (0o060 if is_shared else 0) | (0o006 if folder.st_mode & 0o002 else 0)
    with suppress(OSError):  # another member's file, which is as it should be, or a drive without modes
        if own.st_mode & 0o777 != mode:
            os.fchmod(opened, mode)
    return handle


def share_with_group(path: Path) -> None:
    """Gives a file or folder the group of its folder, and lets the group write if it may write there.

    So does git's core.sharedRepository. Does nothing for what another user owns, and in a folder for all, as /tmp is.
    """
    with suppress(OSError):  # or a drive without modes
        folder, own = path.parent.stat(), path.stat()
        if not folder.st_mode & stat.S_IWGRP or folder.st_mode & stat.S_ISVTX:
            return
        if own.st_gid != folder.st_gid:
            os.chown(path, -1, folder.st_gid)
        granted = stat.S_IRWXG | stat.S_ISGID if stat.S_ISDIR(own.st_mode) else 0o060
        os.chmod(path, stat.S_IMODE(own.st_mode) | folder.st_mode & granted)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing, each shared with the group of the one above. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    share_with_group(folder)
