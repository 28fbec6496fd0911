"""Each worker's own time, told to the recorder, which compares the workers: nothing is exchanged between them for it.

    observers = [Throughput(), Stragglers(sender), Tracker(sender)]

All by the host's clock. On CPUs that is what the worker did itself, and the rest is waiting in `reduce`. On GPUs the host
only launches, so that a slow GPU does not show here, whereas a slow host or waiting for data does.
"""

from typing import TYPE_CHECKING

from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.phases import phase
from raystride.pipelines.record.entry import WorkerTime, new_entry

if TYPE_CHECKING:
    from raystride.pipelines.record.sender import Sender

COUNTED = ("step", "reduce", "data")


class Stragglers(Observer):
    """Sends an entry of kind `rank` at every log that ends an interval of steps, where there are several workers."""

    def __init__(self, sender: "Sender") -> None:
        self._sender = sender
        self._run = RunFacts(run="", attempt="")
        self._steps = 0
        self._before = self._seconds()

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        self._before = self._seconds()

    def on_step(self, step: int) -> None:
        self._steps += 1

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._run.world < 2 or not self._steps:
            return
        now = self._seconds()
        spent = {name: now[name] - self._before[name] for name in COUNTED}
        seconds = spent["step"] + spent["data"]
        values: WorkerTime = {
            "rank": self._run.rank,
            "world": self._run.world,
            "node": self._run.node,
            "steps": self._steps,
            "seconds": seconds,
            # Waiting for the others happens in `reduce`, so that part is not the worker's own.
            "own_s": seconds - spent["reduce"],
            "data_s": spent["data"],
        }
        self._sender.put(new_entry("rank", values, step=step))
        self._before, self._steps = now, 0

    def _seconds(self) -> dict[str, float]:
        return {name: phase(name).seconds for name in COUNTED}
