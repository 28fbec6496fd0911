"""Loss and speed as Ray metrics, so that the Ray dashboard, Prometheus and Grafana show a training while it runs.

Gauges as `GAUGES` names them, with the tags `run` and `rank`; Prometheus gets them as `ray_raystride_loss` and so on. Rank 0
tells what is the same for all workers, every rank its step times and its waiting for data, so that a slow one shows. Outside
a Ray process this observer does nothing, and ray is not imported. `deploy/monitoring/` has a dashboard of them.

    observers = [Throughput(), RayMetrics(), Tracker(sender)]
"""

import sys
from typing import TYPE_CHECKING, NamedTuple

from raystride.pipelines.observers.observer import Observer, RunFacts

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


class ShownFigure(NamedTuple):
    """How a figure is shown."""

    name: str
    text: str
    each: bool = False
    """Whether every rank tells its own."""


GAUGES = {
    "train_loss": ShownFigure("raystride_loss", "Training loss of the newest interval."),
    "val_loss": ShownFigure("raystride_val_loss", "Loss of the newest validation."),
    "tokens_per_second": ShownFigure(
        "raystride_tokens_per_second", "Tokens a second of the newest interval, all workers together."
    ),
    "mfu": ShownFigure(
        "raystride_mfu", "Share of the devices' peak FLOP/s that the model used, 0 to 1; where the peak is known."
    ),
    "step_seconds_p50": ShownFigure("raystride_step_seconds", "Median seconds of a step of the newest interval.", each=True),
    "data_wait_share": ShownFigure("raystride_data_wait_share", "Share of the time that waits for data, 0 to 1.", each=True),
}
STEP = ShownFigure("raystride_step", "Newest step that was logged.")


class RayMetrics(Observer):
    """Sets the gauges at every log."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._step: Gauge | None = None

    def on_start(self, run: RunFacts) -> None:
        ray = sys.modules.get("ray")  # where nobody has imported it, it is not initialised either
        if ray is None or not ray.is_initialized():
            return
        from ray.util.metrics import Gauge

        def gauge(shown: ShownFigure) -> Gauge:
            made = Gauge(shown.name, description=shown.text, tag_keys=("run", "rank"))
            made.set_default_tags({"run": run.run, "rank": str(run.rank)})
            return made

        self._gauges = {key: gauge(shown) for key, shown in GAUGES.items() if shown.each or run.rank == 0}
        self._step = gauge(STEP) if run.rank == 0 else None

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._step:
            self._step.set(step)
        for key, gauge in self._gauges.items():
            if key in measured:
                gauge.set(float(measured[key]))
