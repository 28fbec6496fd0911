"""A sweep in MLflow: its trials, each once; an unreachable server costs one warning, and gets everything when it is back."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from raystride.pipelines.config import RecordConfig
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.observability.record.mlflow.database import database_uri
from raystride.pipelines.sweep.result import Result, load_results
from raystride.pipelines.sweep.sweep_job import _log_to_mlflow
from raystride.pipelines.sweep.tracking import SweepTracking
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.sweep.test_report_page import sweep, trial


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """With one common database, as its tables take seconds to make."""
    return Folder(str(tmp_path_factory.mktemp("runs")))


def named_sweep(name: str, **record: Any) -> SweepJobConfig:
    """Returns a sweep of this name."""
    return replace(sweep(), run=name, record=RecordConfig(**record))


def run_trial(storage: Folder, name: str, steps: tuple[int, ...] = (2, 4)) -> Result:
    """Returns a trial with a journal of these steps."""
    entry = {"attempt": "a1", "sender": "rank0", "sequence": 1, "kind": "metrics"}
    entries = [
        entry | {"sequence": step, "time": 1e9 + step, "step": step, "values": {"train_loss": 1 / step}} for step in steps
    ]
    Journal(storage / name, "a1").append(entries)
    return replace(trial(100.0, 1), run=name, label="workers 1")


@pytest.fixture
def closed_address() -> Iterator[str]:
    """The address of a server that does not exist."""
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def runs_by_name(storage: Folder) -> dict[str, Any]:
    """Returns the database's runs by name, and checks that names are unique."""
    from mlflow import MlflowClient

    client = MlflowClient(database_uri(storage))
    every = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    names = [run.info.run_name for run in every]
    assert len(names) == len(set(names))
    return dict(zip(names, every, strict=True))


def points(storage: Folder, run: Any, key: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return sorted((p.step, p.value) for p in MlflowClient(database_uri(storage)).get_metric_history(run.info.run_id, key))


@pytest.mark.long
def test_trials_are_under_their_sweep_and_told_twice_are_there_once(storage: Folder) -> None:
    base, result = named_sweep("s1"), run_trial(storage, "s1-a")
    tracking = SweepTracking(storage / "s1", base, storage)
    told = _log_to_mlflow(storage / "s1", tracking, result, 1)
    assert told == replace(result, mlflow_run_id=runs_by_name(storage)["s1-a"].info.run_id)
    assert load_results(storage / "s1") == {told.key: told}, "kept, so that a sweep that goes on tells it once"
    tracking.end("finished")
    assert points(storage, runs_by_name(storage)["s1"], "trial_tokens_per_second") == [(1, pytest.approx(result.speed))]
    again = SweepTracking(storage / "s1", base, storage)
    assert again.log_trial(result, 1).mlflow_run_id == told.mlflow_run_id
    again.end("finished")
    runs = runs_by_name(storage)
    parent, child = runs["s1"], runs["s1-a"]
    assert (parent.info.status, parent.data.tags["raystride.kind"]) == ("FINISHED", "sweep")
    assert parent.data.params["sweep.scaling"] == "none"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (child.data.tags["raystride.trial"], child.data.tags["raystride.outcome"]) == ("workers 1", "measured")
    assert points(storage, child, "train/loss") == [(2, 0.5), (4, 0.25)]


def test_unstarted_trials_are_not_in_mlflow(storage: Folder) -> None:
    tracking = SweepTracking(storage / "s2", named_sweep("s2"), storage)
    refused = replace(trial(1.0), run="s2-refused", status="refused", speeds=())
    assert tracking.log_trial(refused, 1) is refused
    assert "s2-refused" not in runs_by_name(storage)


def test_without_mlflow_nothing_is_told(storage: Folder) -> None:
    tracking = SweepTracking(storage / "s3", named_sweep("s3", mlflow=False), storage)
    result = run_trial(storage, "s3-a")
    assert _log_to_mlflow(storage / "s3", tracking, result, 1) is result
    assert not load_results(storage / "s3")
    tracking.end("finished")
    assert (tracking.run_id, tracking.link, tracking.comparison_url([result])) == (None, None, None)


def test_a_server_that_is_away_costs_one_warning_and_is_told_all_when_it_is_back(
    storage: Folder, closed_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = storage / "s4", run_trial(storage, "s4-a")
    away = SweepTracking(folder, named_sweep("s4", mlflow_uri=closed_address), storage)
    assert away.log_trial(result, 1) is result
    away.log_artifact("recommended.yaml")
    away.end("finished")
    assert capsys.readouterr().err.count("warning: MLflow at ") == 1
    back = SweepTracking(folder, named_sweep("s4"), storage)
    assert back.log_trial(result, 1).mlflow_run_id
    runs = runs_by_name(storage)
    assert runs["s4"].data.params["sweep.search"] == "grid"
    assert runs["s4-a"].data.tags["mlflow.parentRunId"] == runs["s4"].info.run_id


def test_each_outage_costs_one_warning(storage: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    tracking = SweepTracking(storage / "s5", named_sweep("s5"), storage)

    def do(succeeds: bool) -> None:
        if not succeeds:
            raise ConnectionError("away")

    outcomes = (False, False, True, False, True, True, False, False)
    assert tuple(tracking._attempt(partial(do, succeeds)) for succeeds in outcomes) == outcomes
    assert capsys.readouterr().err.count("warning: MLflow at ") == 3


def test_a_server_whose_password_is_in_its_address_is_named_without(
    storage: Folder, closed_address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = closed_address.replace("//", "//user:secret@")
    SweepTracking(storage / "s5", named_sweep("s5", mlflow_uri=secret), storage)
    assert "secret" not in capsys.readouterr().err
