"""The last observer: hands all measured figures to the recorder, through a sender that never blocks the loop.

Rank 0 sends figures, checkpoints and the summary, all equal on every worker; each worker sends its own error.

    observers = [Throughput(), HostMonitor(sender, 5.0), RayMetrics(), Tracker(sender)]
"""

import traceback
from typing import TYPE_CHECKING

from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.record.entry import new_entry

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender
    from raystride.pipelines.observability.record.summary import RunSummary


class Tracker(Observer):
    """Observer that puts hook arguments into `sender`. At the end it waits at most `flush_s` seconds for a receipt."""

    def __init__(self, sender: "Sender", flush_s: float = 10.0) -> None:
        self._sender = sender
        self._flush_s = flush_s
        self._rank = 0

    def on_start(self, run: RunFacts) -> None:
        self._rank = run.rank

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._rank == 0:
            self._sender.put(new_entry("metrics", dict(measured), step=step))

    def on_checkpoint(self, step: int, path: str) -> None:
        if self._rank == 0:
            self._sender.put(new_entry("checkpoint", {"path": path}, step=step))

    def on_save_wait(self, step: int, seconds: float) -> None:
        if self._rank == 0:
            text = f"waiting for the save of step {step:,} ({seconds:.0f} s)" if seconds else f"step {step:,} is saved"
            self._sender.put(new_entry("event", {"name": "phase", "text": text}))

    def on_error(self, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        self._sender.put(new_entry("error", {"text": text, "rank": self._rank}))
        self._sender.flush(self._flush_s)

    def on_end(self, summary: "RunSummary") -> None:
        if self._rank == 0:
            self._sender.put(new_entry("summary", dict(summary)))
        self._sender.flush(self._flush_s)
