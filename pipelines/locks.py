"""A lock between processes that share a disk: a file that one of them holds, given back by the system when it dies.

with locked(folder / ".lock", 120, TimeoutError("another process holds it")):
    ...
"""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK_S = 0.05
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""What a network drive without locks says. Whoever meets it goes on, and has to see by itself what another one did."""


@contextmanager
def locked(path: Path, most_s: float, refusal: Exception | None = None) -> Iterator[None]:
    """Holds the lock of a file, which is made.

    Where another process keeps it for `most_s` seconds, raises `refusal`, or goes on without the lock where there is none.
    Raises OSError where the file cannot be opened.
    """
    with path.open("w") as handle:
        deadline = time.monotonic() + most_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    if refusal:
                        raise refusal from None
                    break
                time.sleep(LOOK_S)
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                break
        yield
