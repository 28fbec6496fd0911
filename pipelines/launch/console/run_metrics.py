"""State of a run as Ray metrics of its driver, which lives when workers do not: to alert on.

Prometheus exports them as `ray_raystride_run_state` and so on, with the labels `run`, `owner` and `tags`;
`deploy/monitoring/alerts.yml` has rules for them. Ages are by the driver's own clock. They vanish with the driver.

    metrics = RunMetrics(job, storage)                        # after ray.init
    hooks = metrics.attach(hooks)                             # sees each state of the run, and why it waits
    metrics.set_state("finished")
"""

import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from raystride.pipelines.launch.console.session import SessionHooks, Watcher
from raystride.pipelines.observability.observers.ray_metrics import LABELS, fill_labels
from raystride.pipelines.observability.record.state import TrainingState
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker.job import Job

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

STATES = ("starting", "waiting", "training", "finished", "stopped", "failed")
"""Values of the label `state`, of which one is 1. `waiting`: for room on the cluster."""
RUN_STATE = "raystride_run_state"
DRIVER_GAUGES = {
    "restarts": ("raystride_restarts", "Groups of workers of this job after the first one."),
    "failed_saves": ("raystride_failed_saves", "Checkpoints of this job that the storage refused."),
    "checkpoint_age": (
        "raystride_checkpoint_age_seconds", "Seconds since the newest checkpoint was committed, or since the first step."
    ),
    "checkpoint_interval": (
        "raystride_checkpoint_interval_seconds", "Seconds between two checkpoints, by the settings and the pace of the run."
    ),
    "mlflow_backlog": ("raystride_mlflow_backlog_entries", "Entries of the journal that MLflow lacks."),
    "waiting": ("raystride_waiting_seconds", "Seconds that the run has waited for room on the cluster; else 0."),
    "storage_free": ("raystride_storage_free_bytes", "Free bytes of the disk that holds the storage."),
}  # fmt: skip
"""Names and descriptions of the driver's gauges."""
DISK_EVERY_S = 30.0
MAX_POINTS = 64
"""Steps by which the pace of a run is measured."""


class RunMetrics(Watcher):
    """Watcher that sets the gauges with each state of the run, beside another watcher."""

    def __init__(self, job: Job, storage: Folder, clock: Callable[[], float] = time.monotonic) -> None:
        self._checkpoint, self._storage, self._clock = job.config.checkpoint, storage, clock
        self._tags = {"run": job.run, **fill_labels(job.labels)}
        self._other = Watcher()
        self._gauges = {key: self._make_gauge(name, about) for key, (name, about) in DRIVER_GAUGES.items()}
        self._states = self._make_gauge(RUN_STATE, "1 for the state that the run is in, 0 for the others.", "state")
        self._waits_since: float | None = None
        self._saved: tuple[int | None, float] | None = None
        """Step of the newest checkpoint, None before the first, and when this was seen."""
        self._points = deque[tuple[float, int]](maxlen=MAX_POINTS)
        self._disk_at = float("-inf")
        self.set_state("starting")

    def _make_gauge(self, name: str, about: str, *more: str) -> "Gauge":
        from ray.util.metrics import Gauge

        gauge = Gauge(name, description=about, tag_keys=("run", *LABELS, *more))
        gauge.set_default_tags(self._tags)
        return gauge

    def attach(self, hooks: SessionHooks) -> SessionHooks:
        """Returns hooks that tell these metrics too why a run waits, and its states."""
        self._other, describe_wait = hooks.watcher, hooks.pending_reason

        def note_wait() -> str | None:
            reason = describe_wait()
            self._waits_since = (self._waits_since or self._clock()) if reason else None
            return reason

        return replace(hooks, watcher=self, pending_reason=note_wait)

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """Sets the gauges, and passes the state on."""
        self._set_gauges(state)
        self._other.on_state(state, request_stop)

    def on_failure(self, error: BaseException) -> None:
        """Sets the state to `failed`, and passes the error on."""
        self.set_state("failed")
        self._other.on_failure(error)

    def set_state(self, state: str) -> None:
        """Sets the state, one of `STATES`."""
        for name in STATES:
            self._states.set(float(name == state), tags={"state": name})

    def _set_gauges(self, state: TrainingState) -> None:
        now, step = self._clock(), state.get("step")
        waits_since = None if step else self._waits_since
        self.set_state("training" if step else "starting" if waits_since is None else "waiting")
        self._gauges["waiting"].set(0.0 if waits_since is None else now - waits_since)
        self._gauges["restarts"].set(float(max(0, (state.get("groups") or 0) - 1)))
        self._gauges["failed_saves"].set(float(state.get("failed_saves") or 0))
        self._gauges["mlflow_backlog"].set(float(state.get("mlflow_backlog") or 0))
        if step and self._checkpoint.every:
            self._set_checkpoints(now, step, state.get("checkpoint_step"))
        if self._storage.local and now - self._disk_at >= DISK_EVERY_S:
            self._disk_at = now
            self._gauges["storage_free"].set(float(shutil.disk_usage(self._storage.local).free))

    def _set_checkpoints(self, now: float, step: int, saved: int | None) -> None:
        if self._saved is None or self._saved[0] != saved:
            self._saved = (saved, now)
        self._gauges["checkpoint_age"].set(now - self._saved[1])
        if not self._points or step > self._points[-1][1]:
            self._points.append((now, step))
        (first, low), (last, high) = self._points[0], self._points[-1]
        by_steps = float("inf")
        if high > low and not self._checkpoint.every_epochs:
            by_steps = self._checkpoint.every * (last - first) / (high - low)
        interval = min(by_steps, 60.0 * self._checkpoint.minutes or float("inf"))
        if interval < float("inf"):
            self._gauges["checkpoint_interval"].set(interval)
