"""Signs of life: what each worker tells of itself beside its training, and the table of them that the recorder keeps.

A heartbeat says where the worker is and whether it has moved since the last one. A thread that does nothing else tells it,
and it is kept in memory alone. Seconds throughout.

    heartbeats = HeartbeatSender(recorder.heartbeat, worker, node_id, every_s=5.0)     # in the worker
    table.hear(heartbeat); table.heartbeats()             # in the recorder's process: {0: Heartbeat(...), 1: ...}
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from raystride.pipelines.hang.process import Process
from raystride.pipelines.phases import PHASES, innermost, phase
from raystride.pipelines.worker.job import WorkerInfo

LEASE_S = 45.0
"""How long a worker on another node than the driver goes on unheard."""
ENDED = "ended"
"""Where a worker is that trains no more."""


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What a worker tells of itself at one moment."""

    process: Process
    number: int
    """Of this worker's heartbeats: another one than before says that it lives."""
    inside: str
    """The innermost open phase; empty between phases, `ENDED` after the training."""
    moved: float
    """Another figure than before says that a phase has begun or ended since."""
    stepped: float
    """Seconds in steps that have ended."""
    own: float = 0.0
    """Seconds that it took for these and their data by itself, without waiting for others."""

    @classmethod
    def now(cls, process: Process, number: int) -> "Heartbeat":
        """The heartbeat of this number, from the phases of the process that calls."""
        last = innermost()
        inside, began = last.name, last.began
        moved = began + sum(phase(name).seconds for name in PHASES)
        stepped = phase("step").seconds
        return cls(
            process=process,
            number=number,
            inside=inside if began else "",
            moved=moved,
            stepped=stepped,
            own=stepped + phase("data").seconds - phase("reduce").seconds,
        )


class CutOff(RuntimeError):
    """A heartbeat that nobody answered, as if the driver's node were out of reach."""


class HeartbeatSender:
    """Beats from its making to `end`, which tells that the worker ends by itself.

    `cut_off` is called when no heartbeat was answered for `LEASE_S` seconds, since `tell` raised CutOff each time.
    """

    def __init__(
        self,
        tell: Callable[[Heartbeat], object],
        worker: WorkerInfo,
        node_id: str,
        every_s: float,
        cut_off: Callable[[], None] | None = None,
    ) -> None:
        self._tell, self._every_s, self._cut_off = tell, every_s, cut_off
        self._process = Process.this(worker, node_id)
        self._number = 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def end(self) -> None:
        """Ends the thread, whose last heartbeat tells that the worker has ended by itself."""
        self._ended.set()

    def _run(self) -> None:
        answered = time.monotonic()
        while True:
            ended = self._ended.is_set()
            self._number += 1
            heartbeat = Heartbeat.now(self._process, self._number)
            try:
                self._tell(replace(heartbeat, inside=ENDED) if ended else heartbeat)
                answered = time.monotonic()
            except CutOff:
                if self._cut_off and time.monotonic() - answered > LEASE_S:
                    self._cut_off()
            except Exception:  # the recorder may be starting again: the next heartbeat will do
                answered = time.monotonic()
            if ended:
                return
            self._ended.wait(self._every_s)


def end_cut_off_worker() -> None:
    """Ends this process at once: it may wait in an exchange with workers that are out of reach, too.

    The driver has started, or will start, another group elsewhere. This one could save no more (`Checkpoints.claim`), but it
    would hold its place and devices, and tell the record of steps that the other does again, once the network is back.
    """
    said = f"nothing was heard of the driver for {LEASE_S:.0f} s: this worker ends, another group may train the run by now"
    print(f"raystride: {said}", file=sys.stderr, flush=True)
    os._exit(1)


class HeartbeatTable:
    """The newest heartbeat of each worker of the group that trains now."""

    def __init__(self) -> None:
        self._beats: dict[int, Heartbeat] = {}
        self._lock = threading.Lock()

    def hear(self, heartbeat: Heartbeat) -> None:
        """Takes in a heartbeat. The first one of another group ends what is known of the group before."""
        with self._lock:
            if another_group(self._beats, heartbeat):
                self._beats = {}
            self._beats[heartbeat.process.rank] = heartbeat

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The newest heartbeat of each worker, by rank."""
        with self._lock:
            return dict(self._beats)


def another_group(known: dict[int, Heartbeat], heartbeat: Heartbeat) -> bool:
    """Whether a heartbeat is of other processes than those known: its rank has another, or they are of another number.

    Those known are of one group, so one of them is asked: with all of them eight thousand workers took 2.7 s of each 5.
    """
    before = known.get(heartbeat.process.rank) or next(iter(known.values()), None)
    if before is None:
        return False
    if before.process.rank == heartbeat.process.rank:
        return before.process != heartbeat.process
    return before.process.world != heartbeat.process.world
