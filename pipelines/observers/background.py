"""A thread of an observer's own, from the start of the loop to its end.

class HostMonitor(Background):
    def on_start(self, run):
        self._begin("host-monitor", self._watch, run)     # _watch: while not self._ended.wait(seconds): ...
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from raystride.pipelines.observers.observer import Observer

if TYPE_CHECKING:
    from raystride.pipelines.record.summary import RunSummary


class Background(Observer):
    """Ends its thread with the training, however that ends, and waits for it so many seconds at most."""

    def __init__(self, end_s: float = 5.0) -> None:
        self._end_s = end_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def _begin(self, name: str, work: Callable[..., None], *arguments: Any) -> None:
        self._thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
        self._thread.start()

    def on_error(self, error: BaseException) -> None:
        self._end()

    def on_end(self, summary: "RunSummary") -> None:
        self._end()

    def _end(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(self._end_s)
