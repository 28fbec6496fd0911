"""How fast a training goes: tokens a second, seconds a step, model FLOP/s utilisation, peak memory.

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
from array import array
from time import perf_counter
from typing import TYPE_CHECKING, cast

import numpy as np

from raystride.pipelines.hardware.peaks import peak_flops
from raystride.pipelines.observers.observer import Observer, RunFacts

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

    def __init__(self) -> None:
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
        now = perf_counter()
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


def peak_memory_bytes() -> int:
    """The most memory that this process held so far: on its GPU by PyTorch's count, else resident in main memory."""
    import torch

    if torch.cuda.is_available() and (held := torch.cuda.max_memory_allocated()):
        return held
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB, macOS in bytes
