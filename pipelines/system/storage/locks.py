"""A file lock between processes that share a disk; the system releases it when its holder dies.

with file_lock(folder / ".lock", 120, TimeoutError("another process holds it")):
    ...
"""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.05
UNSUPPORTED_ERRNOS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a network drive without locks. The caller then runs unlocked, and has to handle others' changes itself."""


@contextmanager
def file_lock(path: Path, timeout_s: float, timeout_error: Exception | None = None) -> Iterator[None]:
    """Creates a file and holds an exclusive lock on it.

    If another process holds it for `timeout_s` seconds, raises `timeout_error`, or continues without the lock if that is
    None. Raises OSError if the file cannot be opened.
    """
    with path.open("w") as handle:
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
