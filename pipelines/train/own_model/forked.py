"""Code of users that reads data, in a copy of this process: what it changes in memory, and how it ends, stays there.

call_forked(lambda: [dataset[0]])                         # whatever `dataset` does to the arrays
"""

import multiprocessing
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch

from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.train.own_model.definition import describe_error
from raystride.triton_kernels.processes import end_with_parent

T = TypeVar("T")


def start_forked(work: Callable[..., None], *arguments: Any) -> tuple[BaseProcess, Connection]:
    """Starts `work(connection, *arguments)` in a copy of this process; returns it and this end of the connection."""
    # Forked, as PyTorch's DataLoader does: a dataset need not be picklable, and its memory is shared.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_begin, args=(work, theirs, ours, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _begin(work: Callable[..., None], connection: Connection, parents: Connection, *arguments: Any) -> None:
    parents.close()
    # The training's handlers, which this process has from it, would make it outlive the end of a script.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches it too, and the training still needs it
    end_with_parent()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    work(connection, *arguments)


def call_forked(function: Callable[[], T]) -> T:
    """Returns what a function returns in a copy of this process. Raises its DataError or SettingError, and DataError for
    another error, for a result that cannot be pickled, and if the process ends."""
    process, connection = start_forked(_answer_once, function)
    try:
        answer = pickle.loads(connection.recv_bytes())  # from our own child  # noqa: S301
    except (EOFError, OSError) as error:
        raise describe_end(process) from error
    except BaseException:  # Ctrl-C
        process.terminate()
        raise
    finally:
        connection.close()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer  # type: ignore[no-any-return]


def _answer_once(connection: Connection, function: Callable[[], Any]) -> None:
    try:
        answer = pickle.dumps(function(), protocol=5)
    except BaseException as error:  # SystemExit, too: it is the cause that the caller needs
        answer = pickle.dumps(as_data_error(error))
    connection.send_bytes(answer)


def as_data_error(error: BaseException) -> Exception:
    """Returns an error as one that can be sent, and that a training shows."""
    if isinstance(error, DataError | SettingError):
        return error
    if isinstance(error, Exception):
        return DataError(f"a batch of data cannot be sent: {error!r}")
    return DataError(f"reading data raised {describe_error(error)}")


def describe_end(process: BaseProcess) -> DataError:
    """Returns the error for a process that has ended without an answer."""
    process.join(1.0)
    return DataError(
        f"the process that reads data has ended with code {process.exitcode}: -9 is a lack of memory, -11 a fault in a "
        "library that data uses"
    )
