"""A training in this very process: no Ray, one worker, the same loop. For debuggers, profilers and small machines.

summary = train_inline(job, InlineRecorder(run_folder=..., run="my-run", ...))
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from typing import Any

from raystride.pipelines.hang.detector import HangDetector
from raystride.pipelines.hang.heartbeat import Heartbeat
from raystride.pipelines.hang.process import Process
from raystride.pipelines.hang.stack_dump import StackDump
from raystride.pipelines.hang.watch import heartbeat_every_s, keep_hang
from raystride.pipelines.profiling.stalls import stacks
from raystride.pipelines.record import Recorder
from raystride.pipelines.record.summary import RunSummary
from raystride.pipelines.worker.job import Job, WorkerInfo


class InlineRecorder(Recorder):
    """The recorder of an inline run, in this process, called as `RecorderHandle` is."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        stop = threading.Event()
        self.stop_requested, self.request_stop = stop.is_set, stop.set
        self.post = self.receive


def train_inline(job: Job, recorder: InlineRecorder) -> RunSummary:
    """Trains as the only worker; returns its summary. Raises what the training raises, and Hung where it hangs."""
    from raystride.pipelines.worker.worker import run_worker

    def train() -> RunSummary:
        with getattr(job.strategy, "taking_part", nullcontext)():
            return run_worker(job, WorkerInfo(), recorder.post, recorder.stop_requested)

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
