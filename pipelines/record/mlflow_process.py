"""MLflow's client in a process of its own, which computes while nobody else wants the cores.

Importing MLflow and making its first tables take seconds of a core. Threads of a training wait for one another, so on a
machine without idle cores a tenth of a core taken from one of them is a tenth of the training (measured: 0.87 of a run's
speed on two cores). The scheduler's idle policy (sched(7), SCHED_IDLE) takes what is left over; a call that has waited long,
and the end of a run, come forward. Where a process may not come forward again, it only steps back (nice).

    log = MlflowProcess(MlflowLog.at(run_folder, "my-run", Record(), storage))
    follower = Follower(run_folder, log, warn=print)
    ...; log.come_forward(); follower.finish("finished", timeout_s=20.0); log.close()
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.journal import Segment
from raystride.pipelines.record.mlflow_log import MlflowLog, load_mlflow
from raystride.triton_kernels.processes import end_with_parent, fresh_context

PATIENCE_S = 60.0
"""How long a call waits for idle cores before its process comes forward: on a full machine MLflow is so far behind."""
NICENESS = 10


class MlflowFailed(RuntimeError):
    """A call to MLflow failed in its process; the message names the error."""


class MlflowProcess:
    """Called as an `MlflowLog` is, from one thread; the process starts with the first call, and anew where it has died.

    Calls raise MlflowFailed, also where the process dies meanwhile.
    """

    def __init__(self, log: MlflowLog) -> None:
        self._log = log
        self._process: BaseProcess | None = None
        self._wire: Connection | None = None
        self._forward = self._closed = self._loaded = False

    @property
    def reference(self) -> dict[str, Any]:
        """What `mlflow.json` holds, as known here."""
        return self._log.reference

    @property
    def run_id(self) -> str | None:
        """The MLflow run's id, None before it was made."""
        return self._log.run_id

    @property
    def public_uri(self) -> str:
        """The tracking URI without credentials."""
        return self._log.public_uri

    @property
    def link(self) -> str | None:
        """The run's page on its server; see MlflowLog."""
        return self._log.link

    @property
    def waits_for_this_machine(self) -> bool:
        """Whether nothing but this machine's load delays an answer: MLflow is not imported yet, or writes to a file here."""
        return not self._loaded or self._log.uri.startswith("sqlite:")

    def connect(self) -> None:
        """Makes or reopens the run where that has not been done."""
        self._call("load")
        self._loaded = True
        self._call("open")

    def disconnect(self) -> None:
        """Has the next call connect anew."""
        with suppress(MlflowFailed):
            if self._wire is not None:
                self._call("disconnect")

    def log(self, entries: list[Entry]) -> list[str]:
        """Logs entries; what could not be logged and never will, as sentences."""
        problems: list[str] = self._call("log", entries)
        return problems

    def note(self, logged: list[Segment]) -> None:
        """Keeps in the run's folder that MLflow has these segments."""
        self._call("note", logged)

    def finish(self, status: str, ended_at: float) -> None:
        """Logs the usual files and ends the run."""
        self._call("finish", status, ended_at)

    def come_forward(self) -> None:
        """Has the process compute like any other from now on; from any thread."""
        self._forward = True
        self._push()

    def close(self) -> None:
        """Ends the process, whatever it does; calls raise MlflowFailed from now on. From any thread."""
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
        wire = self._wire or self._start()
        try:
            wire.send((name, arguments))
            if not wire.poll(PATIENCE_S):
                self._push()
            result, error, self._log.reference = wire.recv()
        except (EOFError, OSError):
            self._end_process()
            raise MlflowFailed("the process of MLflow's client was ended; another one follows") from None
        if error is not None:
            raise MlflowFailed(error)
        return result

    def _start(self) -> Connection:
        context = fresh_context()
        ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._log), name="mlflow", daemon=True)
        self._process.start()
        theirs.close()  # so that the end of the process is the end of the wire
        self._wire = ours
        if self._forward:
            self._push()
        return ours

    def _push(self) -> None:
        if (process := self._process) is not None and process.pid is not None:
            _come_forward(process.pid)


def _serve(wire: Connection, log: MlflowLog) -> None:
    """Answers calls until the one that asks is gone."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they reach every process of a terminal; the run's end is told
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    _step_back()
    while True:
        try:
            name, arguments = wire.recv()
        except (EOFError, OSError):
            return
        result = error = None
        try:
            if name == "load":
                load_mlflow()
            elif name == "open":
                log.connect()
            else:
                result = getattr(log, name)(*arguments)
        except Exception as raised:  # MLflow, its database and its server raise whatever they like
            error = f"{type(raised).__name__}: {raised}"
        wire.send((result, error, log.reference))


def _step_back() -> None:
    """Leaves the cores to whoever wants them."""
    if _may_return():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(NICENESS)


@cache
def _may_return() -> bool:
    """Whether a thread of this process may leave the idle policy again: without privileges, RLIMIT_NICE decides. Tried."""
    if not hasattr(os, "SCHED_IDLE"):
        return False
    tried = []

    def go_and_return() -> None:
        try:
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                os.sched_setscheduler(0, policy, os.sched_param(0))
            tried.append(True)
        except OSError:
            pass

    # In a thread of its own, which alone stays behind where there is no way back.
    thread = threading.Thread(target=go_and_return)
    thread.start()
    thread.join()
    return bool(tried)


def _come_forward(process: int) -> None:
    """Has all threads of a process of ours leave the idle policy, where they are in it."""
    for thread in _threads(process):
        with suppress(OSError):  # it has ended
            if os.sched_getscheduler(thread) == os.SCHED_IDLE:
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))


def _threads(process: int) -> Iterator[int]:
    with suppress(OSError):  # no such folder: another system than Linux, or a process that has ended
        yield from map(int, os.listdir(f"/proc/{process}/task"))
