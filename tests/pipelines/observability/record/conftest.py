"""Fixtures of the record's tests: one storage with one database per session, as MLflow takes seconds to create tables."""

import json
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Recorder
from raystride.pipelines.observability.record.mlflow.database import database_uri
from raystride.pipelines.observability.record.sender import Entry
from raystride.pipelines.system.storage.folder import Folder

MakeRecorder = Callable[..., Recorder]


class RecorderProcess(BaseManager):
    """A recorder in a process of its own, as under Ray: `start()`, then `Recorder(...)` makes a proxy."""


class HoldingRecorder(Recorder):
    """A recorder whose writing can be stopped."""

    def hold(self) -> None:
        """Writes nothing from now on."""
        self._writing.acquire()


RecorderProcess.register("Recorder", Recorder)
RecorderProcess.register("HoldingRecorder", HoldingRecorder)


@pytest.fixture(scope="session")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A local storage with MLflow's database, shared by the session."""
    return Folder(str(tmp_path_factory.mktemp("runs")))


@pytest.fixture
def folder(storage: Folder) -> Folder:
    """A run's folder of its own in the shared storage."""
    return storage / f"run-{uuid4().hex[:8]}"


@pytest.fixture
def record(storage: Folder, folder: Folder) -> MakeRecorder:
    """Makes a recorder of the test's run; by default without MLflow."""

    def make(attempt: str = "a1", settings: RecordConfig | None = None, **changes: Any) -> Recorder:
        given: dict[str, Any] = {"parameters": {}, "tags": {}, "total_steps": 100} | changes
        chosen = settings or RecordConfig(mlflow=False)
        return Recorder(folder, folder.uri.rpartition("/")[2], attempt, chosen, storage, **given)

    return make


@pytest.fixture
def process() -> Iterator[Callable[[], RecorderProcess]]:
    """Starts processes that can hold a recorder; all are ended after the test."""
    started = []

    def start() -> RecorderProcess:
        manager = RecorderProcess(ctx=get_context("spawn"))
        manager.start()
        started.append(manager)
        return manager

    yield start
    for manager in started:
        manager.shutdown()


def history(storage: Folder, run_id: str, key: str) -> list[tuple[int, float, int]]:
    """A metric's points in the storage's database: step, value, time in milliseconds; in order of time."""
    from mlflow import MlflowClient

    points = MlflowClient(database_uri(storage)).get_metric_history(run_id, key)
    return sorted(((point.step, point.value, point.timestamp) for point in points), key=lambda point: (point[2], point[0]))


def only_run(storage: Folder, name: str) -> Any:
    """The one MLflow run of that name; there must be no second."""
    from mlflow import MlflowClient

    client = MlflowClient(database_uri(storage))
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    (run,) = client.search_runs(experiments, f"attributes.run_name = '{name}'")
    return run


def sent(folder: Folder, everyone: bool = False) -> list[Entry]:
    """Entries of the joined journal in order, the recorder's own (parameters, tags) only with `everyone`."""
    entries = [json.loads(line) for line in (Path(folder.uri) / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if everyone or entry["sender"] != "recorder"]
