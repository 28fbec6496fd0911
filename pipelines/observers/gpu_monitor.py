"""A node's GPUs while it trains: every figure that its cards tell, and what a token costs in joules.

One thread a node (that of local rank 0) reads the cards that this run uses and hands each reading to the sender; the loop's
part in it is to count steps. Names are those of MLflow's own monitor: `system/gpu_0_utilization_percentage`, with several
nodes `system/<node>/gpu_0_...`. A run on CPUs tells the energy of the processors' packages instead, where it can be read.
Energy is counted from before the first step to the end: validation, checkpoints and the sample belong to what a run costs.

    monitor = GpuMonitor(sender, every_s=5.0)
    monitor.on_start(facts); ...; monitor.on_step(1); ...; monitor.on_end({})
"""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raystride.pipelines.hardware.amd import amd_cards
from raystride.pipelines.hardware.energy import Device, EnergyMeter, Figures, LostError
from raystride.pipelines.hardware.nvml import nvidia_cards
from raystride.pipelines.hardware.rapl import POWERCAP, rapl_packages
from raystride.pipelines.observers.background import Background
from raystride.pipelines.observers.observer import RunFacts
from raystride.pipelines.record.entry import NodeTotals, new_entry
from raystride.pipelines.record.state import run_figures

if TYPE_CHECKING:
    from raystride.pipelines.record.sender import Sender

LAST_READING_S = 2.0
"""Seconds that the end of a training waits for a last reading from a driver that may not answer."""

Warn = Callable[[str], None]


class GpuMonitor(Background):
    """Sends an entry of kind `system` and one of kind `totals` every `every_s` seconds and at the end."""

    def __init__(self, sender: "Sender", every_s: float, powercap: Path = POWERCAP) -> None:
        super().__init__(LAST_READING_S)
        self._sender = sender
        self._every_s = every_s
        self._powercap = powercap
        self._steps = 0

    def on_start(self, run: RunFacts) -> None:
        if run.local_rank == 0:
            self._begin("gpu-monitor", self._watch, run)

    def on_step(self, step: int) -> None:
        self._steps += 1

    def _end(self) -> None:
        super()._end()
        if self._thread is not None and self._thread.is_alive():
            self._warn("the GPUs' driver did not answer at the end, so the figures of energy end earlier than the training")
        self._thread = None

    def _warn(self, text: str) -> None:
        self._sender.warn(text)

    def _watch(self, run: RunFacts) -> None:
        try:
            self._sample(run)
        except Exception as error:  # nothing that a driver does may end a training
            self._warn(f"{run.node}'s GPUs are no longer watched ({type(error).__name__}: {error})")

    def _sample(self, run: RunFacts) -> None:
        devices = find_devices(run, self._powercap, self._warn)
        if not devices:
            return
        sampler = Sampler(devices, run, self._warn)
        prefix = run.system_prefix
        sampler.sample(time.monotonic(), self._steps)
        number, last = 0, False
        while not last:
            last = self._ended.wait(self._every_s)
            figures = sampler.sample(time.monotonic(), self._steps, last)
            self._sender.put(new_entry("system", {prefix + name: value for name, value in figures.items()}, step=number))
            self._sender.put(new_entry("totals", {**sampler.totals(), "source": self._sender.name}))
            number += 1


class Sampler:
    """Reads devices when told to and keeps their accounts; `sample` is given the time, in seconds of any clock."""

    def __init__(self, devices: Sequence[Device], run: RunFacts, warn: Warn) -> None:
        self._meters: dict[str, tuple[Device, EnergyMeter]] = {device.name: (device, EnergyMeter()) for device in devices}
        self._run = run
        self._warn = warn
        self._covers = "GPUs" if run.device != "cpu" else "CPU packages"
        self._gone: set[str] = set()
        self._began: tuple[float, int] | None = None
        self._tokens = 0.0
        self._seconds = 0.0

    def sample(self, now: float, steps: int, last: bool = False) -> Figures:
        """Figures of every device as `<device>_<figure>`, and this node's own sums, after `steps` of this worker."""
        if self._began is None:
            self._began = now, steps
        self._seconds, self._tokens = now - self._began[0], (steps - self._began[1]) * self._run.tokens_per_step
        shown: Figures = {}
        for name, (device, meter) in self._meters.items():
            if name in self._gone:
                continue
            try:
                figures = device.read()
            except LostError as error:
                self._gone.add(name)
                self._warn(f"{name} of {self._run.node} is lost ({error}): its figures end here, and so do those of energy")
                continue
            shown |= {f"{name}_{what}": value for what, value in meter.add(figures, now, last).items()}
        # On its own a node's share of the joules goes by the tokens of all, so that the shares of all nodes add up.
        own: NodeTotals = {**self._sums(), "nodes": 1, "tokens": self._tokens, "seconds": self._seconds}
        return shown | {name: value for name, value in run_figures([own]).items() if isinstance(value, float)}

    def totals(self) -> NodeTotals:
        """What this node adds to the run's; tokens and seconds, the same everywhere, only where rank 0 is."""
        if self._run.rank:
            return self._sums()
        return {**self._sums(), "tokens": self._tokens, "seconds": self._seconds}

    def _sums(self) -> NodeTotals:
        meters = [meter for _, meter in self._meters.values()]
        told = [meter.throttled_seconds for meter in meters if meter.throttled_seconds is not None]
        by_reason: Figures = {}
        for reason, held in (item for meter in meters for item in meter.throttled.items()):
            by_reason[reason] = by_reason.get(reason, 0.0) + held
        return {
            "node": self._run.node,
            "nodes": self._run.nodes,
            "covers": self._covers,
            "joules": sum(meter.joules or 0.0 for meter in meters),
            "unmetered": sum(meter.joules is None or name in self._gone for name, (_, meter) in self._meters.items()),
            "throttled_seconds": sum(told) if told else None,
            "throttled_by_reason": by_reason,
            "readings": sum(meter.readings for meter in meters),
            "idle": sum(meter.idle for meter in meters),
        }


def find_devices(run: RunFacts, powercap: Path, warn: Warn) -> list[Device]:
    """What this node's part of the run draws its power through: its GPUs, or for a run on CPUs the processors' packages."""
    if run.device == "cpu":
        return list(rapl_packages(powercap))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        return list(nvidia_cards(visible, run.world))
    except Exception as error:  # pynvml is missing or finds no driver: then the GPU is not NVIDIA's, or hidden from us
        reason = f"{type(error).__name__}: {error}"
    try:
        return list(amd_cards(os.environ.get("HIP_VISIBLE_DEVICES", visible), run.world))
    except ImportError:
        pass
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    warn(f"the GPUs of {run.node} are not watched ({reason})")
    return []
