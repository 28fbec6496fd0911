"""A background thread that calls a function periodically, and survives the function's errors.

An error is kept, logged once an outage, and passed to `on_error`; the call is repeated with exponential backoff. So no
thread dies silently while others wait for its work.

    with ServiceThread("generations", publish, every_s=0.5):
        ...                                               # publish() is called every half second; it may return True to end
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from raystride.pipelines.system.credentials import redact
from raystride.pipelines.system.output import print_warning

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0


class ServiceThread:
    """Calls `work` every `every_s` seconds, first after `every_s`, until it returns True or `stop` is called."""

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        every_s: float,
        max_pause_s: float = MAX_PAUSE_S,
        log: Callable[[str], None] = print_warning,
        on_error: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        """`max_pause_s` bounds the pause after errors, in seconds; with `every_s` the pace stays the same.

        `log` gets a line at the first error after a success, `on_error` every error; it may return True to stop.
        """
        self._max_pause_s = max_pause_s
        self._work, self._every_s, self._log, self._on_error = work, every_s, log, on_error
        self.error: Exception | None = None
        """The last call's error; None if it succeeded."""
        self._woken, self._is_stopped = threading.Event(), False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Starts the thread; returns self."""
        self._thread.start()
        return self

    def wake(self) -> Self:
        """Ends the pause, so that the next call comes at once; returns self."""
        self._woken.set()
        return self

    def stop(self) -> None:
        """Stops the thread after the call in progress; does not wait for it."""
        self._is_stopped = True
        self._woken.set()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread's end; returns whether it came within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()
        self.join()

    def _run(self) -> None:
        pause, is_done = self._every_s, False
        while not is_done:
            self._woken.wait(pause)
            self._woken.clear()  # before the next line, or a `stop` between the two would be lost
            if self._is_stopped:
                return
            try:
                is_done = self._work() is True
                self.error, pause = None, self._every_s
            except Exception as error:
                pause = min(self._max_pause_s, 2 * pause if self.error else max(self._every_s, FIRST_PAUSE_S))
                is_done = self._handle(error)

    def _handle(self, error: Exception) -> bool:
        """Logs the first error after a success; returns whether `on_error` ends the thread."""
        is_repeated, self.error = self.error is not None, error
        if not is_repeated:
            self._log_error(error)
        try:
            return self._on_error(error) is True
        except Exception as second_error:
            self._log_error(second_error)
            return False

    def _log_error(self, error: Exception) -> None:
        with suppress(Exception):  # the screen or pipe may be closed
            self._log(f"{self._thread.name}: {format_error(error)}; tried again")


def format_error(error: Exception) -> str:
    """Returns an error's type and message in one line, with secrets redacted; the message alone for our own errors."""
    text = " ".join(str(error).split())
    return redact(text if type(error).__module__.startswith("raystride") else f"{type(error).__name__}: {text}")
