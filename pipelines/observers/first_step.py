"""How long it took from the start of the job to its first optimiser update.

observers = [FirstStep(started_at=job.started_at), ...]
"""

import time
from typing import Any

from pipelines.observers.observer import Observer


class FirstStep(Observer):
    """Adds `seconds_to_first_step` to the first figures and to the summary."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._seconds: float | None = None
        self._told = False

    def on_step(self, step: int) -> None:
        if self._seconds is None:
            self._seconds = time.time() - self._started_at

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._seconds is not None and not self._told:
            measured["seconds_to_first_step"] = self._seconds
            self._told = True

    def on_end(self, summary: dict[str, Any]) -> None:
        summary["seconds_to_first_step"] = self._seconds
