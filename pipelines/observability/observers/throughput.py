"""Training speed: tokens per second, seconds per step, phase shares, time to first step, MFU, peak memory.

The clock runs from the end of one step to the end of the next, including waiting for data. Time outside training
(validation, waiting for a checkpoint) is reported through `on_pause` and excluded. The first step, which compiles and warms
up, only starts the clock. All figures come from the host's clock, and nothing here waits for the device: single steps of a
GPU run ahead of it, and only intervals that end with the loop's own wait (every logging step) are exact.

MFU divides by the dense peak FLOP/s of a data sheet, half of a figure "with sparsity". `fp32` is the rate outside the tensor
cores, `tf32` and `bf16` the tensor cores' with fp32 accumulation. A device or precision that is not listed has no MFU: a
guess would be worse than nothing.

    throughput = Throughput(); throughput.on_start(facts)
    throughput.on_step(1); throughput.on_step(2); throughput.on_log(2, measured)       # adds tokens_per_second, mfu, ...
    peak_flops("NVIDIA H100 80GB HBM3", "bf16")               # 989.4e12; None for a CPU
"""

import random
import resource
import sys
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import numpy as np

from raystride.pipelines.observability.observers.observer import Observer, RunFacts
from raystride.pipelines.observability.phases import EXCLUSIVE_PHASES, phase

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.summary import RunSummary
from typing import NamedTuple


class PeakFlops(NamedTuple):
    """Dense peak FLOP/s of a device by precision, and the data sheet that states them."""

    flops: dict[str, float]
    source: str


# The first name contained in the device's name matches, so the longer names of a family come before the shorter.
PEAKS: dict[str, PeakFlops] = {
    "GB200": PeakFlops({"bf16": 2500e12, "tf32": 1250e12, "fp32": 80e12}, "NVIDIA GB200 NVL72 data sheet, one of 72 GPUs"),
    "B200": PeakFlops({"bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12}, "NVIDIA DGX B200 data sheet, one of eight GPUs"),
    "H200 NVL": PeakFlops(
        {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}, "NVIDIA H200 Tensor Core GPU data sheet, NVL"
    ),
    "H200": PeakFlops({"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}, "NVIDIA H200 Tensor Core GPU data sheet, SXM"),
    "H100 NVL": PeakFlops(
        {"bf16": 835.5e12, "tf32": 417.5e12, "fp32": 60e12}, "NVIDIA H100 Tensor Core GPU data sheet, NVL"
    ),
    "H100 PCIe": PeakFlops(
        {"bf16": 756e12, "tf32": 378e12, "fp32": 51.2e12}, "NVIDIA H100 GPU architecture white paper, PCIe"
    ),
    "H100": PeakFlops(
        {"bf16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}, "NVIDIA H100 GPU architecture white paper, SXM5"
    ),
    "A100": PeakFlops({"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12}, "NVIDIA A100 Tensor Core GPU data sheet"),
    "A10G": PeakFlops({"bf16": 70e12, "tf32": 35e12, "fp32": 31.52e12}, "NVIDIA A10G data sheet (AWS G5)"),
    "A40": PeakFlops({"bf16": 149.7e12, "tf32": 74.8e12, "fp32": 37.4e12}, "NVIDIA A40 data sheet"),
    "L40S": PeakFlops({"bf16": 362.05e12, "tf32": 183e12, "fp32": 91.6e12}, "NVIDIA L40S data sheet"),
    "L4": PeakFlops({"bf16": 121e12, "tf32": 60e12, "fp32": 30.3e12}, "NVIDIA L4 data sheet"),
    "V100-PCIE": PeakFlops({"fp32": 14e12}, "NVIDIA V100 data sheet, PCIe; no bf16"),
    "V100": PeakFlops({"fp32": 15.7e12}, "NVIDIA V100 data sheet, SXM2; no bf16"),
    "T4": PeakFlops({"fp32": 8.1e12}, "NVIDIA T4 data sheet; no bf16"),
    "RTX 4090": PeakFlops(
        {"bf16": 165.2e12, "tf32": 82.6e12, "fp32": 82.6e12}, "NVIDIA Ada GPU architecture white paper, RTX 4090"
    ),
    "RTX 3090": PeakFlops(
        {"bf16": 71e12, "tf32": 35.6e12, "fp32": 35.6e12}, "NVIDIA Ampere GA102 architecture white paper, RTX 3090"
    ),
    "MI300X": PeakFlops({"bf16": 1307.4e12, "tf32": 653.7e12, "fp32": 163.4e12}, "AMD Instinct MI300X data sheet"),
    "MI250X": PeakFlops(
        {"bf16": 191.5e12, "fp32": 23.95e12}, "AMD Instinct MI250X data sheet, one of two dies, as PyTorch sees it"
    ),
}

SLOWER_VARIANTS = frozenset({"laptop", "mobile", "max-q", "d", "mig"})
"""Words in a device's name that mark a slower variant of the data sheet's device, or a slice of it."""


def peak_flops(device: str, precision: str) -> float | None:
    """Returns the dense peak FLOP/s of a device by its name, or None if unknown."""
    if SLOWER_VARIANTS & set(device.lower().split()):
        return None
    for name, peak in PEAKS.items():
        if _matches_name(device, name):
            return peak.flops.get(precision)
    return None


def _matches_name(device: str, name: str) -> bool:
    """Returns whether the device's name has `name` as whole words: `L4` matches `NVIDIA L4`, not `L40S` or `RTX 4090`."""
    words, wanted = device.lower().split(), name.lower().split()
    runs = (words[i : i + len(wanted)] for i in range(len(words)))
    # The last word may continue after a dash: `A100-SXM4-80GB` is an A100.
    return any(run[:-1] == wanted[:-1] and _matches_word(run[-1], wanted[-1]) for run in runs if len(run) == len(wanted))


def _matches_word(word: str, wanted: str) -> bool:
    return word == wanted or word.startswith(f"{wanted}-")


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
