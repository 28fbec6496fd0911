"""How long it took from the start of the job to its first optimiser update, and on what.

Whoever passes a milestone (the driver, then each worker) notes the time; the observer turns the times into durations.

    observers = [FirstStep(job.started_at, job.milestones | {"torch": time.time()}), ...]
"""

import time
from typing import TYPE_CHECKING

from raystride.pipelines.observers.observer import Observer

if TYPE_CHECKING:
    from raystride.pipelines.record.summary import RunSummary


class FirstStep(Observer):
    """Adds `seconds_to_first_step` and `start/<milestone>_s`, seconds since the milestone before, to the first figures."""

    def __init__(self, started_at: float, milestones: dict[str, float]) -> None:
        self._started_at = started_at
        self._milestones = dict(milestones)
        self._told = False

    def on_start(self, run: object) -> None:
        self._milestones["build"] = time.time()

    def on_step(self, step: int) -> None:
        if "first_step" not in self._milestones:
            self._milestones["first_step"] = time.time()

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._told:
            return
        self._told = True
        before = self._started_at
        for name, reached in sorted(self._milestones.items(), key=lambda mark: mark[1]):
            measured[f"start/{name}_s"] = reached - before
            before = reached
        measured["seconds_to_first_step"] = before - self._started_at

    def on_end(self, summary: "RunSummary") -> None:
        if "first_step" in self._milestones:
            summary["seconds_to_first_step"] = self._milestones["first_step"] - self._started_at
