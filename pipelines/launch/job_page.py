"""What Ray's dashboard and its job API show of a submitted training: which run it is, where it lies, and how far it is.

with JobPage(metadata_of("mine", "s3://bucket/runs", mlflow=True), folder) as page:      # metadata: job_name, raystride.run
    page.on_state(recorder.state(), request_stop)         # message: step 25/30  loss 0.0036
    page.end(summary)                                     # metadata: raystride.status finished, raystride.steps 30
"""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import raystride
from raystride.pipelines.cluster.internals import tell_of_job
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.progress import progress_line
from raystride.pipelines.launch.session import Watcher
from raystride.pipelines.record.links import on_a_server, run_link
from raystride.pipelines.record.mlflow_log import MLFLOW_REFERENCE
from raystride.pipelines.record.state import TrainingState

EVERY_S = 5.0
BARS = "━╌"
FIGURES = ("steps", "train_loss", "val_loss")


def metadata_of(run: str, storage: str, mlflow: bool) -> dict[str, str]:
    """What is known of a run before anything of it has started. Ray's dashboard has a column for `job_name`."""
    ui = {"raystride.mlflow": f"raystride ui --storage {storage}"} if mlflow else {}
    return {
        "job_name": run,
        "raystride.run": run,
        "raystride.storage": storage,
        "raystride.version": raystride.__version__,
        **ui,
    }


def link_in_mlflow(folder: Folder) -> dict[str, str]:
    """The run's page on a tracking server, where it has one by now."""
    try:
        reference = folder.read_json(MLFLOW_REFERENCE)
    except (FileNotFoundError, ValueError):
        return {}
    link = run_link(reference) if on_a_server(reference) else None
    return {"raystride.mlflow": link} if link else {}


class JobPage(Watcher):
    """Tells Ray of a training, where this process is a job that was submitted; else it does nothing.

    A context of the training, entered when Ray has been joined.
    """

    def __init__(self, told: Mapping[str, str], folder: Folder) -> None:
        self._told, self._folder = dict(told), folder
        self._tells = False
        self._next_at = 0.0

    def __enter__(self) -> Self:
        self._tells = tell_of_job(self._told | link_in_mlflow(self._folder) | {"raystride.status": "running"})
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.end({"status": "failed"})

    def on_state(self, state: TrainingState, request_stop: Callable[[], None]) -> None:
        """The line that the log shows, each few seconds."""
        if not self._tells or time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + EVERY_S
        link = {"raystride.mlflow": str(state["mlflow"])} if state.get("mlflow") else {}
        self._tells = tell_of_job(link, progress_line(state).lstrip(BARS).strip())

    def end(self, summary: Mapping[str, Any]) -> None:
        """Ray writes the message of an end itself; the figures stay with the metadata."""
        if self._tells:
            figures = {name: summary.get(name) for name in ("status", *FIGURES)}
            ended = {f"raystride.{name}": _text(value) for name, value in figures.items() if value is not None}
            tell_of_job(link_in_mlflow(self._folder) | ended)
            self._tells = False


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
