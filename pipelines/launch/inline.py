"""A training in this very process: no Ray, one worker, the same loop. For debuggers, profilers and small machines.

summary = train_inline(job, InlineWire(...))
"""

import threading
from typing import Any

from pipelines.launch.job import Job, Place
from pipelines.record import Recorder


class InlineWire:
    """The recorder in this process, with the calls of `wire.Wire`."""

    def __init__(self, **arguments: Any) -> None:
        self._recorder = Recorder(**arguments)
        self._stop = threading.Event()
        self.post = self._recorder.receive
        self.state = self._recorder.state
        self.stop_requested = self._stop.is_set
        self.request_stop = self._stop.set

    def finish(self, status: str, summary: dict[str, Any] | None) -> dict[str, Any]:
        """Ends the record and returns the summary as written."""
        return self._recorder.finish(status, summary)


def train_inline(job: Job, wire: InlineWire) -> dict[str, Any]:
    """Trains as the only worker; returns its summary. Raises what the training raises."""
    from pipelines.launch.worker import run_worker

    return run_worker(job, Place(), wire.post, wire.stop_requested)
