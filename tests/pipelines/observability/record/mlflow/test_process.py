"""MLflow's process: it has the lowest priority until that is raised, and a dead one is replaced."""

import os
from collections.abc import Iterator

import psutil
import pytest

from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow import process as mlflow_process
from raystride.pipelines.observability.record.mlflow.log import MlflowLog
from raystride.pipelines.observability.record.mlflow.process import MlflowFailed, MlflowProcess
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import read_sealed
from tests.children import find_children
from tests.pipelines.observability.record.conftest import history


@pytest.fixture
def log(folder: Folder, storage: Folder, monkeypatch: pytest.MonkeyPatch) -> Iterator[MlflowProcess]:
    """The log of the test's run in its own process, whose priority is soon raised."""
    monkeypatch.setattr(mlflow_process, "PATIENCE_S", 0.0)
    there = MlflowLog.for_run(folder, folder.name, RecordConfig(), storage)
    assert there is not None
    made = MlflowProcess(there)
    yield made
    made.close()


def _process() -> psutil.Process:
    (child,) = find_children(os.getpid(), "spawn_main")
    return child


def _policies(process: int) -> set[int]:
    return {os.sched_getscheduler(int(thread)) for thread in os.listdir(f"/proc/{process}/task")}


@pytest.mark.long
def test_what_it_logs_is_in_mlflow_also_after_its_death(log: MlflowProcess, storage: Folder, folder: Folder) -> None:
    log.connect()
    assert log.log([new_entry("metrics", {"train_loss": 0.5}, step=3, time=1e9)]) == []
    assert history(storage, str(log.run_id), "train/loss") == [(3, 0.5, 10**12)]
    assert read_sealed(folder, "mlflow.json") == log.reference
    first = _process()
    first.kill()
    with pytest.raises(MlflowFailed, match="another one follows"):
        log.log([new_entry("metrics", {"train_loss": 0.25}, step=4, time=1e9 + 1)])
    log.log([new_entry("metrics", {"train_loss": 0.25}, step=4, time=1e9 + 1)])
    assert _process().pid != first.pid
    assert [step for step, _, _ in history(storage, str(log.run_id), "train/loss")] == [3, 4]


@pytest.mark.long
def test_no_package_for_tables_is_loaded(log: MlflowProcess) -> None:
    log.connect()
    log.log([new_entry("metrics", {"train_loss": 0.5}, step=3, time=1e9)])
    libraries = {part for place in _process().memory_maps() for part in place.path.split("/")}
    assert "sqlalchemy" in libraries
    assert libraries.isdisjoint({"pandas", "numpy", "pyarrow"})


@pytest.mark.skipif(
    not mlflow_process._can_leave_idle_policy(), reason="this user's processes may not leave the idle policy again"
)
def test_all_its_threads_stand_back_until_it_is_called_forward(log: MlflowProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_process, "PATIENCE_S", 60.0)
    log.save_mark([])  # needs no MLflow
    process = _process().pid
    assert os.SCHED_IDLE in _policies(process)
    log.raise_priority()
    assert _policies(process) == {os.SCHED_OTHER}


def test_a_process_that_starts_after_it_was_called_forward_never_stands_back(log: MlflowProcess) -> None:
    """It gave itself the idle policy once it ran, which a busy machine's end of a run then waited for."""
    log.raise_priority()
    log.save_mark([])
    assert _policies(_process().pid) == {os.SCHED_OTHER}


@pytest.mark.skipif(os.geteuid() != 0, reason="without privileges niceness only grows")
def test_what_was_niced_computes_like_its_parent_again(monkeypatch: pytest.MonkeyPatch, log: MlflowProcess) -> None:
    monkeypatch.setattr(mlflow_process, "PATIENCE_S", 60.0)
    log.save_mark([])
    process = _process()
    process.nice(10)
    log.raise_priority()
    assert process.nice() == os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.long
def test_an_error_is_named_and_a_closed_one_starts_no_process(log: MlflowProcess) -> None:
    with pytest.raises(MlflowFailed, match="KeyError"):
        log.end_run("no such status", 1.0)
    log.close()
    with pytest.raises(MlflowFailed, match="was ended"):
        log.connect()
    assert not find_children(os.getpid(), "spawn_main")
