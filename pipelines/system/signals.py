"""Turns termination signals into exceptions, and these into exit codes.

with raise_on_signals():
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
"""Exit codes after a closed terminal, Ctrl-C and SIGTERM, as in shells and Kubernetes, so that the job does not count as
done."""
EXIT_CODES = {"SIGHUP": HUNG_UP, "SIGINT": INTERRUPTED, "SIGTERM": TERMINATED}


class Terminated(KeyboardInterrupt):
    """SIGTERM as an exception that propagates like Ctrl-C."""


class HungUp(KeyboardInterrupt):
    """SIGHUP as such an exception: the terminal, or its connection, is gone."""


def signal_exception(number: int, reason: str = "") -> KeyboardInterrupt:
    """Returns the exception for a signal number."""
    return {signal.SIGTERM: Terminated, signal.SIGHUP: HungUp}.get(signal.Signals(number), KeyboardInterrupt)(reason)


def exit_code_of(signalled: KeyboardInterrupt) -> int:
    """Returns the exit code of a command that ended with this exception."""
    return EXIT_CODES[_signal_name(signalled)]


def report_interruption(signalled: KeyboardInterrupt) -> int:
    """Prints the signal that ended a command to standard error; returns its exit code."""
    name = _signal_name(signalled)
    shown = "Ctrl-C" if name == "SIGINT" else name
    print(f"interrupted by {shown}; the same command goes on from what is done", file=sys.stderr)
    return EXIT_CODES[name]


def sigint_is_ignored() -> bool:
    """Returns whether this process ignores Ctrl-C, for instance if `nohup`, cron or a script's `&` has started it."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def termination_signals() -> list[signal.Signals]:
    """Returns the signals that end a command, without those that this process ignores, for instance under `nohup`."""
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return [number for number in asking if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def raise_on_signals() -> Iterator[None]:
    """Raises exceptions in the block for SIGTERM and SIGHUP, as Python does for Ctrl-C. No effect off the main thread."""
    received: list[int] = []

    def raise_signal_exception(number: int, frame: object) -> None:
        received.append(number)
        raise signal_exception(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handlers = {
        number: signal.signal(number, raise_signal_exception) for number in termination_signals() if number != signal.SIGINT
    }
    try:
        yield
    except KeyboardInterrupt as interrupted:
        # Ray's waiting calls drop the handler's exception and raise a plain KeyboardInterrupt for every signal.
        if received and type(interrupted) is KeyboardInterrupt:
            raise signal_exception(received[0]) from interrupted
        raise
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _signal_name(signalled: KeyboardInterrupt) -> str:
    return {Terminated: "SIGTERM", HungUp: "SIGHUP"}.get(type(signalled), "SIGINT")
