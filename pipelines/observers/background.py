"""Base of observers with a background thread, from the start of the loop to its end.

class HostMonitor(BackgroundObserver):
    def on_start(self, run):
        self._start_thread("host-monitor", self._watch, run)     # _watch: while not self._stop_event.wait(seconds): ...
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raystride.pipelines.observers.observer import Observer

if TYPE_CHECKING:
    from raystride.pipelines.record.summary import RunSummary


class BackgroundObserver(Observer):
    """An observer with a thread that is stopped when the training ends or fails, waiting at most `join_timeout_s`."""

    def __init__(self, join_timeout_s: float = 5.0) -> None:
        self._join_timeout_s = join_timeout_s
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def _start_thread(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._thread.start()

    def on_error(self, error: BaseException) -> None:
        self._stop_thread()

    def on_end(self, summary: "RunSummary") -> None:
        self._stop_thread()

    def _stop_thread(self) -> None:
        self._stop_event.set()
        if self._thread is not None:
            self._thread.join(self._join_timeout_s)
