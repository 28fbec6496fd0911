"""Status of a submitted training in Ray's dashboard and job API: run, storage, and progress.

with JobStatusReporter(job_metadata("mine", "s3://bucket/runs", mlflow=True), folder) as page:  # job_name, raystride.run
    page.on_state(recorder.state(), request_stop)         # message: step 25/30  loss 0.0036
    page.finish(summary)                                  # metadata: raystride.status finished, raystride.steps 30
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from raystride.locations import __version__
from raystride.pipelines.launch.cluster.internals import is_submitted_job, update_job_metadata
from raystride.pipelines.launch.console.progress import progress_line
from raystride.pipelines.launch.console.session import Watcher
from raystride.pipelines.observability.record.mlflow.links import is_on_server, run_link
from raystride.pipelines.observability.record.mlflow.log import read_reference
from raystride.pipelines.observability.record.state import TrainingState
from raystride.pipelines.system.storage.folder import Folder

UPDATE_INTERVAL_S = 5.0
BARS = "━╌"
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
RAY_STOP_WAIT_S, MIN_STOP_WAIT_S = 3.0, 60.0
"""Seconds from Ray's SIGTERM to its SIGKILL without that variable, and the least that docs and deployment files give."""
FIGURES = ("steps", "train_loss", "val_loss")


def job_metadata(run: str, storage: str, mlflow: bool, tags: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the metadata of a run that are known before it starts, owner and tags among them.

    Ray's dashboard has a column for `job_name`.
    """
    ui = {"raystride.mlflow": f"raystride ui --storage {storage}"} if mlflow else {}
    return {
        **(tags or {}),
        "job_name": run,
        "raystride.run": run,
        "raystride.storage": storage,
        "raystride.version": __version__,
        **ui,
    }


def short_stop_warning() -> str | None:
    """Returns a warning if this process is a submitted job that `ray job stop` kills before it can save, else None."""
    given = os.environ.get(STOP_WAIT_VARIABLE, "")
    seconds = float(given) if given.replace(".", "", 1).isdigit() else RAY_STOP_WAIT_S
    if seconds >= MIN_STOP_WAIT_S or not is_submitted_job():
        return None
    variables = json.dumps({"env_vars": {STOP_WAIT_VARIABLE: f"{MIN_STOP_WAIT_S:.0f}"}})
    return (
        f"`ray job stop` kills this job after {seconds:g} s, which may be too soon to save: submit it with "
        f"--runtime-env-json '{variables}', or set that variable where `ray start` runs"
    )


def mlflow_metadata(folder: Folder) -> dict[str, str]:
    """Returns the link of the run's page on a tracking server, or {} if it has none (yet)."""
    try:
        reference = read_reference(folder)
    except ValueError:
        return {}
    link = run_link(reference) if is_on_server(reference) else None
    return {"raystride.mlflow": link} if link else {}


class JobStatusReporter(Watcher):
    """Reporter of a training's status to Ray, if this process is a submitted job; else it does nothing.

    A context manager around the training, entered after `ray.init`.
    """

    def __init__(self, metadata: Mapping[str, str], folder: Folder) -> None:
        self._metadata, self._folder = dict(metadata), folder
        self._is_submitted_job = False
        self._next_at = 0.0

    def __enter__(self) -> Self:
        self._is_submitted_job = update_job_metadata(
            self._metadata | mlflow_metadata(self._folder) | {"raystride.status": "running"}
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.finish({"status": "failed"})

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """Sends the progress line as the job's message, every few seconds."""
        if not self._is_submitted_job or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + UPDATE_INTERVAL_S
        link = {"raystride.mlflow": str(state["mlflow"])} if state.get("mlflow") else {}
        self._is_submitted_job = update_job_metadata(link, progress_line(state).lstrip(BARS).strip())

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Adds the final figures to the metadata; Ray itself writes the message of an ended job."""
        if self._is_submitted_job:
            figures = {name: summary.get(name) for name in ("status", *FIGURES)}
            final_metadata = {
                f"raystride.{name}": _format_value(value) for name, value in figures.items() if value is not None
            }
            update_job_metadata(mlflow_metadata(self._folder) | final_metadata)
            self._is_submitted_job = False


def _format_value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
