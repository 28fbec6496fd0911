"""The status of a submitted job can be read by Ray's own client; if a part of Ray is missing, it is left out."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from raystride import __version__
from raystride.pipelines.launch.cluster import fallback
from raystride.pipelines.launch.cluster.internals import JOB_CONFIG_VARIABLE, update_job_metadata
from raystride.pipelines.launch.console import ray_job_status as job_page
from raystride.pipelines.launch.console.ray_job_status import JobStatusReporter, job_metadata
from raystride.pipelines.system.storage.folder import Folder

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_warned", set())


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Registers this process as a job in Ray's table, as Ray's client does; returns that client's reader."""
    import ray

    jobs = import_module("ray.dashboard.modules.job.common")
    client = jobs.JobInfoStorageClient(import_module("ray._raylet").GcsClient(ray.get_runtime_context().gcs_address))
    job = jobs.JobInfo(jobs.JobStatus.RUNNING, "raystride train", metadata={"owner": "me"}, runtime_env={"env_vars": {}})
    asyncio.run(client.put_info("raysubmit_4", job))
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, '{"metadata": {"job_submission_id": "raysubmit_4"}}')
    yield lambda: asyncio.run(client.get_info("raysubmit_4"))
    asyncio.run(client.delete_info("raysubmit_4"))


def test_a_submitted_job_tells_of_itself(submitted: Callable[[], Any]) -> None:
    before, warned = submitted(), list[str]()
    assert update_job_metadata({"job_name": "mine", "raystride.run": "mine"}, "step 1/2", warned.append)
    told = submitted()
    assert told.metadata == {"owner": "me", "job_name": "mine", "raystride.run": "mine"}
    assert told.message == "step 1/2"
    assert replace(told, metadata=before.metadata, message=before.message) == before
    assert update_job_metadata({"job_name": "other", "raystride.status": "finished"}, warn=warned.append)
    assert submitted().metadata["job_name"] == "mine"
    assert (submitted().metadata["raystride.status"], submitted().message) == ("finished", "step 1/2")
    assert not warned


def test_no_job_or_one_that_has_ended_is_not_told_of(submitted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    jobs = import_module("ray.dashboard.modules.job.common")
    client = jobs.JobInfoStorageClient(import_module("ray._raylet").GcsClient(ray.get_runtime_context().gcs_address))
    asyncio.run(client.put_info("raysubmit_4", replace(submitted(), status=jobs.JobStatus.STOPPED)))
    assert not update_job_metadata({"raystride.run": "mine"})
    assert submitted().metadata == {"owner": "me"}
    monkeypatch.delenv(JOB_CONFIG_VARIABLE)
    assert not update_job_metadata({"raystride.run": "mine"})


@pytest.mark.parametrize(
    "name",
    [
        "ray.dashboard.modules.job.common.JobInfoStorageClient",
        "ray._private.ray_constants.KV_NAMESPACE_JOB",
        "ray.experimental.internal_kv._internal_kv_get",
        "ray.experimental.internal_kv._internal_kv_put",
    ],
)
def test_without_a_name_a_job_is_not_told_of(
    submitted: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    warned: list[str] = []
    with monkeypatch.context() as patch:
        patch.delattr(name)
        assert not update_job_metadata({"raystride.run": "mine"}, "", warned.append)
    (text,) = warned
    assert name.rpartition(".")[2] in text
    assert "the job without its run" in text
    assert submitted().metadata == {"owner": "me"}


def test_a_page_follows_a_training(submitted: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_page, "UPDATE_INTERVAL_S", 0.0)
    folder = Folder(str(tmp_path))
    with JobStatusReporter(job_metadata("mine", "s3://runs", mlflow=True), folder) as page:
        assert submitted().metadata == {
            "owner": "me",
            "job_name": "mine",
            "raystride.run": "mine",
            "raystride.storage": "s3://runs",
            "raystride.mlflow": "raystride ui --storage s3://runs",
            "raystride.version": __version__,
            "raystride.status": "running",
        }
        page.on_state({"phase": "preparing"}, lambda: None)
        assert submitted().message == "preparing"
        page.on_state({"step": 5, "steps": 10, "loss": 0.5, "mlflow": "http://mlflow:5000/#/runs/1"}, lambda: None)
        assert submitted().message == "step 5/10  loss 0.5000"
        assert submitted().metadata["raystride.mlflow"] == "http://mlflow:5000/#/runs/1"
        page.finish({"status": "finished", "steps": 10, "train_loss": 0.25, "val_loss": None})
    metadata = submitted().metadata
    assert (metadata["raystride.status"], metadata["raystride.steps"], metadata["raystride.train_loss"]) == (
        "finished",
        "10",
        "0.25",
    )
    assert "raystride.val_loss" not in metadata


def test_a_page_says_what_failed_and_where_mlflow_has_it(submitted: Callable[[], Any], tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.put_json("mlflow.json", {"uri": "http://mlflow:5000", "experiment_id": "1", "run_id": "9c"})
    with pytest.raises(ZeroDivisionError), JobStatusReporter(job_metadata("mine", "runs", mlflow=True), folder):
        raise ZeroDivisionError
    assert submitted().metadata["raystride.status"] == "failed"
    assert submitted().metadata["raystride.mlflow"].startswith("http://mlflow:5000/#/experiments/1/runs/9c")


@pytest.mark.parametrize(("given", "seconds"), [(None, "3"), ("5", "5"), ("60", ""), ("120", "")])
def test_a_submitted_job_that_would_be_killed_before_it_saves_is_told(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seconds: str
) -> None:
    monkeypatch.delenv(job_page.STOP_WAIT_VARIABLE, raising=False)
    assert job_page.short_stop_warning() is None
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, "{}")
    if given:
        monkeypatch.setenv(job_page.STOP_WAIT_VARIABLE, given)
    warning = job_page.short_stop_warning()
    assert (f"after {seconds} s" in str(warning)) if seconds else warning is None
