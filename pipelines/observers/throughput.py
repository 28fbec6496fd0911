"""Training speed: tokens per second, seconds per step, phase shares, time to first step, MFU, peak memory.

The clock runs from the end of one step to the end of the next, including waiting for data. Time outside training
(validation, waiting for a checkpoint) is reported through `on_pause` and excluded. The first step, which compiles and warms
up, only starts the clock. All figures come from the host's clock, and nothing here waits for the device: single steps of a
GPU run ahead of it, and only intervals that end with the loop's own wait (every logging step) are exact.

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
from raystride.pipelines.phases import EXCLUSIVE_PHASES, phase

if TYPE_CHECKING:
    from raystride.pipelines.record.summary import RunSummary

MAX_KEPT_STEPS = 100_000
"""Step times kept for the percentiles of the whole attempt; beyond that, a uniform random sample of them (800 kB)."""


class Throughput(Observer):
    """Adds `tokens_per_second`, `step_seconds_p50`, `step_seconds_p95`, `peak_memory_bytes` and, if known, `mfu`; to an
    interval also `step_seconds_mean`.

    Tokens are those of whole steps as the task counts them: predicted tokens of a decoder, tokens of a text, of source and
    target including their end tokens, one per image. If samples differ in length, the mean per step is used; padding never
    counts.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._run = RunFacts(run="", attempt="")
        self._peak: float | None = None
        self._last: float | None = None
        self._paused = 0.0
        self._interval = array("d")
        self._reservoir = array("d")
        self._steps = 0
        self._seconds = 0.0
        # Sampling step times must not touch the training's own random state.
        self._random = random.Random(0)

    def on_start(self, run: RunFacts) -> None:
        self._run = run
        self._peak = peak_flops(run.device, run.precision)

    def on_pause(self, seconds: float) -> None:
        self._paused += seconds

    def on_step(self, step: int) -> None:
        now = self._clock()
        if self._last is not None:
            self._record_step(now - self._last - self._paused)
        self._last, self._paused = now, 0.0

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        measured["peak_memory_bytes"] = float(peak_memory_bytes())
        if not self._interval:
            return
        seconds, steps = sum(self._interval), len(self._interval)
        measured.update(self._speed_metrics(seconds, steps, self._interval))
        measured["step_seconds_mean"] = seconds / steps
        self._interval = array("d")

    def on_end(self, summary: "RunSummary") -> None:
        summary["peak_memory_bytes"] = peak_memory_bytes()
        if self._steps:
            summary.update(cast("RunSummary", self._speed_metrics(self._seconds, self._steps, self._reservoir)))

    def _record_step(self, seconds: float) -> None:
        self._steps += 1
        self._seconds += seconds
        self._interval.append(seconds)
        if len(self._reservoir) < MAX_KEPT_STEPS:
            self._reservoir.append(seconds)
        elif (place := self._random.randrange(self._steps)) < MAX_KEPT_STEPS:  # algorithm R (Vitter, 1985)
            self._reservoir[place] = seconds

    def _speed_metrics(self, seconds: float, steps: int, times: "array[float]") -> dict[str, float]:
        median, p95 = np.percentile(np.frombuffer(times), [50, 95])
        figures = {"step_seconds_p50": float(median), "step_seconds_p95": float(p95)}
        if seconds > 0 and self._run.tokens_per_step:
            rate = self._run.tokens_per_step * steps / seconds
            figures["tokens_per_second"] = rate
            if self._peak and self._run.flops_per_token:
                figures["mfu"] = rate * self._run.flops_per_token / (self._peak * self._run.world)
        return figures


class PhaseShares(Observer):
    """Adds `phase_<name>_share` for each phase of `EXCLUSIVE_PHASES` to the figures of an interval, by the host's clock.

    An interval lasts from one log to the next; the shares of phases that are not nested add up to at most 1, and the
    remainder is the loop itself. On GPUs the host runs ahead: its forward and backward are only kernel launches.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._start_interval()

    def on_start(self, run: RunFacts) -> None:
        self._start_interval()

    def on_step(self, step: int) -> None:
        self._steps += 1

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if not self._steps:  # a validation's log directly after its step's log
            return
        elapsed = self._clock() - self._began
        for name, before in self._seconds.items():
            measured[f"phase_{name}_share"] = (phase(name).seconds - before) / elapsed
        self._start_interval()

    def _start_interval(self) -> None:
        self._steps = 0
        self._began = self._clock()
        self._seconds = {name: phase(name).seconds for name in EXCLUSIVE_PHASES}


class TimeToFirstStep(Observer):
    """Adds `seconds_to_first_step` and `start/<milestone>_s`, seconds since the previous milestone, to the first figures.

    The driver and then each worker note the times of their milestones, in seconds since 1970.
    """

    def __init__(self, started_at: float, milestones: dict[str, float]) -> None:
        self._started_at = started_at
        self._milestones = dict(milestones)
        self._reported = False

    def on_start(self, run: object) -> None:
        self._milestones["build"] = time.time()

    def on_step(self, step: int) -> None:
        if "first_step" not in self._milestones:
            self._milestones["first_step"] = time.time()

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._reported:
            return
        self._reported = True
        before = self._started_at
        for name, reached in sorted(self._milestones.items(), key=lambda milestone: milestone[1]):
            measured[f"start/{name}_s"] = max(0.0, reached - before)  # host clocks differ and may be set back
            before = reached
        measured["seconds_to_first_step"] = max(0.0, before - self._started_at)

    def on_end(self, summary: "RunSummary") -> None:
        if "first_step" in self._milestones:
            summary["seconds_to_first_step"] = self._milestones["first_step"] - self._started_at


def peak_memory_bytes() -> int:
    """Returns this process's peak memory: allocated on its GPU by PyTorch's count, else resident in main memory."""
    import torch

    if torch.cuda.is_available() and (allocated := torch.cuda.max_memory_allocated()):
        return allocated
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
