"""A thread that serves the main work: it calls a function again and again, and outlives the function's errors.

An error is kept, logged once an outage, and the call repeated after a pause that grows; who else has to know is told by
`on_error`. So no thread dies without a word while somebody waits for what it does.

    with ServiceThread("generations", publish, every_s=0.5, log=print):
        ...                                               # publish() is called every half second; it may return True to end
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from raystride.pipelines.credentials import hidden

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class ServiceThread:
    """Calls `work` every `every_s` seconds, the first time after as many, until it returns True or `end` is called."""

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        every_s: float,
        max_pause_s: float = LONGEST_PAUSE_S,
        log: Callable[[str], None] = lambda _: None,
        on_error: Callable[[Exception], object] = lambda _: None,
    ) -> None:
        """After errors it waits `max_pause_s` seconds at most.

        `log` gets a line at the first error after a success, `on_error` every error; it may return True to end.
        """
        self._max_pause_s = max_pause_s
        self._work, self._every_s, self._log, self._on_error = work, every_s, log, on_error
        self.error: Exception | None = None
        """That of the last call; None after one that succeeded."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Begins, and returns this."""
        self._thread.start()
        return self

    def end(self) -> None:
        """Has it end after the call that is under way."""
        self._ended.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.end()
        self._thread.join()

    def _run(self) -> None:
        pause = self._every_s
        while not self._ended.wait(pause):
            try:
                done = self._work() is True
                self.error, pause = None, self._every_s
                if done:
                    return
            except Exception as error:
                said, self.error = self.error is not None, error
                pause = min(self._max_pause_s, 2 * pause if said else max(self._every_s, FIRST_PAUSE_S))
                if not said:
                    with suppress(Exception):  # a screen or pipe that has gone
                        self._log(f"{self._thread.name}: {error_text(error)}; tried again")
                with suppress(Exception):
                    if self._on_error(error) is True:
                        return


def error_text(error: Exception) -> str:
    """An error's type and message in one line, without passwords; of ValueErrors of ours the message, which says it all."""
    text = " ".join(str(error).split())
    return hidden(text if type(error).__module__.startswith("raystride") else f"{type(error).__name__}: {text}")
