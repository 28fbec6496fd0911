"""A run as MLflow's user finds it: parameters, tags, metrics, system readings and files, from a training without Ray."""

import getpass
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raystride
from raystride.pipelines.config import Config, LaunchConfig, RecordConfig, SampleConfig, TrainConfig
from tests.end_to_end.tracking import artifacts, only_run
from tests.ray_jobs.jobs import run_folder, run_well, summary
from tests.tiny import tiny, write_text

METRICS = {
    "train/loss",
    "val/loss",
    "train/learning_rate",
    "train/gradient_norm",
    "tokens_per_second",
    "data_wait_share",
    "step_seconds_p50",
    "step_seconds_p95",
}


pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Tiny settings with MLflow and a sample, long enough for readings of the machine."""
    path = tmp_path_factory.mktemp("mlflow")
    return tiny(
        write_text(path),
        storage=str(path / "runs"),
        launch=LaunchConfig(mode="inline"),
        record=RecordConfig(system_every_s=0.2),
        sample=SampleConfig(tokens=20, prompt="line "),
        train=TrainConfig(steps=100, slots=4, slot_size=2, log_every=10),
    )


@pytest.fixture(scope="module")
def run(config: Config) -> Any:
    """The MLflow run of a training."""
    run_well("train", config, "--run", "logged")
    return only_run(config, "logged")


@pytest.fixture(scope="module")
def files(run: Any, config: Config) -> dict[str, bytes]:
    """What MLflow gives out of its files."""
    return artifacts(config, run)


def test_it_is_finished_and_the_summary_names_it(run: Any, config: Config) -> None:
    assert run.info.status == "FINISHED"
    assert summary(config, "logged")["mlflow_run_id"] == run.info.run_id


def test_its_parameters_are_the_resolved_settings(run: Any, config: Config) -> None:
    parameters = run.data.params
    assert set(config.flat()) <= set(parameters)
    expected = {"train.steps": "100", "model.hidden_size": "16", "launch.mode": "inline", "workers": "1", "device": "cpu"}
    assert {key: parameters[key] for key in expected} == expected


def test_its_tags_say_where_it_comes_from(run: Any, config: Config) -> None:
    tags = {key: value for key, value in run.data.tags.items() if key.startswith("raystride.")}
    assert set(tags) >= {f"raystride.{key}" for key in ("attempt", "commit", "data", "workers", "device")}
    assert tags["raystride.workers"] == "1"
    assert len(tags["raystride.commit"]) == 40
    assert tags["raystride.version"] == raystride.__version__
    assert run_folder(config, "logged").read_json("environment.json")["versions"]["raystride"] == raystride.__version__


def test_its_metrics_are_there_with_their_steps(run: Any, config: Config) -> None:
    from mlflow import MlflowClient

    assert set(run.data.metrics) >= METRICS
    assert run.data.metrics["val/loss"] == pytest.approx(summary(config, "logged")["val_loss"])
    history = MlflowClient(f"sqlite:///{config.storage}/mlflow.db").get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == list(range(10, 101, 10))
    assert history[-1].value < history[0].value


def test_source_user_data_and_the_start_are_where_mlflow_shows_them(run: Any, config: Config) -> None:
    environment = run_folder(config, "logged").read_json("environment.json")
    assert run.data.tags["mlflow.user"] == getpass.getuser()
    assert run.data.tags["mlflow.source.type"] == "LOCAL"
    assert run.data.tags["mlflow.source.git.commit"] == environment["commit"]
    (used,) = run.inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == (config.data.source, environment["data"][:36])
    assert float(run.data.params["start.data_s"]) >= 0
    assert not [name for name in run.data.metrics if name.startswith("start")]


def test_the_machine_was_read(run: Any) -> None:
    readings = {key for key in run.data.metrics if key.startswith("system/")}
    assert any("cpu" in key for key in readings), readings
    assert any("memory" in key for key in readings), readings


@pytest.mark.parametrize("name", ["config.yaml", "environment.json", "curve.png", "sample.txt"])
def test_its_files_are_there_and_whole(files: dict[str, bytes], config: Config, name: str) -> None:
    assert files[name] == (Path(config.storage) / "logged" / name).read_bytes()


def test_the_pictures_and_the_text_are_what_they_say(files: dict[str, bytes]) -> None:
    assert files["curve.png"].startswith(b"\x89PNG")
    assert files["sample.txt"].decode().startswith("line ")


@pytest.mark.long
def test_a_run_without_mlflow_leaves_no_database(config: Config, tmp_path: Path) -> None:
    silent = replace(
        config,
        storage=str(tmp_path / "runs"),
        record=RecordConfig(mlflow=False),
        train=TrainConfig(steps=4, slots=4, slot_size=2),
    )
    run_well("train", silent, "--run", "silent")
    assert summary(silent, "silent")["mlflow_run_id"] is None
    assert not (tmp_path / "runs" / "mlflow.db").exists()
