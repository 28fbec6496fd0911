"""Links to pages of MLflow and Ray, the description of a run, and the output of `raystride runs compare`."""

import json
from pathlib import Path

import pytest

from raystride.command import run as run_command
from raystride.pipelines.config import Config, OptimizerConfig
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.config.run import RecordConfig
from raystride.pipelines.observability.record import Recorder, Sender
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.mlflow.database import database_uri
from raystride.pipelines.observability.record.mlflow.links import (
    NOTE_TAG,
    VIEW_KEY,
    VIEW_TAG,
    comparison_link,
    job_link,
    run_link,
    runs_link,
)
from raystride.pipelines.system.storage.folder import Folder
from tests.pipelines.observability.record.conftest import only_run

TAGS = {"strategy": "ddp", "workers": "2", "device": "cpu", "ray_job_id": "raysubmit_x", "commit": "0123456789abcdef"}
PAGE = "http://127.0.0.1:8265/#/jobs/raysubmit_x"


def mark(run_id: str, uri: str = "https://tracking.example/", experiment: str = "1") -> dict[str, str]:
    """The content of an `mlflow.json`."""
    return {"run_id": run_id, "uri": uri, "experiment_id": experiment}


def record(storage: Folder, name: str, rate: float) -> str:
    """Records a short run with MLflow; returns its id."""
    folder = storage / name
    folder.put("config.yaml", to_yaml(Config(optimizer=OptimizerConfig(learning_rate=rate))))
    tags = {f"raystride.{key}": value for key, value in TAGS.items()} | {"raystride.ray_job": PAGE}
    recorder = Recorder(folder, name, "a1", RecordConfig(), storage, {"optimizer.learning_rate": rate}, tags)
    sender = Sender(recorder.receive, "rank0")
    sender.put(new_entry("metrics", {"train_loss": 1 / rate}, step=1))
    assert sender.close(60.0)
    return str(recorder.finish("finished")["mlflow_run_id"])


def test_links_name_servers_or_the_ui_on_this_machine() -> None:
    assert run_link(mark("a")) == "https://tracking.example/#/experiments/1/runs/a?workflowType=machine_learning"
    assert run_link({"uri": "https://tracking.example"}) is None
    assert runs_link(mark("a", "sqlite:////d/mlflow.db"), 5077).startswith("http://127.0.0.1:5077/#/experiments/1/runs?")
    assert job_link("http://127.0.0.1:8265/", "raysubmit_x") == PAGE


def test_a_comparison_needs_two_runs_on_one_server() -> None:
    both = comparison_link([mark("a"), {}, mark("b", experiment="2")])
    page = "https://tracking.example/#/compare-runs?runs=[%22a%22,%22b%22]&experiments=[%221%22,%222%22]"
    assert both == f"{page}&workflowType=machine_learning"
    assert comparison_link([mark("a"), {}]) is None
    assert comparison_link([mark("a"), mark("b", "https://other.example")]) is None


@pytest.mark.weekly
@pytest.mark.long
def test_mlflow_has_the_table_and_a_description_that_a_person_may_replace(
    storage: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    ids = [record(storage, name, rate) for name, rate in (("slow", 0.125), ("fast", 0.25))]
    client = MlflowClient(database_uri(storage))
    run = only_run(storage, "slow")
    view = json.loads(client.get_experiment(run.info.experiment_id).tags[VIEW_TAG])
    assert "metrics.`train/loss`" in view["selectedColumns"]
    assert f"[raysubmit_x]({PAGE})" in run.data.tags[NOTE_TAG]
    assert str(storage / "slow") in run.data.tags[NOTE_TAG]

    assert run_command(["runs", "compare", "slow", "fast", "--storage", storage.uri, "--port", "5077"]) == 0
    said = capsys.readouterr().out
    rows = {line.split("  ")[0]: line.split()[-2:] for line in said.splitlines()}
    assert rows["training loss"] == ["8.0000", "4.0000"]
    assert rows["optimizer.learning_rate"] == ["0.125", "0.25"]
    assert "model.hidden_size" not in said  # the same in both
    assert f"http://127.0.0.1:5077/#/compare-runs?runs=[%22{ids[0]}%22,%22{ids[1]}%22]" in said
    assert f"viewStateShareKey={VIEW_KEY}" in said
    assert f"raystride ui --storage {storage} --port 5077" in said

    client.set_tag(run.info.run_id, NOTE_TAG, "my own words")
    record(storage, "slow", 0.125)
    assert only_run(storage, "slow").data.tags[NOTE_TAG] == "my own words"


def test_a_comparison_of_one_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one" / "journal").mkdir(parents=True)
    assert run_command(["runs", "compare", "one", "one", "--storage", str(tmp_path)]) == 2
    assert "name at least two" in capsys.readouterr().err
