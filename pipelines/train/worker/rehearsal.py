"""Measures the speed of different numbers of workers on this machine by some real steps of a job in separate processes.

    speeds = rehearse(job, [(1, 2), (2, 1)])                  # {(1, 2): Speed(11500.0, 11900.0, 12000.0), ...}

The steps are those of the run, on its data and with its gradient exchange; nothing is recorded, validated or saved. The
processes are forked from one that has only imported PyTorch, so that it is imported once.
"""

import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

from raystride.pipelines.config import (
    CheckpointConfig,
    LaunchConfig,
    LoraConfig,
    ProfileConfig,
    SampleConfig,
    ValidationConfig,
)
from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.record.entry import Entry
from raystride.pipelines.observability.record.sender import Receipt
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.distributed.process_group import set_rendezvous_file
from raystride.pipelines.train.worker.job import Job, WorkerInfo

MIN_STEPS, MAX_STEPS = 4, 30
MIN_S = 1.5
"""Seconds of a measurement, within the limits of its steps; the first step is not counted."""
TIMEOUT_S = 120.0
"""Time limit of the whole rehearsal; later results are missing."""
MIN_RELATIVE_SPEED = 0.8
"""Larger numbers of workers are not measured if the speed falls below this fraction of the best."""

Layout = tuple[int, int]
"""Number of workers, and threads of each."""


class Speed(NamedTuple):
    """Tokens a second of a layout."""

    low: float
    """By the slow quartile of its steps."""
    middle: float
    """By their median."""
    high: float
    """By their fast quartile."""


class StepClock(Observer):
    """Observer that notes the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens_per_step = 0.0

    def on_start(self, run: RunFacts) -> None:
        self.tokens_per_step = run.tokens_per_step

    def on_step(self, step: int) -> None:
        self.ends.append(time.perf_counter())

    def has_enough_steps(self) -> bool:
        """Returns whether the training may end."""
        num_steps = len(self.ends)
        return num_steps >= MAX_STEPS or (num_steps >= MIN_STEPS and self.ends[-1] - self.ends[0] >= MIN_S)

    @property
    def speed(self) -> Speed:
        """The speed, without the first step."""
        seconds = [after - before for before, after in zip(self.ends, self.ends[1:], strict=False)]
        fast, middle, slow = quantiles(seconds, n=4) if len(seconds) > 1 else [median(seconds)] * 3
        return Speed(self.tokens_per_step / slow, self.tokens_per_step / middle, self.tokens_per_step / fast)


def rehearse(job: Job, layouts: list[Layout]) -> dict[Layout, Speed]:
    """Returns the speed by layout, measured in the given order until more workers are clearly slower.

    Failed layouts, and those beyond the time limit, are missing.
    """
    from ray import cloudpickle  # plug-ins of the running script are pickled by value

    with tempfile.TemporaryDirectory(prefix="raystride-rehearsal-") as folder:
        file = Path(folder) / "job.pickle"
        file.write_bytes(cloudpickle.dumps((_strip_job(job, Folder(folder)), layouts)))
        command = [sys.executable, "-P", "-m", "raystride.pipelines.train.worker.rehearsal", str(file)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)}
        try:
            output = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment).stdout
        except subprocess.TimeoutExpired as error:
            output = error.stdout.decode() if error.stdout else ""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    return {(workers, threads): Speed(*speed) for workers, threads, speed in rows}


def _strip_job(job: Job, folder: Folder) -> Job:
    """Returns the same training without recording, validation, checkpoints and so on."""
    # A sharded LoRA base can be exact, but gradients summed over shards cannot, and the base is dropped here.
    exact = job.config.train.exact and not job.config.lora.rank
    train = replace(job.config.train, steps=10**6, epochs=0.0, hours=0.0, log_every=1, exact=exact)
    config = replace(
        job.config,
        model=replace(job.config.model, init_from=""),
        lora=LoraConfig(),  # without a base there is nothing to adapt
        train=train,
        validation=ValidationConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        sample=SampleConfig(tokens=0),
        profile=ProfileConfig(),
        launch=LaunchConfig(mode="inline"),
    )
    return replace(job, config=config, folder=folder)


def _run_rehearsal(file: Path) -> None:
    """Runs the rehearsal in its process; prints a line of JSON a layout."""
    import raystride.pipelines.train.worker.run  # noqa: F401  loaded before the forks

    job, layouts = pickle.loads(file.read_bytes())  # written by the driver into a private folder  # noqa: S301
    best = 0.0
    for workers, threads in layouts:
        speed = _measure_speed(replace(job, threads=threads), workers)
        if speed:
            print(json.dumps([workers, threads, speed]), flush=True)
        middle = speed.middle if speed else 0.0
        best = max(best, middle)
        if middle < MIN_RELATIVE_SPEED * best:
            break


def _measure_speed(job: Job, workers: int) -> Speed | None:
    """Returns the speed with this number of workers, None if one of them failed."""
    context = multiprocessing.get_context("fork")
    rendezvous_file = None
    if workers > 1:
        (folder := Path(str(job.folder)) / f"{workers}").mkdir()
        rendezvous_file = str(folder / "store")
    answer = context.SimpleQueue()
    ranks = [
        context.Process(target=_train_rank, args=(job, rank, workers, rendezvous_file, answer)) for rank in range(workers)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return None if any(process.exitcode for process in ranks) or answer.empty() else answer.get()


def _train_rank(
    job: Job, rank: int, world: int, rendezvous_file: str | None, answer: "multiprocessing.SimpleQueue[Speed]"
) -> None:
    from raystride.pipelines.data.plugins import OBSERVERS
    from raystride.pipelines.train.worker.run import run_worker
    from raystride.triton_kernels.processes import end_with_parent

    end_with_parent()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    set_rendezvous_file(rendezvous_file)
    clock = StepClock()
    OBSERVERS["rehearsal"] = lambda: clock
    run_worker(job, WorkerInfo(rank=rank, world=world, local_rank=rank), discard_entries, clock.has_enough_steps)
    if rank == 0:
        answer.put(clock.speed)


def discard_entries(sender: str, entries: list[Entry], recorder: str, urgent: bool) -> Receipt:
    """Acknowledges all entries and discards them, in place of a recorder."""
    last = entries[-1]["sequence"] if entries else 0
    return Receipt("rehearsal", last, last)


if __name__ == "__main__":
    _run_rehearsal(Path(sys.argv[1]))
