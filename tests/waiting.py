"""Waiting for a condition. The limit is one that only a hang exceeds, however busy the machine.

wait_until(path.exists, "the marker of the first step")
"""

import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

LIMIT_S = 300.0
T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object],
    process: "subprocess.Popen[Any] | None" = None,
    pause_s: float = 0.01,
) -> T:
    """Calls `condition` every `pause_s` seconds until it is true; returns what it returned.

    Fails after LIMIT_S with `what` never came. If a process brings it, fails with its output once that has ended; while it
    runs, only the test's own time limit ends the wait.
    """
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        has_ended = process is not None and process.poll() is not None
        if has_ended or (process is None and time.monotonic() >= deadline):
            printed = [str(text)[-4000:] for text in process.communicate() if text] if process else []
            raise AssertionError("\n".join([f"it never came: {what if isinstance(what, str) else what()}", *printed]))
        time.sleep(pause_s)
    return found
