"""Signals that ask a command to end, as exceptions that pass through it, and the exit codes that tell of them.

with signals_raise():
    ...                                                       # SIGTERM raises Terminated, SIGHUP HungUp, Ctrl-C as ever
except KeyboardInterrupt as signalled:
    return report_interruption(signalled)                     # a line; 143, 129 or 130
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143
"""Exit codes after a terminal that went away, Ctrl-C and SIGTERM, as shells and Kubernetes count: what waits for the job
must not take it for done."""
CODE_OF_SIGNAL = {"SIGHUP": HUNG_UP, "SIGINT": INTERRUPTED, "SIGTERM": TERMINATED}


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that passes wherever Ctrl-C does."""


class HungUp(KeyboardInterrupt):
    """SIGHUP, as such an exception: the terminal, or the connection that it came by, is gone."""


def interruption(number: int, reason: str = "") -> KeyboardInterrupt:
    """Returns what a signal of this number raises."""
    return {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}.get(signal.Signals(number), KeyboardInterrupt)(reason)


def code_of(signalled: KeyboardInterrupt) -> int:
    """Returns the exit code of a command that this has ended."""
    return CODE_OF_SIGNAL[_name(signalled)]


def report_interruption(signalled: KeyboardInterrupt) -> int:
    """Says on standard error what has ended a command; returns its exit code."""
    name = _name(signalled)
    shown = "Ctrl-C" if name == "SIGINT" else name
    print(f"interrupted by {shown}; the same command goes on from what is done", file=sys.stderr)
    return CODE_OF_SIGNAL[name]


def sigint_is_ignored() -> bool:
    """Returns whether this process ignores Ctrl-C, as one does that `nohup`, cron or a script's `&` has started."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def signals_to_heed() -> list[signal.Signals]:
    """Returns the signals that ask a command to end, without those that it was started to ignore, as by `nohup`."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def signals_raise() -> Iterator[None]:
    """Raises exceptions in the block for SIGTERM and SIGHUP, as Python does for Ctrl-C. In the main thread alone."""

    def handle(number: int, frame: object) -> None:
        raise interruption(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in signals_to_heed() if number != signal.SIGINT}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _name(signalled: KeyboardInterrupt) -> str:
    return {Terminated: "SIGTERM", HungUp: "SIGHUP"}.get(type(signalled), "SIGINT")
