"""Named ranges around the phases of a training step: the host time of each, and ranges for profilers.

    with phase("forward"):
        loss_sum, counted = model(batch.inputs, batch.targets)
    phase("forward").seconds                                  # of the host, in this process so far

A range always adds the host's time (two clock readings), and nothing else unless a listener is set: an open profile. It
never synchronises with the device, so that on a GPU the time of forward, backward and update is their launch time; device
time appears in the phase in which the host waits for it, and in profiles. A range must not be nested in itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import Any

PHASES = ("data", "step", "slot", "forward", "backward", "reduce", "update", "validation", "checkpoint")
"""In the order of a step. `data`: waiting for a step's samples and copying them to the device; `step`: everything from there
to the updated parameters, that is, for each micro-batch a `slot` with its `forward` and `backward`, then `reduce`: the rest
of the sum over workers, including the wait for them, and `update`: clipping and the optimiser."""
EXCLUSIVE_PHASES = ("data", "forward", "backward", "reduce", "update", "validation", "checkpoint")
"""Disjoint phases: no moment is counted in two of them."""

Listener = Callable[[str], AbstractContextManager[Any]]
"""Returns the listener's own range for a phase's name."""

_listener: Listener | None = None


class Phase:
    """A named, reusable range."""

    __slots__ = ("_listener_range", "began", "name", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        """Total host time."""
        self.began = 0.0
        """The `perf_counter` time at which the open range began; 0 if it is closed."""
        self._listener_range: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if _listener is not None:
            self._listener_range = _listener(self.name)
            self._listener_range.__enter__()
        self.began = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds += perf_counter() - self.began
        self.began = 0.0
        if self._listener_range is not None:
            self._listener_range.__exit__(kind, error, trace)
            self._listener_range = None


_phases = {name: Phase(name) for name in PHASES}


def phase(name: str) -> Phase:
    """Returns the range of a name in `PHASES`, a context manager."""
    return _phases[name]


def innermost_phase() -> Phase:
    """Returns the open range that was opened last; if none is open, one with `began` 0."""
    return max(_phases.values(), key=lambda phase_range: phase_range.began)


def set_listener(listener: Listener | None) -> None:
    """Sets the listener of all ranges that open from now on; None removes it."""
    global _listener
    _listener = listener
