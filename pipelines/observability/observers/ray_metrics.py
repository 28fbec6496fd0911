"""Loss and speed as Ray metrics, for live display in the Ray dashboard, Prometheus and Grafana.

Gauges are named in `GAUGES` and tagged with `run`, `rank`, `owner` and `tags`; Prometheus exports them as
`ray_raystride_loss` and so on. Rank 0 reports the figures that are equal on all workers, every rank its step times and data
wait, so that a slow one shows. The driver has others: `launch.console.run_metrics`.
Outside a Ray process this observer does nothing, and ray is not imported. `deploy/monitoring/` has a dashboard of them.

    observers = [Throughput(), RayMetrics(), Tracker(sender)]
"""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from raystride.pipelines.observability.observers.observer import Observer, RunFacts

if TYPE_CHECKING:
    from ray.util.metrics import Gauge


class GaugeSpec(NamedTuple):
    """Name and description of a gauge."""

    name: str
    description: str
    per_rank: bool = False
    """Whether every rank reports its own value."""


GAUGES = {
    "train_loss": GaugeSpec("raystride_loss", "Training loss of the newest interval."),
    "val_loss": GaugeSpec("raystride_val_loss", "Loss of the newest validation."),
    "tokens_per_second": GaugeSpec(
        "raystride_tokens_per_second", "Tokens a second of the newest interval, all workers together."
    ),
    "mfu": GaugeSpec(
        "raystride_mfu", "Share of the devices' peak FLOP/s that the model used, 0 to 1; where the peak is known."
    ),
    "step_seconds_p50": GaugeSpec(
        "raystride_step_seconds", "Median seconds of a step of the newest interval.", per_rank=True
    ),
    "data_wait_share": GaugeSpec(
        "raystride_data_wait_share", "Share of the time that waits for data, 0 to 1.", per_rank=True
    ),
}
STEP = GaugeSpec("raystride_step", "Newest step that was logged.")
SAVE_WAIT = GaugeSpec(
    "raystride_save_wait_seconds", "Seconds that training has waited for a checkpoint's storage, from 10 on; else 0."
)


LABELS = ("owner", "tags")
"""Labels of every metric beside `run`: `record.owner`, and `record.tags` as `project=parser,team=a`, as a metric's labels
have to be the same ones for all runs."""


def fill_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Returns a value for each of `LABELS`; Ray takes no empty one."""
    return {name: labels.get(name) or "none" for name in LABELS}


class RayMetrics(Observer):
    """Observer that sets the gauges at every log."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}
        self._step: Gauge | None = None
        self._save_wait: Gauge | None = None

    def on_start(self, run: RunFacts) -> None:
        ray = sys.modules.get("ray")  # if it is not imported, it is not initialised either
        if ray is None or not ray.is_initialized():
            return
        from ray.util.metrics import Gauge

        def make_gauge(spec: GaugeSpec) -> Gauge:
            gauge = Gauge(spec.name, description=spec.description, tag_keys=("run", "rank", *LABELS))
            gauge.set_default_tags({"run": run.run, "rank": str(run.rank), **fill_labels(run.labels)})
            return gauge

        self._gauges = {key: make_gauge(spec) for key, spec in GAUGES.items() if spec.per_rank or run.rank == 0}
        if run.rank == 0:
            self._step, self._save_wait = make_gauge(STEP), make_gauge(SAVE_WAIT)
            self._save_wait.set(0.0)

    def on_save_wait(self, step: int, seconds: float) -> None:
        if self._save_wait:
            self._save_wait.set(seconds)

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        if self._step:
            self._step.set(step)
        for key, gauge in self._gauges.items():
            if key in measured:
                gauge.set(float(measured[key]))
