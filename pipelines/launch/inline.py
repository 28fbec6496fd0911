"""Trains in this process without Ray: one worker, the same loop. For debuggers, profilers and small machines.

summary = train_inline(job, InlineRecorder(run_folder=..., run="my-run", ...))
"""

import faulthandler
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from typing import Any

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.launch.hang.detector import HangDetector, Hung
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.launch.hang.process import Process
from raystride.pipelines.launch.hang.stack_dump import StackDump
from raystride.pipelines.launch.hang.watch import heartbeat_interval_s, save_hang_report
from raystride.pipelines.observability.profiling.stalls import format_stacks
from raystride.pipelines.observability.record import Recorder
from raystride.pipelines.observability.record.summary import RunSummary
from raystride.pipelines.system.heap import release_freed_memory
from raystride.pipelines.train.worker.job import Job, WorkerInfo

LEAVE_S = 5.0
"""Seconds that the interpreter's exit may take after an inline training hung."""


class InlineRecorder(Recorder):
    """Recorder in this process for an inline run, with the interface of `RecorderHandle`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        stop = threading.Event()
        self.stop_requested, self.request_stop = stop.is_set, stop.set
        self.post = self.receive


def train_inline(job: Job, recorder: InlineRecorder) -> RunSummary:
    """Trains as the only worker; returns its summary. Raises the errors of the training, and Hung if it hangs."""
    from raystride.pipelines.train.worker.run import run_worker

    def train() -> RunSummary:
        # Trainings that share a model are in threads of one process, whose settings are kept around all of them.
        kept = nullcontext() if job.strategy else process_settings_kept()
        with kept, getattr(job.strategy, "participate", nullcontext)():
            return run_worker(job, WorkerInfo(), recorder.post, recorder.stop_requested)

    hang_s = job.config.launch.hang_s
    return train() if hang_s in ("auto", 0) else _train_with_hang_detector(train, job, recorder)


@contextmanager
def process_settings_kept() -> Iterator[None]:
    """Leaves PyTorch's threads, precision and determinism, the choice of kernels, and all random generators, as the caller's
    process had them.

    Memory that was kept for the next step goes back to the system.
    """
    import numpy as np
    import torch

    from raystride.triton_kernels.dispatch import choice_kept

    generators, threads = (random.getstate(), np.random.get_state()), torch.get_num_threads()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    tf32 = matmul.allow_tf32, cudnn.allow_tf32
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with choice_kept(), torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
        torch.set_num_threads(threads)
        matmul.allow_tf32, cudnn.allow_tf32 = tf32
        release_freed_memory()
        if torch.are_deterministic_algorithms_enabled() != deterministic[0]:  # the call imports the compiler
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])


def _train_with_hang_detector(train: Callable[[], RunSummary], job: Job, recorder: InlineRecorder) -> RunSummary:
    """Trains in a thread, which is abandoned if it hangs."""
    outcome: Future[RunSummary] = Future()
    threading.Thread(target=_set_outcome, args=(outcome, train), name="worker", daemon=True).start()
    every_s = heartbeat_interval_s(job.config.launch.hang_s)
    detector, process, num_checks = HangDetector(job.config.launch.hang_s, every_s), Process.current(WorkerInfo(), ""), 0
    while not wait([outcome], every_s).done:
        num_checks += 1
        if hang := detector.check({0: Heartbeat.capture(process, num_checks)}, time.monotonic()):
            raise save_hang_report(hang, {0: StackDump(alive=True, text=format_stacks())}, job.folder, recorder.post)
    return outcome.result()


def _set_outcome(outcome: Future[RunSummary], train: Callable[[], RunSummary]) -> None:
    try:
        outcome.set_result(train())
    except BaseException as error:
        outcome.set_exception(error)


@contextmanager
def exit_despite_hang(launch: LaunchConfig) -> Iterator[None]:
    """Limits the interpreter's exit to `LEAVE_S` seconds if the training in the block is inline and hangs."""
    try:
        yield
    except TrainingFailed as failed:
        if isinstance(failed.cause, Hung) and launch.mode == "inline":
            # The hung call may block the interpreter's exit too. This watchdog is a native thread, and exits with 1.
            faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        raise
