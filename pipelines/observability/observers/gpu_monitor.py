"""GPU metrics of a node during training (all figures that its cards report), and the energy per token in joules.

One thread per node (on local rank 0) reads the cards used by this run and hands each reading to the sender; the loop only
counts steps. Names are those of MLflow's own monitor: `system/gpu_0_utilization_percentage`, with several nodes
`system/<node>/gpu_0_...`. A run on CPUs reports the energy of the CPU packages instead, if it is readable. Energy is counted
from before the first step to the end, including validation, checkpoints and the sample.

    monitor = GpuMonitor(sender, every_s=5.0)
    monitor.on_start(facts); ...; monitor.on_step(1); ...; monitor.on_end({})
"""

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from raystride.pipelines.observability.hardware.amd import amd_cards
from raystride.pipelines.observability.hardware.energy import (
    POWERCAP,
    Device,
    DeviceLostError,
    EnergyMeter,
    Figures,
    rapl_packages,
)
from raystride.pipelines.observability.hardware.nvml import nvidia_cards
from raystride.pipelines.observability.observers.observer import BackgroundObserver, RunFacts
from raystride.pipelines.observability.record.entry import NodeTotals, new_entry
from raystride.pipelines.observability.record.state import run_figures

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender

LAST_READING_S = 2.0
"""Seconds to wait at the end of training for a last reading: the driver may not answer."""

Log = Callable[[str], None]


class GpuMonitor(BackgroundObserver):
    """Observer that sends an entry of kind `system` and one of kind `totals` every `every_s` seconds and at the end."""

    def __init__(self, sender: "Sender", every_s: float, powercap: Path = POWERCAP) -> None:
        super().__init__(LAST_READING_S)
        self._sender = sender
        self._every_s = every_s
        self._powercap = powercap
        self._steps = self._num_readings = 0
        self._sampler: DeviceSampler | None = None
        self._is_ending = False

    def on_start(self, run: RunFacts) -> None:
        if run.local_rank == 0:
            self._start_thread("gpu-monitor", partial(self._send_reading, run), self._every_s, self._sender.warn).wake()

    def on_step(self, step: int) -> None:
        self._steps += 1

    def _stop_thread(self) -> None:
        self._is_ending = True
        if self._thread is not None and not self._thread.wake().join(self._join_timeout_s):
            self._thread.stop()
            self._sender.warn(
                "the GPUs' driver did not answer at the end, so the figures of energy end earlier than the training"
            )
        self._thread = None

    def _send_reading(self, run: RunFacts) -> bool:
        """Sends a reading, after a first one to compare with; returns whether it was the last, or there is no device."""
        last = self._is_ending
        if self._sampler is None:
            devices = find_devices(run, self._powercap, self._sender.warn)
            if not devices:
                return True
            self._sampler = DeviceSampler(devices, run, self._sender.warn)
            self._sampler.sample(time.monotonic(), self._steps)
            if not last:
                return False
        figures = self._sampler.sample(time.monotonic(), self._steps, last)
        values = {run.system_prefix + name: value for name, value in figures.items()}
        self._sender.put(new_entry("system", values, step=self._num_readings))
        self._sender.put(new_entry("totals", {**self._sampler.totals(), "source": self._sender.name}))
        self._num_readings += 1
        return last


class DeviceSampler:
    """Reads devices on request and accumulates their energy; `sample` takes the time, in seconds of any clock."""

    def __init__(self, devices: Sequence[Device], run: RunFacts, log: Log) -> None:
        self._meters: dict[str, tuple[Device, EnergyMeter]] = {device.name: (device, EnergyMeter()) for device in devices}
        self._run = run
        self._log = log
        self._covers = "GPUs" if run.device != "cpu" else "CPU packages"
        self._lost: set[str] = set()
        self._start: tuple[float, int] | None = None
        self._tokens = 0.0
        self._seconds = 0.0

    def sample(self, now: float, steps: int, last: bool = False) -> Figures:
        """Returns the figures of every device as `<device>_<figure>`, and this node's sums, after `steps` of this worker."""
        if self._start is None:
            self._start = now, steps
        self._seconds, self._tokens = now - self._start[0], (steps - self._start[1]) * self._run.tokens_per_step
        shown: Figures = {}
        for name, (device, meter) in self._meters.items():
            if name in self._lost:
                continue
            try:
                figures = device.read()
            except DeviceLostError as error:
                self._lost.add(name)
                self._log(f"{name} of {self._run.node} is lost ({error}): its figures end here, and so do those of energy")
                continue
            shown |= {f"{name}_{figure}": value for figure, value in meter.add_reading(figures, now, last).items()}
        # A node's joules are divided by the tokens of all nodes, so that the per-node figures add up.
        node_totals: NodeTotals = {**self._sum_meters(), "nodes": 1, "tokens": self._tokens, "seconds": self._seconds}
        return shown | {name: value for name, value in run_figures([node_totals]).items() if isinstance(value, float)}

    def totals(self) -> NodeTotals:
        """Returns this node's part of the run's totals; tokens and seconds, equal on all nodes, only from rank 0."""
        if self._run.rank:
            return self._sum_meters()
        return {**self._sum_meters(), "tokens": self._tokens, "seconds": self._seconds}

    def _sum_meters(self) -> NodeTotals:
        meters = [meter for _, meter in self._meters.values()]
        throttled = [meter.throttled_seconds for meter in meters if meter.throttled_seconds is not None]
        by_reason: Figures = {}
        for reason, seconds in (item for meter in meters for item in meter.throttled.items()):
            by_reason[reason] = by_reason.get(reason, 0.0) + seconds
        return {
            "node": self._run.node,
            "nodes": self._run.nodes,
            "covers": self._covers,
            "joules": sum(meter.joules or 0.0 for meter in meters),
            "unmetered": sum(meter.joules is None or name in self._lost for name, (_, meter) in self._meters.items()),
            "throttled_seconds": sum(throttled) if throttled else None,
            "throttled_by_reason": by_reason,
            "readings": sum(meter.readings for meter in meters),
            "idle": sum(meter.idle for meter in meters),
        }


def find_devices(run: RunFacts, powercap: Path, log: Log) -> list[Device]:
    """Returns the devices that count for the energy of this node: its GPUs, or the CPU packages for a run on CPUs."""
    if run.device == "cpu":
        return list(rapl_packages(powercap))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        return list(nvidia_cards(visible, run.world))
    except Exception as error:  # pynvml is missing or finds no driver: the GPU is not NVIDIA's, or hidden
        reason = f"{type(error).__name__}: {error}"
    try:
        return list(amd_cards(os.environ.get("HIP_VISIBLE_DEVICES", visible), run.world))
    except ImportError:
        pass
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    log(f"the GPUs of {run.node} are not watched ({reason})")
    return []
