"""A background thread that calls a function periodically, and survives the function's errors.

An error is kept, logged once an outage, and passed to `on_error`; the call is repeated with exponential backoff. So no
thread dies silently while others wait for its work.

    with ServiceThread("generations", publish, every_s=0.5, log=print):
        ...                                               # publish() is called every half second; it may return True to end
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from raystride.pipelines.system.credentials import redact

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
        log: Callable[[str], None] = lambda _: None,
        on_error: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        """`max_pause_s` bounds the pause after errors, in seconds.

        `log` gets a line at the first error after a success, `on_error` every error; it may return True to stop.
        """
        self._max_pause_s = max_pause_s
        self._work, self._every_s, self._log, self._on_error = work, every_s, log, on_error
        self.error: Exception | None = None
        """The last call's error; None if it succeeded."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Starts the thread; returns self."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stops the thread after the call in progress; does not wait for it."""
        self._stopped.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        pause = self._every_s
        while not self._stopped.wait(pause):
            try:
                done = self._work() is True
                self.error, pause = None, self._every_s
                if done:
                    return
            except Exception as error:
                is_repeated, self.error = self.error is not None, error
                pause = min(self._max_pause_s, 2 * pause if is_repeated else max(self._every_s, FIRST_PAUSE_S))
                if not is_repeated:
                    with suppress(Exception):  # the screen or pipe may be closed
                        self._log(f"{self._thread.name}: {format_error(error)}; tried again")
                with suppress(Exception):
                    if self._on_error(error) is True:
                        return


def format_error(error: Exception) -> str:
    """Returns an error's type and message in one line, with secrets redacted; the message alone for our own errors."""
    text = " ".join(str(error).split())
    return redact(text if type(error).__module__.startswith("raystride") else f"{type(error).__name__}: {text}")
