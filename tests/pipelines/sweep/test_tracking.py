"""A sweep in MLflow: trials under it, each once; a server that is away costs one warning, and hears all when it is back."""

import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from raystride.pipelines.config import Record
from raystride.pipelines.config.sweep import SweepConfig
from raystride.pipelines.files import Folder
from raystride.pipelines.record.journal import Journal
from raystride.pipelines.record.mlflow_log import database
from raystride.pipelines.sweep.driver import _logged
from raystride.pipelines.sweep.result import Result, results
from raystride.pipelines.sweep.tracking import Tracking
from tests.pipelines.sweep.test_page import sweep, trial


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """With one database for all, whose tables take seconds to make."""
    return Folder(str(tmp_path_factory.mktemp("runs")))


def named(name: str, **record: Any) -> SweepConfig:
    """A sweep of this name."""
    return replace(sweep(), run=name, record=Record(**record))


def ran(storage: Folder, name: str, steps: tuple[int, ...] = (2, 4)) -> Result:
    """A trial whose journal has these steps."""
    entry = {"attempt": "a1", "sender": "rank0", "sequence": 1, "kind": "metrics"}
    entries = [
        entry | {"sequence": step, "time": 1e9 + step, "step": step, "values": {"train_loss": 1 / step}} for step in steps
    ]
    Journal(storage / name, "a1").append(entries)
    return replace(trial(100.0, 1), run=name, label="workers 1")


@pytest.fixture
def nobody() -> Iterator[str]:
    """The address of a server that is not there."""
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


def found(storage: Folder) -> dict[str, Any]:
    """The database's runs by name; no name is there twice."""
    from mlflow import MlflowClient

    client = MlflowClient(database(storage))
    every = client.search_runs([each.experiment_id for each in client.search_experiments()])
    names = [run.info.run_name for run in every]
    assert len(names) == len(set(names))
    return dict(zip(names, every, strict=True))


def points(storage: Folder, run: Any, key: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return sorted((p.step, p.value) for p in MlflowClient(database(storage)).get_metric_history(run.info.run_id, key))


def test_trials_are_under_their_sweep_and_told_twice_are_there_once(storage: Folder) -> None:
    base, result = named("s1"), ran(storage, "s1-a")
    tracking = Tracking(storage / "s1", base, storage)
    told = _logged(storage / "s1", tracking, result, 1)
    assert told == replace(result, mlflow_run_id=found(storage)["s1-a"].info.run_id)
    assert results(storage / "s1") == {told.key: told}, "kept, so that a sweep that goes on tells it once"
    tracking.end("finished")
    assert points(storage, found(storage)["s1"], "trial_tokens_per_second") == [(1, pytest.approx(result.speed))]
    again = Tracking(storage / "s1", base, storage)
    assert again.trial(result, 1).mlflow_run_id == told.mlflow_run_id
    again.end("finished")
    runs = found(storage)
    parent, child = runs["s1"], runs["s1-a"]
    assert (parent.info.status, parent.data.tags["raystride.kind"]) == ("FINISHED", "sweep")
    assert parent.data.params["sweep.scaling"] == "none"
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (child.data.tags["raystride.trial"], child.data.tags["raystride.outcome"]) == ("workers 1", "measured")
    assert points(storage, child, "train_loss") == [(2, 0.5), (4, 0.25)]


def test_what_never_ran_is_not_in_mlflow(storage: Folder) -> None:
    tracking = Tracking(storage / "s2", named("s2"), storage)
    refused = replace(trial(1.0), run="s2-refused", status="refused", speeds=())
    assert tracking.trial(refused, 1) is refused
    assert "s2-refused" not in found(storage)


def test_without_mlflow_nothing_is_told(storage: Folder) -> None:
    tracking = Tracking(storage / "s3", named("s3", mlflow=False), storage)
    result = ran(storage, "s3-a")
    assert _logged(storage / "s3", tracking, result, 1) is result
    assert not results(storage / "s3")
    tracking.end("finished")
    assert (tracking.run_id, tracking.link, tracking.comparison([result])) == (None, None, None)


def test_a_server_that_is_away_costs_one_warning_and_is_told_all_when_it_is_back(
    storage: Folder, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, result = storage / "s4", ran(storage, "s4-a")
    away = Tracking(folder, named("s4", mlflow_uri=nobody), storage)
    assert away.trial(result, 1) is result
    away.artifact("recommended.yaml")
    away.end("finished")
    assert capsys.readouterr().err.count("warning: MLflow at ") == 1
    back = Tracking(folder, named("s4"), storage)
    assert back.trial(result, 1).mlflow_run_id
    runs = found(storage)
    assert runs["s4"].data.params["sweep.search"] == "grid"
    assert runs["s4-a"].data.tags["mlflow.parentRunId"] == runs["s4"].info.run_id


def test_a_server_whose_password_is_in_its_address_is_named_without(
    storage: Folder, nobody: str, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = nobody.replace("//", "//user:secret@")
    Tracking(storage / "s5", named("s5", mlflow_uri=secret), storage)
    assert "secret" not in capsys.readouterr().err
