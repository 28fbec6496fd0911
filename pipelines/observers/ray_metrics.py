"""Loss and speed as Ray metrics, so that the Ray dashboard and Prometheus show a training while it runs.

Gauges `raystride_loss`, `raystride_tokens_per_second` (tokens/s) and `raystride_step`, each with the tag `run`. Outside a
Ray process this observer does nothing, and ray is not imported.

    observers = [Throughput(), RayMetrics(), Tracker(sender)]
"""

import sys
from typing import Any

from pipelines.observers.observer import Observer, RunFacts

GAUGES = {
    "train_loss": ("raystride_loss", "Training loss of the newest interval."),
    "tokens_per_second": ("raystride_tokens_per_second", "Tokens a second of the newest interval, all workers together."),
}


class RayMetrics(Observer):
    """Sets the gauges on rank 0 at every log."""

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}
        self._step: Any = None

    def on_start(self, run: RunFacts) -> None:
        ray = sys.modules.get("ray")  # where nobody has imported it, it is not initialised either
        if run.rank != 0 or ray is None or not ray.is_initialized():
            return
        from ray.util.metrics import Gauge

        def gauge(name: str, text: str) -> Gauge:
            made = Gauge(name, description=text, tag_keys=("run",))
            made.set_default_tags({"run": run.run})
            return made

        self._gauges = {key: gauge(name, text) for key, (name, text) in GAUGES.items()}
        self._step = gauge("raystride_step", "Newest step that was logged.")

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._step is None:
            return
        self._step.set(step)
        for key, gauge in self._gauges.items():
            if key in measured:
                gauge.set(float(measured[key]))
