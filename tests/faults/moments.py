"""Workers that a signal hits at a chosen moment of a step or of a save. Real processes; the signal is the victim's own.

What waits for the moment lies in the victim's process alone, and is Python's or PyTorch's: a global module hook, a hook on a
gradient, a first bucket that is on its way while others wait, an audit hook on the system calls of a checkpoint.

    group = Group(job, 3, folder, Blow("backward", step=6, victim=1))
    group.codes() == [1, -9, 1]
    group.errors()[0]                                         # what rank 0 raised, with its traceback
    outcome = finish(job, 2, folder)                          # the run goes on, on two workers
"""

import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from raystride.pipelines.config import CheckpointConfig, ScalingConfig, TrainConfig, ValidationConfig
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.faults.schedules import CONTEXT, exact_job
from tests.receipts import accept
from tests.waiting import wait_until

LIMIT_S = 270.0
Moment = Literal["between steps", "forward", "backward", "reduction", "data", "manifest", "hint", "pruning"]
SYSTEM_CALLS: dict[str, tuple[str, str]] = {
    "data": ("os.rename", r"step-{step:08d}/{attempt}-\w+/rank-{rank}\.bin"),  # it is written, and about to get its name
    "manifest": ("os.link", r"step-{step:08d}/MANIFEST-\d+\.json"),
    "hint": ("os.rename", "checkpoints/last"),
    "pruning": ("os.remove", r"rank-0\.bin"),
}
"""What the moments of a save begin with: an audit event, and how the name in it ends, as a pattern."""


@dataclass(frozen=True)
class Blow:
    """When a worker is hit, and by what."""

    moment: Moment
    step: int
    """The attempt's own step, from 1, in which it falls once a checkpoint is whole; or the step that is being saved."""
    victim: int
    signal: int = signal.SIGKILL


def short_job(text: Path, storage: Path, run: str, **changes: Any) -> Job:
    """An exact job of 20 steps with a checkpoint each 4, dropout, clipping, and buckets enough to be hit between them."""
    settings: dict[str, Any] = {
        "train": TrainConfig(steps=20, slots=7, slot_size=2, log_every=4, exact=True, clip_norm=0.5),
        "validation": ValidationConfig(every=10, samples=15),
        "checkpoint": CheckpointConfig(every=4, keep=2),
        "scaling": ScalingConfig(bucket_mib=0.01),
    }
    return replace(exact_job(text, storage, run, **settings | changes), term=1)


class Group:
    """The workers of one attempt, started at once."""

    def __init__(self, job: Job, world: int, scratch: Path, blow: Blow | None = None) -> None:
        self.place = scratch / f"{job.run}-{job.attempt}"
        (self.place / "meeting").mkdir(parents=True)
        self.steps = CONTEXT.RawArray("i", world)
        """Steps that each worker has begun."""
        arguments = [(job, rank, world, self.steps, self.place, blow) for rank in range(world)]
        self.workers = [CONTEXT.Process(target=_worker, args=each, daemon=True) for each in arguments]
        for worker in self.workers:
            worker.start()

    def process(self, rank: int) -> psutil.Process:
        """A worker that lives."""
        return psutil.Process(self.workers[rank].pid)

    def codes(self) -> list[int | None]:
        """Waits for all workers: their exit codes."""
        for worker in self.workers:
            worker.join(LIMIT_S)
        hanging = [rank for rank, worker in enumerate(self.workers) if worker.is_alive()]
        for rank in hanging:
            self.workers[rank].kill()
        assert not hanging, f"ranks {hanging} hang"
        return [worker.exitcode for worker in self.workers]

    def errors(self) -> dict[int, str]:
        """What each worker that failed raised, by rank."""
        return {int(path.suffix[1:]): path.read_text() for path in sorted(self.place.glob("error.*"))}

    def summary(self) -> dict[str, Any]:
        """Rank 0's, where all came to their end."""
        assert set(self.codes()) == {0}, self.errors()
        return dict(json.loads((self.place / "summary.json").read_text()))


def finish(job: Job, world: int, scratch: Path, attempt: str = "after") -> dict[str, Any]:
    """Runs another attempt that nothing disturbs; rank 0's summary."""
    return Group(replace(job, attempt=attempt, term=job.term + 1), world, scratch).summary()


def _worker(job: Job, rank: int, world: int, steps: Any, place: Path, blow: Blow | None) -> None:
    """A worker process, which counts its steps where the loop asks whether to stop."""
    from raystride.pipelines.train.distributed.process_group import set_rendezvous_file
    from raystride.pipelines.train.worker.run import run_worker

    set_rendezvous_file(str(place / "meeting" / "store"))
    struck = blow if blow and blow.victim == rank else None
    strike = _lie_in_wait(struck, job, lambda: int(steps[rank])) if struck else None

    def stopping() -> bool:
        steps[rank] += 1
        if strike and struck and struck.moment == "between steps":
            strike()
        return False

    try:
        summary = run_worker(job, WorkerInfo(rank=rank, world=world, local_rank=rank), accept, stopping)
    except BaseException:
        (place / f"error.{rank}").write_text(traceback.format_exc())
        sys.exit(1)
    if rank == 0:
        (place / "summary.json").write_text(json.dumps(summary))


def _lie_in_wait(blow: Blow, job: Job, step: Callable[[], int]) -> Callable[..., None]:
    """Prepares this process to be hit, once, at the moment; what hits it."""
    done: list[bool] = []

    def due() -> bool:
        if blow.moment in ("hint", "pruning"):
            return job.folder.exists(f"checkpoints/step-{blow.step:08d}/MANIFEST.json")
        return blow.moment in SYSTEM_CALLS or step() >= blow.step

    def strike(*arguments: object) -> None:
        if due() and not done:
            done.append(True)
            if blow.moment not in SYSTEM_CALLS:
                wait_until(lambda: job.folder.exists("checkpoints/last"), "a checkpoint")
            # At this very thread, so that it does not come past this line: a process-wide one may stop others first.
            signal.pthread_kill(threading.get_ident(), blow.signal)

    if blow.moment in SYSTEM_CALLS:
        event, ending = SYSTEM_CALLS[blow.moment]
        _on_system_call(event, ending.format(step=blow.step, attempt=job.attempt, rank=blow.victim), strike)
    elif blow.moment in ("forward", "backward"):
        _in_a_block(backward=blow.moment == "backward", strike=strike)
    elif blow.moment == "reduction":
        _after_a_bucket_left(strike)
    return strike


def _on_system_call(event: str, ending: str, strike: Callable[[], None]) -> None:
    position = 0 if event == "os.remove" else 1

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        if name == event:
            with suppress(TypeError):  # a number stands for an open file
                if re.search(f"{ending}$", os.fsdecode(arguments[position])):
                    strike()

    sys.addaudithook(hook)


def _in_a_block(*, backward: bool, strike: Callable[..., None]) -> None:
    from torch.nn.modules.module import register_module_forward_hook

    from raystride.model.transformer import Block

    def hook(module: object, inputs: object, output: Any) -> None:
        if isinstance(module, Block):
            if not backward:
                strike()
            elif output.requires_grad:
                output.register_hook(strike)

    register_module_forward_hook(hook)


def _after_a_bucket_left(strike: Callable[[], None]) -> None:
    from raystride.pipelines.train.strategies.exact import ExactBuckets

    send = ExactBuckets._reduce_bucket

    def send_and_be_hit(buckets: ExactBuckets, number: int) -> None:
        send(buckets, number)
        strike()

    ExactBuckets._reduce_bucket = send_and_be_hit  # type: ignore[method-assign, assignment]
