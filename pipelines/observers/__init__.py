"""What watches a training: one file an observer, each alone and optional, none of them known to the model.

The loop holds a list of them and calls the same hook on each, in order; the tracker comes last and sends what all measured.
This package imports with numpy and torch alone; psutil, rich and ray are imported where they are used.

    observers: list[Observer] = [Throughput(), HostMonitor(sender, 5.0), RayMetrics(), Tracker(sender)]
"""

from pipelines.observers.host_monitor import HostMonitor
from pipelines.observers.observer import Observer, RunFacts
from pipelines.observers.progress import Progress
from pipelines.observers.ray_metrics import RayMetrics
from pipelines.observers.throughput import Throughput
from pipelines.observers.tracker import Tracker

__all__ = ["HostMonitor", "Observer", "Progress", "RayMetrics", "RunFacts", "Throughput", "Tracker"]
