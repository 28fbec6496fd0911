"""One run on two Ray workers through its life: trained, stopped by Ctrl-C, resumed; always the same bits."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    RecordConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from tests.end_to_end.tracking import only_run
from tests.processes import make_job, run_workers
from tests.ray_jobs.jobs import Outcome, finish_job, run_well, start_job, summary, wait_for_checkpoint
from tests.tiny import tiny, write_text

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
STEPS = 400


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of two workers whose learning rate does not depend on how many steps are asked for."""
    path = tmp_path_factory.mktemp("resume")
    return tiny(
        write_text(path),
        storage=str(path / "runs"),
        model=ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
        train=TrainConfig(steps=STEPS, slots=4, slot_size=2, log_every=20),
        validation=ValidationConfig(every=0, samples=16),
        checkpoint=CheckpointConfig(every=20),
        scaling=ScalingConfig(workers=2, threads=1),
        record=RecordConfig(mlflow=True),
    )


Life = list[tuple[Outcome, dict[str, Any]]]


@pytest.fixture(scope="module")
def life(config: Config) -> Life:
    """How each of two attempts printed and summed up: stopped in the middle; the rest."""
    driver = start_job("train", config, "--run", "run")
    wait_for_checkpoint(config, "run", 100, driver)
    os.killpg(driver.pid, signal.SIGINT)  # a terminal tells every process of the group
    stopped = (finish_job(driver), summary(config, "run"))
    return [stopped, (run_well("train", config, "--run", "run"), summary(config, "run"))]


@pytest.mark.weekly
def test_ctrl_c_saves_and_ends_well(life: Life) -> None:
    outcome, stopped = life[0]
    assert outcome.code == 130, outcome.out + outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert (stopped["status"], stopped["resumed_from"]) == ("stopped", None)
    assert 100 <= stopped["steps"] < STEPS
    assert stopped["workers"] == 2
    assert stopped["samples_seen"] == stopped["steps"] * 8
    assert [line.split()[0] for line in outcome.lines[-3:]] == ["results", "mlflow", "next"]
    assert "--run run" in outcome.lines[-1]


def test_the_same_name_goes_on_where_it_stopped(life: Life) -> None:
    (_, stopped), (_, resumed) = life
    assert resumed["resumed_from"] == stopped["steps"]
    assert (resumed["status"], resumed["steps"]) == ("finished", STEPS)


def test_it_ends_with_the_bits_of_a_run_that_nothing_disturbed(life: Life, config: Config) -> None:
    """The other run has two workers without Ray."""
    whole = run_workers(make_job(config, Path(config.storage), "whole"), 2)
    for key in ("parameters_sha256", "samples_seen", "tokens_seen", "val_loss"):
        assert life[1][1][key] == whole[key], key


def test_all_attempts_are_one_run_of_mlflow(life: Life, config: Config) -> None:
    from mlflow import MlflowClient

    run = only_run(config, "run")
    # MLflow opens beside the training: an attempt may end before it has, and its points follow.
    assert {figures["mlflow_run_id"] for _, figures in life} | {None} == {run.info.run_id, None}
    assert life[-1][1]["mlflow_run_id"] == run.info.run_id
    assert run.info.status == "FINISHED"
    client = MlflowClient(f"sqlite:///{config.storage}/mlflow.db")
    steps = sorted(point.step for point in client.get_metric_history(run.info.run_id, "train/loss"))
    assert steps == sorted(set(steps)), "a step was logged twice"
    assert set(range(20, STEPS + 1, 20)) <= set(steps)
