"""A training in this very process: no Ray, one worker, the same loop. For debuggers, profilers and small machines.

The recorder gets a process of its own where it logs to MLflow, whose import and first tables would hold up the loop's first
steps for seconds.

    summary = train_inline(job, InlineRecorder(run_folder=..., run="my-run", ...))
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.managers import BaseManager
from typing import Any, cast

from raystride.pipelines.cluster.recorder_handle import RECORDER_NICENESS
from raystride.pipelines.hang.detector import HangDetector
from raystride.pipelines.hang.heartbeat import Heartbeat
from raystride.pipelines.hang.process import Process
from raystride.pipelines.hang.stack_dump import StackDump
from raystride.pipelines.hang.watch import heartbeat_every_s, keep_hang
from raystride.pipelines.profiling.stalls import stacks
from raystride.pipelines.record import Recorder
from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.sender import Receipt
from raystride.pipelines.record.state import TrainingState
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.worker.job import Job, WorkerInfo
from raystride.triton_kernels.processes import end_with_parent

RESTARTS = 3
"""Recorders that follow one whose process died."""


class InlineRecorder:
    """The recorder of an inline run, called as `RecorderHandle` is; it starts beside the training, and again if it dies."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._restarts = RESTARTS
        self._recorder = self._begin()
        self.stop_requested = self._stop.is_set
        self.request_stop = self._stop.set

    def post(self, sender: str, entries: list[Entry], recorder: str) -> Receipt:
        """Sends entries; see `record.sender.Post`."""
        return cast(Receipt, self._call("receive", sender, entries, recorder))

    def state(self) -> TrainingState:
        """The newest figures, for the progress line."""
        return cast(TrainingState, self._call("state")) if self._recorder.done() else {}

    def outline(self, status: str, summary: RunSummary | None) -> RunSummary:
        """The summary as it would be if the run ended now."""
        return cast(RunSummary, self._call("outline", status, summary))

    def finish(self, status: str, summary: RunSummary | None) -> RunSummary:
        """Ends the record and returns the summary as written."""
        return cast(RunSummary, self._call("finish", status, summary))

    def _begin(self) -> Future[Any]:
        return ThreadPoolExecutor(1, "recorder-start").submit(_start, self._arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls the recorder, or the next one where its process has died; that one knows what the journal holds."""
        asked = self._recorder
        try:
            return getattr(asked.result(), name)(*arguments)
        except (EOFError, ConnectionError):
            with self._lock:
                if self._recorder is asked:
                    if not self._restarts:
                        raise
                    self._restarts -= 1
                    self._recorder = self._begin()
            return getattr(self._recorder.result(), name)(*arguments)


class _RecorderProcess(BaseManager):
    """Holds a recorder in a process of its own, which ends with this one."""


def _build_recorder(arguments: dict[str, Any]) -> Recorder:
    """In the recorder's process: when this one is killed, that one writes what it has and ends."""
    recorder = Recorder(**arguments)
    end_with_parent(recorder.end_writing)
    return recorder


_RecorderProcess.register("Recorder", _build_recorder, exposed=("receive", "state", "outline", "finish"))


class _FreshProcess(SpawnProcess):
    """A new process that does not run the script of this one again: one without a guard would train there once more."""

    def start(self) -> None:
        main = sys.modules["__main__"]
        hidden: dict[str, Any] = {name: vars(main).pop(name) for name in ("__spec__", "__file__") if name in vars(main)}
        main.__spec__ = None
        try:
            super().start()
        finally:
            vars(main).update(hidden)


class _Fresh(SpawnContext):
    Process = _FreshProcess  # type: ignore[assignment]


def _start(arguments: dict[str, Any]) -> Any:
    """The recorder, or a stand-in that calls the one in the other process."""
    if not arguments["settings"].mlflow:
        return Recorder(**arguments)
    process = _RecorderProcess(ctx=_Fresh())
    process.start(_step_back)
    recorder = process.Recorder(arguments)  # type: ignore[attr-defined]
    recorder.process = process  # its process ends when nothing refers to it
    return recorder


def _step_back() -> None:
    """Leaves cores to the training, and Ctrl-C, which reaches every process of a terminal, to the driver."""
    os.nice(RECORDER_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def train_inline(job: Job, recorder: InlineRecorder) -> RunSummary:
    """Trains as the only worker; returns its summary. Raises what the training raises, and Hung where it hangs."""
    from raystride.pipelines.worker.worker import run_worker

    train = partial(run_worker, job, WorkerInfo(), recorder.post, recorder.stop_requested)
    hang_s = job.config.launch.hang_s
    return train() if hang_s in ("auto", 0) else _leave_if_it_hangs(train, job, recorder)


def _leave_if_it_hangs(train: Callable[[], RunSummary], job: Job, recorder: InlineRecorder) -> RunSummary:
    """Trains in a thread, which is left alone with whatever it waits for where it hangs."""
    outcome: Future[RunSummary] = Future()
    threading.Thread(target=_settle, args=(outcome, train), name="worker", daemon=True).start()
    every_s = heartbeat_every_s(job.config.launch.hang_s)
    detector, process, looks = HangDetector(job.config.launch.hang_s, every_s), Process.this(WorkerInfo(), ""), 0
    while not wait([outcome], every_s).done:
        looks += 1
        if hang := detector.look({0: Heartbeat.now(process, looks)}, time.monotonic()):
            raise keep_hang(hang, {0: StackDump(alive=True, text=stacks())}, job.folder, recorder.post)
    return outcome.result()


def _settle(outcome: Future[RunSummary], train: Callable[[], RunSummary]) -> None:
    try:
        outcome.set_result(train())
    except BaseException as error:
        outcome.set_exception(error)
