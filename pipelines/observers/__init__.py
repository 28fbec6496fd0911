"""What watches a training: one file an observer, each alone and optional, none of them known to the model.

The loop holds a list of them and calls the same hook on each, in order; the tracker comes last and sends what all measured.
Nothing is imported here, and torch, psutil, rich and ray only where they are used: the driver, which draws `progress`, needs
no torch, and a worker no rich.

    observers: list[Observer] = [Throughput(), HostMonitor(sender, 5.0), RayMetrics(), Tracker(sender)]
"""
