"""Low-priority process for MLflow's client, which runs only on idle cores.

Importing MLflow and creating its first tables take seconds of a core. Threads of a training wait for one another, so on a
machine without idle cores, a tenth of a core taken from one thread slows the training by a tenth (measured: 0.87 of a run's
speed on two cores). The scheduler's idle policy (sched(7), SCHED_IDLE) uses only idle time. A call that has waited long, and
the end of a run, raise the priority. If a process may not leave that policy again, it is niced instead.

    log = MlflowProcess(MlflowLog.for_run(run_folder, "my-run", RecordConfig(), storage))
    follower = Follower(run_folder, log, warn=print)
    ...; log.raise_priority(); follower.finish("finished", timeout_s=20.0); log.close()
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.journal import Segment
from raystride.pipelines.observability.record.mlflow.log import MlflowLog, load_mlflow
from raystride.triton_kernels.processes import end_with_parent, fresh_context

PATIENCE_S = 60.0
"""Seconds that a call waits for idle cores before its priority is raised: the delay of MLflow on a busy machine."""
NICENESS = 10


class MlflowFailed(RuntimeError):
    """A call to MLflow failed in its process; the message names the error."""


class MlflowProcess:
    """Proxy of an `MlflowLog` in another process, for one thread. The first call starts the process, or restarts a dead one.

    Calls raise MlflowFailed, also if the process dies meanwhile.
    """

    def __init__(self, log: MlflowLog) -> None:
        self._log = log
        self._process: BaseProcess | None = None
        self._wire: Connection | None = None
        self._has_priority = self._closed = self._loaded = False

    @property
    def reference(self) -> dict[str, Any]:
        """Content of `mlflow.json`, as of the last call."""
        return self._log.reference

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None before it is created."""
        return self._log.run_id

    @property
    def public_uri(self) -> str:
        """The tracking URI without credentials."""
        return self._log.public_uri

    @property
    def link(self) -> str | None:
        """Link of the run's page on its server; see MlflowLog."""
        return self._log.link

    @property
    def is_waiting_for_local_machine(self) -> bool:
        """Whether only this machine's load delays an answer: MLflow is not imported yet, or writes to a local file."""
        return not self._loaded or self._log.uri.startswith("sqlite:")

    def connect(self) -> None:
        """Creates or reopens the run unless that is done already."""
        self._call("load")
        self._loaded = True
        self._call("open")

    def disconnect(self) -> None:
        """Makes the next call connect again."""
        with suppress(MlflowFailed):
            if self._wire is not None:
                self._call("disconnect")

    def log(self, entries: list[Entry]) -> list[str]:
        """Logs entries; returns permanent failures as sentences."""
        problems: list[str] = self._call("log", entries)
        return problems

    def save_mark(self, logged: list[Segment]) -> None:
        """Records in `mlflow.json` that MLflow has these segments."""
        self._call("save_mark", logged)

    def end_run(self, status: str, ended_at: float) -> None:
        """Logs the usual files and ends the run."""
        self._call("end_run", status, ended_at)

    def raise_priority(self) -> None:
        """Gives the process normal priority from now on. Thread-safe."""
        self._has_priority = True
        self._raise_priority()

    def close(self) -> None:
        """Kills the process; later calls raise MlflowFailed. Thread-safe."""
        self._closed = True
        self._end_process()

    def _end_process(self) -> None:
        self._wire = None
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        if self._closed:
            raise MlflowFailed("the process of MLflow's client was ended")
        wire = self._wire or self._start_process()
        try:
            wire.send((name, arguments))
            if not wire.poll(PATIENCE_S):
                self._raise_priority()
            result, error, self._log.reference = wire.recv()
        except (EOFError, OSError):
            self._end_process()
            raise MlflowFailed("the process of MLflow's client was ended; another one follows") from None
        if error is not None:
            raise MlflowFailed(error)
        return result

    def _start_process(self) -> Connection:
        context = fresh_context()
        own_end, child_end = context.Pipe()
        self._process = context.Process(target=_serve_calls, args=(child_end, self._log), name="mlflow", daemon=True)
        self._process.start()
        child_end.close()  # so that the end of the process closes the pipe
        self._wire = own_end
        if not self._has_priority and self._process.pid is not None:
            _lower_priority(self._process.pid)
        if self._has_priority:  # meanwhile, by another thread
            self._raise_priority()
        return own_end

    def _raise_priority(self) -> None:
        if (process := self._process) is not None and process.pid is not None:
            raise_priority(process.pid, os.getpriority(os.PRIO_PROCESS, 0))


def _serve_calls(wire: Connection, log: MlflowLog) -> None:
    """Answers calls until the calling process is gone."""
    for number in (signal.SIGINT, signal.SIGHUP):  # every process of a terminal gets them; the run's end comes as a call
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    while True:
        try:
            name, arguments = wire.recv()
        except (EOFError, OSError):
            return
        result = error = None
        try:
            if name == "load":
                with _hide_packages("pandas", "numpy", "pyarrow"):
                    load_mlflow()
            elif name == "open":
                log.connect()
            else:
                result = getattr(log, name)(*arguments)
        except Exception as failure:  # MLflow, its database and its server raise errors of any type
            error = f"{type(failure).__name__}: {failure}"
        wire.send((result, error, log.reference))


@contextmanager
def _hide_packages(*packages: str) -> Iterator[None]:
    """Makes imports of packages fail in the block, unless they were imported before.

    MLflow imports these for tables, of which there are none here: 80 MiB, and a second of a core. Without them it does what
    mlflow-skinny does. Storages that are not local need pyarrow later.
    """
    hidden = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _lower_priority(process: int) -> None:
    """Gives a process that has just begun, and the threads that it will start, the idle policy, or else a high niceness.

    The caller does it, not the process itself, which could do it after the caller has raised its priority.
    """
    with suppress(OSError):  # it has ended
        if _can_leave_idle_policy():
            os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.setpriority(os.PRIO_PROCESS, process, os.getpriority(os.PRIO_PROCESS, process) + NICENESS)


@cache
def _can_leave_idle_policy() -> bool:
    """Tries whether a thread of this process may leave the idle policy again; without privileges RLIMIT_NICE decides."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    round_trips = []

    def try_round_trip() -> None:
        try:
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                os.sched_setscheduler(0, policy, os.sched_param(0))
            round_trips.append(True)
        except OSError:
            pass

    # In its own thread: if it may not leave the policy, only that thread keeps it.
    thread = threading.Thread(target=try_round_trip)
    thread.start()
    thread.join()
    return bool(round_trips)


def raise_priority(process: int, niceness: int) -> None:
    """Takes all threads of an own process out of the idle policy and sets their niceness, as far as this user may."""
    for thread in _thread_ids(process):
        with suppress(OSError):  # it has ended
            if hasattr(os, "SCHED_IDLE") and os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        with suppress(OSError):  # without privileges niceness only grows
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def _thread_ids(process: int) -> Iterator[int]:
    with suppress(OSError):  # no such folder: another system than Linux, or a process that has ended
        yield from map(int, os.listdir(f"/proc/{process}/task"))
