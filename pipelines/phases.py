"""The phases of a step by name, and ranges around them: what profilers show, and where the host's time goes.

    with phase("forward"):
        loss_sum, counted = model(batch.inputs, batch.targets)
    phase("forward").seconds                                  # of the host, in this process so far

A range always counts the host's time (two readings of its clock) and does nothing else unless something listens: an open
profile. It never waits for the device, so that on a GPU the time of forward, backward and update is that of launching them;
what the device does behind shows where the host waits for it, and in profiles. A range must not be opened inside itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from types import TracebackType
from typing import Any

PHASES = ("data", "step", "slot", "forward", "backward", "reduce", "update", "validation", "checkpoint")
"""In the order of a step. `data`: waiting for a step's samples and handing them to the device; `step`: everything between
them and the updated parameters, which is, of each micro-batch, a `slot` with its `forward` and `backward`, then `reduce`:
the rest of the sum over workers, with waiting for them, and `update`: clipping and the optimiser."""
PARTS = ("data", "forward", "backward", "reduce", "update", "validation", "checkpoint")
"""Those that lie in none of the others' way: no moment is counted in two of them."""

Listener = Callable[[str], AbstractContextManager[Any]]
"""Makes a range of its own from a phase's name."""

_listener: Listener | None = None


class Phase:
    """A named range, used again and again."""

    __slots__ = ("_heard", "began", "name", "seconds")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0
        """Of the host, in all."""
        self.began = 0.0
        """When the range that is open began, by `perf_counter`; 0: none is."""
        self._heard: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if _listener is not None:
            self._heard = _listener(self.name)
            self._heard.__enter__()
        self.began = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds += perf_counter() - self.began
        self.began = 0.0
        if self._heard is not None:
            self._heard.__exit__(kind, error, trace)
            self._heard = None


_phases = {name: Phase(name) for name in PHASES}


def phase(name: str) -> Phase:
    """The range of a name in `PHASES`, to be entered."""
    return _phases[name]


def innermost() -> Phase:
    """The range that was opened last of those that are open; where none is, one whose `began` is 0."""
    return max(_phases.values(), key=lambda each: each.began)


def listen(listener: Listener | None) -> None:
    """Has ranges that open from now on tell `listener`, or, with None, nobody."""
    global _listener
    _listener = listener
