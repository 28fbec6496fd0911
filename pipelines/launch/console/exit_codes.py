"""Exit codes of jobs; maps exceptions that a user can cause to an error line and an exit code.

sys.exit(run_with_exit_code(lambda: run(settings)))
"""

import errno
import os
import sys
from collections.abc import Callable

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.cluster.resubmission import ISOLATED_EXIT_CODE
from raystride.pipelines.launch.console.failure import TrainingFailed, describe_failure, find_remedies
from raystride.pipelines.launch.run_store.lease import DriverIsolated
from raystride.pipelines.system.credentials import MissingSecret, redact, redact_exception
from raystride.pipelines.system.errors import Unreadable
from raystride.pipelines.system.output import protected_output
from raystride.pipelines.system.signals import exit_code_of, raise_on_signals, report_interruption, sigint_is_ignored
from raystride.pipelines.system.storage.folder import FAILING_ERRNOS, UNWRITABLE_ERRNOS
from raystride.pipelines.system.storage.sealed import SealBroken

DONE, FAILED, WRONG_SETTINGS, CANNOT_RUN = range(4)
"""Success; the training failed; wrong settings or data; the cluster or a disk cannot run the job."""
MISPLACED_ERRNOS = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
"""Error numbers of a folder that lies where a file belongs, or the other way round."""
UNUSABLE_ERRNOS = (*UNWRITABLE_ERRNOS, *FAILING_ERRNOS, *MISPLACED_ERRNOS)


def run_with_exit_code(job: Callable[[], int], *, own_handlers: bool = False, what: str = "") -> int:
    """Runs a job; errors that a user can cause, and signals, become a line and an exit code. Failing output does not end it.

    `what` the job is, as `preparation`: any other error then becomes some lines with its place, and `FAILED`. If SIGINT is
    ignored, a line says so first, unless the job sets its own handlers.
    """
    with protected_output():
        return _run_with_exit_code(job, own_handlers, what)


def _run_with_exit_code(job: Callable[[], int], own_handlers: bool, what: str) -> int:
    if sigint_is_ignored() and not own_handlers:
        print(
            f"Ctrl-C is ignored: this process was started with SIGINT ignored; `kill {os.getpid()}` stops it",
            file=sys.stderr,
        )
    try:
        with raise_on_signals():
            return job()
    except KeyboardInterrupt as signalled:
        return report_interruption(signalled)
    except TrainingFailed as failed:  # its screen was already shown
        if isinstance(failed.cause, SettingError | DataError):  # only workers could find it out
            return WRONG_SETTINGS
        if isinstance(failed.cause, SealBroken) or getattr(failed.cause, "errno", None) in UNUSABLE_ERRNOS:
            return CANNOT_RUN
        return exit_code_of(failed.cause) if isinstance(failed.cause, KeyboardInterrupt) else FAILED
    except (SettingError, DataError, MissingSecret) as error:
        return _report(error, WRONG_SETTINGS)
    except DriverIsolated as error:  # this code counts as a lost driver, so the job is resubmitted
        return _report(error, ISOLATED_EXIT_CODE)
    except (CannotRun, SealBroken, Unreadable) as error:
        return _report(error, CANNOT_RUN)
    except OSError as error:
        redact_exception(error)
        if error.errno not in UNUSABLE_ERRNOS:
            return _report_defect(error, what)
        print("\n  try: ".join([f"error: {error}", *find_remedies(error)]), file=sys.stderr)
        return CANNOT_RUN
    except Exception as error:
        return _report_defect(error, what)


def _report(error: Exception, code: int) -> int:
    """Prints an error, without secrets, and returns the exit code."""
    print(f"error: {redact(str(error))}", file=sys.stderr)
    return code


def _report_defect(error: Exception, what: str) -> int:
    """Prints what failed, why and where; raises the error if it is not said what."""
    if not what:
        redact_exception(error)
        raise error
    print(describe_failure(what, error), file=sys.stderr)
    return FAILED
