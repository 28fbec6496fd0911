"""CPU, memory, disk and network usage of a node during training, under the names of MLflow's own monitor.

One thread per node (on local rank 0) takes a reading every few seconds and hands it to the sender with its time; the
training loop is not involved. Units are percent, and megabytes of 10^6 bytes as in MLflow; network figures count from the
start. With one node the names are `system/cpu_utilization_percentage` and so on; with several, `system/<node>/...`.

    monitor = HostMonitor(sender, every_s=5.0)
    monitor.on_start(facts); ...; monitor.on_end({})
"""

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from raystride.pipelines.observability.observers.observer import BackgroundObserver, RunFacts
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.system.limits import usable_memory

if TYPE_CHECKING:
    from raystride.pipelines.observability.record.sender import Sender


class HostMonitor(BackgroundObserver):
    """Observer that sends one entry of kind `system` every `every_s` seconds, from the start of the loop to its end."""

    def __init__(self, sender: "Sender", every_s: float) -> None:
        super().__init__()
        self._sender = sender
        self._every_s = every_s
        self._network_at_start: Any = None
        self._num_readings = -1

    def on_start(self, run: RunFacts) -> None:
        if run.local_rank == 0:
            send_reading = partial(self._send_reading, run.system_prefix)
            self._start_thread("host-monitor", send_reading, self._every_s, self._sender.warn).wake()

    def _send_reading(self, prefix: str) -> None:
        """Sends a reading; the first call only takes what the others compare with, for the processor in this thread."""
        import psutil

        if self._num_readings < 0:
            psutil.cpu_percent()
            self._network_at_start = psutil.net_io_counters()
        else:
            values = {prefix + name: value for name, value in read_host(self._network_at_start).items()}
            self._sender.put(new_entry("system", values, step=self._num_readings))
        self._num_readings += 1


def read_host(network_at_start: Any) -> dict[str, float]:
    """Returns one reading by MLflow's names without prefix; `network_at_start` holds the counters at start (or None)."""
    import psutil

    memory, disk, network = psutil.virtual_memory(), psutil.disk_usage(os.sep), psutil.net_io_counters()
    reading = {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": round(memory.used / 1e6, 1),
        "system_memory_usage_percentage": round(memory.used / min(memory.total, usable_memory()) * 100, 1),
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": round(disk.used / 1e6, 1),
        "disk_available_megabytes": round(disk.free / 1e6, 1),
    }
    if network is not None and network_at_start is not None:  # a container without a network has no counters
        reading["network_receive_megabytes"] = round((network.bytes_recv - network_at_start.bytes_recv) / 1e6, 3)
        reading["network_transmit_megabytes"] = round((network.bytes_sent - network_at_start.bytes_sent) / 1e6, 3)
    return reading
