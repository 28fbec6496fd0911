"""Observers of a training run: one per file, each independent and optional, none of them known to the model.

The loop holds a list of observers and calls the same hook on each, in order; the tracker comes last and sends all measured
figures. Nothing is imported here, and torch, psutil, rich and ray only on use: the driver, which draws `progress`, needs no
torch, and a worker needs no rich.

    observers: list[Observer] = [Throughput(), HostMonitor(sender, 5.0), RayMetrics(), Tracker(sender)]
"""
