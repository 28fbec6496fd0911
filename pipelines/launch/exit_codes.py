"""Exit codes of every job, and what becomes of the errors that a user can cause: a line, and one of these codes.

sys.exit(guarded(lambda: run(settings)))
"""

import errno
import os
import sys
from collections.abc import Callable

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.cluster.resubmission import ISOLATED
from raystride.pipelines.config import SettingError
from raystride.pipelines.credentials import MissingSecret, conceal
from raystride.pipelines.launch.failure import TrainingFailed, remedies
from raystride.pipelines.launch.owner import Isolated
from raystride.pipelines.output import protected_output
from raystride.pipelines.signals import code_of, report_interruption, sigint_is_ignored, signals_raise
from raystride.pipelines.sources.faults import DataError

DONE, FAILED, WRONG_SETTINGS, CANNOT_RUN = range(4)
"""Done; the training failed; settings or data are wrong; the cluster, or a disk, cannot do it."""
DISK_REFUSES = (errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM)
"""A storage that takes no files, before a training has begun that would say so on its own screen."""


def guarded(job: Callable[[], int], *, own_handlers: bool = False) -> int:
    """Runs a job; what a user can cause, signals too, becomes a line and an exit code. Output that fails ends nothing.

    A job that will not hear Ctrl-C says so first, unless it sets handlers of its own.
    """
    with protected_output():
        return _guarded(job, own_handlers)


def _guarded(job: Callable[[], int], own_handlers: bool) -> int:
    if sigint_is_ignored() and not own_handlers:
        print(
            f"Ctrl-C is ignored: this process was started with SIGINT ignored; `kill {os.getpid()}` stops it",
            file=sys.stderr,
        )
    try:
        with signals_raise():
            return job()
    except KeyboardInterrupt as signalled:
        return report_interruption(signalled)
    except TrainingFailed as failed:  # its screen has been shown
        return code_of(failed.cause) if isinstance(failed.cause, KeyboardInterrupt) else FAILED
    except (SettingError, DataError, MissingSecret) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_SETTINGS
    except Isolated as error:  # which counts as a loss, after which the job is submitted again
        print(f"error: {error}", file=sys.stderr)
        return ISOLATED
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
