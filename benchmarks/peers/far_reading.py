"""A process that reads far shards at a pace, as a training would, and tells how long it stood still for them.

Each way to read is a module of this folder, run as a program with one JSON argument:

    job = reading_job()                                       # of the command line
    read(job, batches)                                        # prints {"waited_s": ..., "seconds": ..., "first_s": ...}
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

STARTED = time.perf_counter()


@dataclass(frozen=True)
class ReadingJob:
    """What one process reads."""

    place: str
    """Address of what its way reads: a prepared folder, or a peer's data set."""
    cache: str
    """The node's folder for copies, on its disk."""
    cache_bytes: int
    rank: int
    world: int
    epochs: int
    batches: int
    """Batches of this process in an epoch."""
    batch: int
    """Samples in a batch of this process."""
    context: int
    """Tokens in a sample, and one more: what is predicted."""
    rate: float
    """Bytes of samples a second that this process uses up."""
    shuffle: str
    first: int = 0
    """Batches of this process before the first one that is read: of a run that goes on."""
    seed: int = 7

    @property
    def last(self) -> int:
        """Batches up to the end of the last epoch that is read."""
        return (self.first // self.batches + self.epochs) * self.batches

    def parts(self) -> Iterator[tuple[int, int, int]]:
        """Each epoch that is read, the first batch of it, and the one after its last."""
        for epoch in range(self.first // self.batches, self.last // self.batches):
            yield epoch, max(0, self.first - epoch * self.batches), self.batches


def reading_job() -> ReadingJob:
    """The job on the command line."""
    return ReadingJob(**json.loads(sys.argv[1]))


def peer(write: Callable[[str, str, int, int], None], batches: Callable[[ReadingJob], Iterable[Any]]) -> None:
    """What a peer's module does as a program: writes its data where the first argument is `write`, and reads otherwise.

    What launchers tell its processes stands in the environment.
    """
    if sys.argv[1] == "write":
        write(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
        return
    job = reading_job()
    told = {"RANK": job.rank, "WORLD_SIZE": job.world, "LOCAL_RANK": job.rank, "LOCAL_WORLD_SIZE": job.world, "NODE_RANK": 0}
    os.environ.update({name: str(value) for name, value in told.items()})
    read(job, batches(job))


def read(job: ReadingJob, batches: Iterable[Any]) -> None:
    """Takes all batches, each as long as it would be worked on, and prints what became of it; the process ends here."""
    each_s, waited, count, first, later = 2 * job.context * job.batch / job.rate, 0.0, 0, 0.0, 0.0
    iterator, began = iter(batches), time.perf_counter()
    while True:
        asked = time.perf_counter()
        try:
            next(iterator)
        except StopIteration:
            break
        now = time.perf_counter()
        if count:
            waited += now - asked
            if (job.first + count) % job.batches == 0:
                later = max(later, now - asked)
        else:
            first, began = now - STARTED, now
        count += 1
        # From when it came: who waits works as long as everybody afterwards.
        time.sleep(max(0.0, now + each_s - time.perf_counter()))
    found = {
        "batches": count,
        "waited_s": waited,
        "seconds": time.perf_counter() - began,
        "first_s": first,
        "epoch_s": later,
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # a peer's threads and processes may not want to
