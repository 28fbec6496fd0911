"""Exit codes of every job, and what becomes of the errors that a user can cause: a line, and one of these codes.

sys.exit(guarded(lambda: run(settings)))
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.config import SettingError
from raystride.pipelines.credentials import MissingSecret, conceal
from raystride.pipelines.launch.failure import TrainingFailed, remedies
from raystride.pipelines.sources.faults import DataError

DONE, FAILED, WRONG_SETTINGS, CANNOT_RUN = range(4)
"""Done; the training failed; settings or data are wrong; the cluster, or a disk, cannot do it."""
DISK_REFUSES = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)
"""A storage that takes no files, before a training has begun that would say so on its own screen."""


INTERRUPTED, TERMINATED = 130, 143
"""Ended by Ctrl-C, and by SIGTERM, as shells and Kubernetes count: what waits for the job must not take it for done."""
CODE_OF_SIGNAL = {"SIGINT": INTERRUPTED, "SIGTERM": TERMINATED}


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that passes wherever Ctrl-C does."""


def interruption(number: int, reason: str = "") -> KeyboardInterrupt:
    """What a signal of this number raises."""
    return (Terminated if number == signal.SIGTERM else KeyboardInterrupt)(reason)


def sigint_is_ignored() -> bool:
    """Returns whether this process ignores Ctrl-C, as one does that `nohup`, cron or a script's `&` has started."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def guarded(job: Callable[[], int], *, own_handlers: bool = False) -> int:
    """Runs a job; what a user can cause, Ctrl-C and SIGTERM too, becomes a line and an exit code.

    A job that will not hear Ctrl-C says so first, unless it sets handlers of its own.
    """
    if sigint_is_ignored() and not own_handlers:
        print(
            f"Ctrl-C is ignored: this process was started with SIGINT ignored; `kill {os.getpid()}` stops it",
            file=sys.stderr,
        )
    try:
        with _sigterm_raises():
            return job()
    except KeyboardInterrupt as signalled:
        return _interrupted(signalled)
    except TrainingFailed as failed:  # its screen has been shown
        return _code_of(failed.cause) if isinstance(failed.cause, KeyboardInterrupt) else FAILED
    except (SettingError, DataError, MissingSecret) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_SETTINGS
    except CannotRun as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_RUN
    except OSError as error:
        conceal(error)
        if error.errno not in DISK_REFUSES:
            raise
        print("\n  try: ".join([f"error: {error}", *remedies(error)]), file=sys.stderr)
        return CANNOT_RUN
    except Exception as error:
        conceal(error)
        raise


def _code_of(signalled: KeyboardInterrupt) -> int:
    return TERMINATED if isinstance(signalled, Terminated) else INTERRUPTED


def _interrupted(signalled: KeyboardInterrupt) -> int:
    name = "SIGTERM" if isinstance(signalled, Terminated) else "Ctrl-C"
    print(f"interrupted by {name}; the same command goes on from what is done", file=sys.stderr)
    return _code_of(signalled)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Has SIGTERM pass through the job as an exception, so that it ends as it does by Ctrl-C. In the main thread alone."""

    def handle(number: int, frame: object) -> None:
        raise interruption(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
