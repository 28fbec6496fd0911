"""Waiting for a condition. The limit is one that only a hang exceeds, however busy the machine.

wait_until(path.exists, "the marker of the first step")
"""

import time
from collections.abc import Callable
from typing import TypeVar

LIMIT_S = 300.0
T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str | Callable[[], str]) -> T:
    """Calls `condition` until it is true; returns what it returned. Fails with `what` never came."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"it never came: {what if isinstance(what, str) else what()}"
        time.sleep(0.01)
    return found
