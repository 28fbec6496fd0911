"""Which share of its time a training spends in which phase of a step, by the host's clock.

An interval goes from one log to the next; the shares of the phases that do not contain each other add up to at most 1, and
what is missing is the loop itself. On GPUs the host runs ahead: its time in forward and backward is that of launching.

    observers = [Throughput(), PhaseShares(), Tracker(sender)]        # phase_forward_share, phase_data_share, ...
"""

from time import perf_counter

from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.phases import PARTS, phase


class PhaseShares(Observer):
    """Adds `phase_<name>_share` for each phase of `PARTS` to the figures of an interval."""

    def __init__(self) -> None:
        self._steps = 0
        self._begin()

    def on_start(self, run: RunFacts) -> None:
        self._begin()

    def on_step(self, step: int) -> None:
        self._steps += 1

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if not self._steps:  # a validation's log right after that of its step
            return
        elapsed = perf_counter() - self._began
        for name, before in self._seconds.items():
            measured[f"phase_{name}_share"] = (phase(name).seconds - before) / elapsed
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._began = perf_counter()
        self._seconds = {name: phase(name).seconds for name in PARTS}
