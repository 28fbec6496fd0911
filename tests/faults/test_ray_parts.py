"""The parts of a run under Ray besides its workers: recorder, controller and driver, each killed. The bits stay the same."""

import re
import signal
from dataclasses import replace
from typing import Any

import psutil
import pytest

from raystride.pipelines.config import CheckpointConfig, Config, ScalingConfig, TrainConfig, ValidationConfig
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.train.checkpoint.audit import audit
from tests.children import find_children
from tests.faults.moments import LIMIT_S, finish, short_job
from tests.ray_jobs.jobs import Process, finish_job, run_folder, run_well, start_job, summary, wait_for_checkpoint
from tests.tiny import write_text

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STEPS = 400


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, Any]]:
    """Settings of a run on two Ray workers, and its summary on one without Ray where nothing disturbs it."""
    folder = tmp_path_factory.mktemp("parts")
    job = short_job(
        write_text(folder, 6_000),
        folder,
        "calm",
        train=TrainConfig(steps=STEPS, slots=6, slot_size=2, log_every=20, exact=True, clip_norm=0.5),
        checkpoint=CheckpointConfig(every=20, keep=2),
        validation=ValidationConfig(every=0, samples=15),
    )
    config = replace(job.config, scaling=ScalingConfig(workers=2, threads=1), storage=str(folder / "runs"))
    return config, finish(replace(job, config=replace(job.config, scaling=config.scaling)), 1, folder)


def _start(config: Config, run: str, step: int = 40) -> Process:
    driver = start_job("train", config, "--run", run)
    wait_for_checkpoint(config, run, step, driver)
    return driver


def _parts(driver: Process, name: str = "RayTrainWorker|Recorder|Controller") -> list[psutil.Process]:
    """The processes of the run's actors of this name."""
    return find_children(driver.pid, rf"ray::\w*({name})", recursive=True)


def _holds(config: Config, run: str, calm: dict[str, Any]) -> None:
    after = summary(config, run)
    assert (after["status"], after["parameters_sha256"]) == ("finished", calm["parameters_sha256"])
    assert audit(run_folder(config, run) / "checkpoints").samples == calm["samples_seen"]


@pytest.mark.weekly
def test_a_killed_recorder_costs_nothing(calm: tuple[Config, dict[str, Any]]) -> None:
    config, whole = calm
    driver = _start(config, "unheard")
    (recorder,) = _parts(driver, "Recorder")
    recorder.kill()
    outcome = finish_job(driver)
    assert outcome.code == 0, outcome.out + outcome.err
    assert summary(config, "unheard")["resumed_from"] is None
    _holds(config, "unheard", whole)
    measured = [entry for entry in read_entries(run_folder(config, "unheard")) if entry["kind"] == "metrics"]
    assert [entry["step"] for entry in measured if "train_loss" in entry["values"]] == list(range(20, STEPS + 1, 20))


@pytest.mark.weekly
def test_a_killed_controller_and_then_a_killed_driver(calm: tuple[Config, dict[str, Any]]) -> None:
    config, whole = calm
    driver = _start(config, "headless")
    (controller,) = _parts(driver, "Controller")
    controller.kill()
    outcome = finish_job(driver)
    assert outcome.code == 1, outcome.out + outcome.err
    assert re.match(r"training failed: the driver, step \d+\n", outcome.err), outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert "--launch.max_restarts" in outcome.err
    driver = _start(config, "headless", STEPS // 2)
    actors = _parts(driver)
    assert len(actors) == 4
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    # Two agents of Ray's own live on for a minute, and hold the driver's output open.
    assert not psutil.wait_procs(actors, LIMIT_S)[1], "they end with their driver"
    run_well("train", config, "--run", "headless", "--launch", "inline", "--scaling.workers", "1")
    assert summary(config, "headless")["resumed_from"] >= STEPS // 2
    _holds(config, "headless", whole)
