"""Reports each worker's own compute time to the recorder, which finds stragglers without communication between workers.

    observers = [Throughput(), Stragglers(sender), Tracker(sender)]

Times are of the host's clock. On CPUs a worker's own time is its computation, and the rest is waiting in `reduce`. On GPUs
the host only launches kernels: a slow GPU does not show here, but a slow host or waiting for data does.
"""

from typing import TYPE_CHECKING

from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.phases import phase
from raystride.pipelines.observability.record.entry import WorkerTime, new_entry

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender

COUNTED_PHASES = ("step", "reduce", "data")


class Stragglers(Observer):
    """Observer that sends an entry of kind `rank` at every log after an interval of steps, if there are several workers."""

    def __init__(self, sender: "Sender") -> None:
        self._sender = sender
        self._run = RunFacts(run="", attempt="")
        self._steps = 0
        self._last_seconds = self._phase_seconds()

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        self._last_seconds = self._phase_seconds()

    def on_step(self, step: int) -> None:
        self._steps += 1

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._run.world < 2 or not self._steps:
            return
        now = self._phase_seconds()
        spent = {name: now[name] - self._last_seconds[name] for name in COUNTED_PHASES}
        seconds = spent["step"] + spent["data"]
        values: WorkerTime = {
            "rank": self._run.rank,
            "world": self._run.world,
            "node": self._run.node,
            "steps": self._steps,
            "seconds": seconds,
            # `reduce` includes waiting for the other workers.
            "own_s": seconds - spent["reduce"],
            "data_s": spent["data"],
        }
        self._sender.put(new_entry("rank", values, step=step))
        self._last_seconds, self._steps = now, 0

    def _phase_seconds(self) -> dict[str, float]:
        return {name: phase(name).seconds for name in COUNTED_PHASES}
