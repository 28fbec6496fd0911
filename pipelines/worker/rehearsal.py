"""How fast each number of workers trains on this machine: some real steps of a job with each, in processes of their own.

    found = rehearse(job, [(1, 2), (2, 1)])                   # {(1, 2): 11900.0, (2, 1): 9000.0}, tokens a second

The steps are those of the run, on its data and with its exchange of gradients; nothing is recorded, validated or saved. The
processes are forked from one that has loaded PyTorch and run nothing yet, so that it is loaded once.
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
from statistics import median

from raystride.pipelines.config import Checkpoint, Launch, Lora, Profile, Sample, Validation
from raystride.pipelines.files import Folder
from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.record.entry import Entry
from raystride.pipelines.record.sender import Receipt
from raystride.pipelines.worker.group import meet_in
from raystride.pipelines.worker.job import Job, WorkerInfo

LEAST_STEPS, MOST_STEPS = 4, 30
LEAST_S = 1.5
"""Steps are made for so long, and at least so many; the first is not counted."""
LIMIT_S = 120.0
"""What all of it may take; what is not known by then is not known."""
CLEARLY = 0.8
"""A number of workers at this share of the best speed is no reason to try still more of them."""

Places = tuple[int, int]
"""Workers, and threads of each."""


class Clock(Observer):
    """When each step ended, until it has been long enough."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens_per_step = 0.0

    def on_start(self, run: RunFacts) -> None:
        self.tokens_per_step = run.tokens_per_step

    def on_step(self, step: int) -> None:
        self.ends.append(time.perf_counter())

    def enough(self) -> bool:
        """Whether the training may end."""
        made = len(self.ends)
        return made >= MOST_STEPS or (made >= LEAST_STEPS and self.ends[-1] - self.ends[0] >= LEAST_S)

    @property
    def speed(self) -> float:
        """Tokens a second, by the median step."""
        return self.tokens_per_step / median(after - before for before, after in zip(self.ends, self.ends[1:], strict=False))


def rehearse(job: Job, places: list[Places]) -> dict[Places, float]:
    """Tokens a second with each number of workers, in the order given, until more of them are clearly slower.

    Those that failed, or were not come to in time, are missing.
    """
    with tempfile.TemporaryDirectory(prefix="raystride-rehearsal-") as folder:
        file = Path(folder) / "job.pickle"
        file.write_bytes(pickle.dumps((_bare(job, Folder(folder)), places)))
        command = [sys.executable, "-m", "raystride.pipelines.worker.rehearsal", str(file)]
        try:
            out = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S).stdout
        except subprocess.TimeoutExpired as late:
            out = late.stdout.decode() if late.stdout else ""
    found = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    return {(workers, threads): speed for workers, threads, speed in found}


def _bare(job: Job, folder: Folder) -> Job:
    """The same training without all that goes on around its steps."""
    # Shards that are summed cannot be exact, as a base in shards can.
    exact = job.config.train.exact and not job.config.lora.rank
    train = replace(job.config.train, steps=10**6, epochs=0.0, hours=0.0, log_every=1, exact=exact)
    config = replace(
        job.config,
        model=replace(job.config.model, init_from=""),
        lora=Lora(),  # without a base there is nothing to adapt
        train=train,
        validation=Validation(every=0),
        checkpoint=Checkpoint(every=0),
        sample=Sample(tokens=0),
        profile=Profile(),
        launch=Launch(mode="inline"),
    )
    return replace(job, config=config, folder=folder)


def _main(file: Path) -> None:
    """What the process of a rehearsal does: prints a line of JSON a number of workers."""
    import raystride.pipelines.worker.worker  # noqa: F401  loaded before the forks

    job, places = pickle.loads(file.read_bytes())  # the driver's own, from a folder that is its alone  # noqa: S301
    best = 0.0
    for workers, threads in places:
        speed = _try(replace(job, threads=threads), workers)
        if speed:
            print(json.dumps([workers, threads, round(speed, 1)]), flush=True)
        best = max(best, speed)
        if speed < CLEARLY * best:
            break


def _try(job: Job, workers: int) -> float:
    """Tokens a second with so many workers; 0 where one of them failed."""
    context = multiprocessing.get_context("fork")
    meeting = None
    if workers > 1:
        (place := Path(str(job.folder)) / f"{workers}").mkdir()
        meeting = str(place / "store")
    answer = context.SimpleQueue()
    ranks = [context.Process(target=_train, args=(job, rank, workers, meeting, answer)) for rank in range(workers)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return 0.0 if any(each.exitcode for each in ranks) or answer.empty() else float(answer.get())


def _train(job: Job, rank: int, world: int, meeting: str | None, answer: "multiprocessing.SimpleQueue[float]") -> None:
    from raystride.pipelines.plugins import OBSERVERS
    from raystride.pipelines.worker.worker import run_worker
    from raystride.triton_kernels.processes import end_with_parent

    end_with_parent()
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    meet_in(meeting)
    clock = Clock()
    OBSERVERS["rehearsal"] = lambda: clock
    run_worker(job, WorkerInfo(rank=rank, world=world, local_rank=rank), forget_entries, clock.enough)
    if rank == 0:
        answer.put(clock.speed)


def forget_entries(sender: str, entries: list[Entry], recorder: str) -> Receipt:
    """A recorder that takes everything and keeps nothing."""
    last = entries[-1]["sequence"] if entries else 0
    return Receipt("rehearsal", last, last)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
