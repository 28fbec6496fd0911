"""How fast a training goes and where its time goes: tokens a second, seconds a step, phases, the start, peak memory.

The clock runs from the end of one step to the end of the next, waiting for data included. What is not training (validation,
waiting for a checkpoint) is told through `on_pause` and left out. The first step, which compiles and warms up, only starts
the clock. The figures come from the host's clock alone: nothing here waits for the device, so single steps of a GPU run
ahead of it, and only intervals that end with the loop's own wait (every logging step) are exact.

    throughput = Throughput()
    throughput.on_start(facts)
    throughput.on_step(1); throughput.on_step(2); throughput.on_log(2, measured)
"""

import random
import resource
import sys
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from raystride.pipelines.hardware.peaks import peak_flops
from raystride.pipelines.observers.observer import Observer, RunFacts
from raystride.pipelines.phases import PARTS, phase

if TYPE_CHECKING:
    from raystride.pipelines.record.summary import RunSummary

KEPT_STEPS = 100_000
"""Step times kept for the percentiles of the whole attempt; beyond that, an even random choice of them (800 kB)."""


class Throughput(Observer):
    """Adds `tokens_per_second`, `step_seconds_p50`, `step_seconds_p95`, `peak_memory_bytes` and, where known, `mfu`; to an
    interval `step_seconds_mean` too.

    Tokens are those of whole steps as the task counts them: what a decoder predicts, a text's, a source's and a target's
    with their ends, an image as one. Of samples that differ in length it is the mean that a step has; padding never counts.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._run = RunFacts(run="", attempt="")
        self._peak: float | None = None
        self._last: float | None = None
        self._paused = 0.0
        self._interval = array("d")
        self._kept = array("d")
        self._steps = 0
        self._seconds = 0.0
        # The choice of step times must not touch the training's own random numbers.
        self._random = random.Random(0)

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        self._peak = peak_flops(run.device, run.precision)

    def on_pause(self, seconds: float) -> None:
        self._paused += seconds

    def on_step(self, step: int) -> None:
        now = self._clock()
        if self._last is not None:
            self._count(now - self._last - self._paused)
        self._last, self._paused = now, 0.0

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        measured["peak_memory_bytes"] = float(peak_memory_bytes())
        if not self._interval:
            return
        seconds, steps = sum(self._interval), len(self._interval)
        measured.update(self._figures(seconds, steps, self._interval))
        measured["step_seconds_mean"] = seconds / steps
        self._interval = array("d")

    def on_end(self, summary: "RunSummary") -> None:
        summary["peak_memory_bytes"] = peak_memory_bytes()
        if self._steps:
            summary.update(cast("RunSummary", self._figures(self._seconds, self._steps, self._kept)))

    def _count(self, seconds: float) -> None:
        self._steps += 1
        self._seconds += seconds
        self._interval.append(seconds)
        if len(self._kept) < KEPT_STEPS:
            self._kept.append(seconds)
        elif (place := self._random.randrange(self._steps)) < KEPT_STEPS:  # algorithm R (Vitter, 1985)
            self._kept[place] = seconds

    def _figures(self, seconds: float, steps: int, times: "array[float]") -> dict[str, float]:
        middle, slow = np.percentile(np.frombuffer(times), [50, 95])
        figures = {"step_seconds_p50": float(middle), "step_seconds_p95": float(slow)}
        if seconds > 0 and self._run.tokens_per_step:
            rate = self._run.tokens_per_step * steps / seconds
            figures["tokens_per_second"] = rate
            if self._peak and self._run.flops_per_token:
                figures["mfu"] = rate * self._run.flops_per_token / (self._peak * self._run.world)
        return figures


class PhaseShares(Observer):
    """Adds `phase_<name>_share` for each phase of `PARTS` to the figures of an interval, by the host's clock.

    An interval goes from one log to the next; the shares of phases that do not contain each other add up to at most 1, and
    what is missing is the loop itself. On GPUs the host runs ahead: its forward and backward are the launching of them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._begin()

    def on_start(self, run: RunFacts) -> None:
        self._begin()

    def on_step(self, step: int) -> None:
        self._steps += 1

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if not self._steps:  # a validation's log right after that of its step
            return
        elapsed = self._clock() - self._began
        for name, before in self._seconds.items():
            measured[f"phase_{name}_share"] = (phase(name).seconds - before) / elapsed
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        self._began = self._clock()
        self._seconds = {name: phase(name).seconds for name in PARTS}


class FirstStep(Observer):
    """Adds `seconds_to_first_step` and `start/<milestone>_s`, seconds since the milestone before, to the first figures.

    Whoever passes a milestone (the driver, then each worker) notes the time, in seconds since 1970.
    """

    def __init__(self, started_at: float, milestones: dict[str, float]) -> None:
        self._started_at = started_at
        self._milestones = dict(milestones)
        self._told = False

    def on_start(self, run: object) -> None:
        self._milestones["build"] = time.time()

    def on_step(self, step: int) -> None:
        if "first_step" not in self._milestones:
            self._milestones["first_step"] = time.time()

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._told:
            return
        self._told = True
        before = self._started_at
        for name, reached in sorted(self._milestones.items(), key=lambda mark: mark[1]):
            measured[f"start/{name}_s"] = max(0.0, reached - before)  # clocks of two hosts differ, and one may be set back
            before = reached
        measured["seconds_to_first_step"] = max(0.0, before - self._started_at)

    def on_end(self, summary: "RunSummary") -> None:
        if "first_step" in self._milestones:
            summary["seconds_to_first_step"] = self._milestones["first_step"] - self._started_at


def peak_memory_bytes() -> int:
    """The most memory that this process held so far: on its GPU by PyTorch's count, else resident in main memory."""
    import torch

    if torch.cuda.is_available() and (held := torch.cuda.max_memory_allocated()):
        return held
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
