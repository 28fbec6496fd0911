"""Drivers of runs in one process: two at once, one killed, or its MLflow process killed. The run ends with the same bits."""

import signal
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest

from raystride.pipelines.config import CheckpointConfig, Config, LaunchConfig, RecordConfig, TrainConfig, ValidationConfig
from raystride.pipelines.launch.run_store import lease
from raystride.pipelines.launch.run_store.lease import Owner, read_owner
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.train.checkpoint.audit import audit
from tests.children import find_children, stop
from tests.faults.moments import finish, short_job
from tests.pipelines.observability.record.conftest import history, only_run
from tests.ray_jobs.jobs import Process, finish_job, run_folder, run_well, start_job, summary, wait_for, wait_for_checkpoint
from tests.tiny import write_text
from tests.waiting import wait_until

STEPS = 300


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, dict[str, Any]]:
    """Settings of a run of a few seconds, inline, and its summary where nothing disturbs it."""
    folder = tmp_path_factory.mktemp("drivers")
    train = TrainConfig(steps=STEPS, slots=7, slot_size=2, log_every=20, exact=True, clip_norm=0.5)
    checkpoint, validation = CheckpointConfig(every=20, keep=2), ValidationConfig(every=0, samples=15)
    job = short_job(write_text(folder, 6_000), folder, "calm", train=train, checkpoint=checkpoint, validation=validation)
    config = replace(job.config, launch=LaunchConfig(mode="inline"), storage=str(folder / "runs"))
    return config, finish(job, 1, folder)


def _holds(config: Config, run: str, calm: dict[str, Any]) -> None:
    after = summary(config, run)
    assert (after["status"], after["parameters_sha256"]) == ("finished", calm["parameters_sha256"])
    assert audit(run_folder(config, run) / "checkpoints").samples == calm["samples_seen"]


def _tree(config: Config, run: str) -> dict[str, int]:
    """Every file of a run with the time of its last change."""
    root = run_folder(config, run).local
    assert root
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.name not in (".lock", run)}


@pytest.mark.long
def test_of_two_that_start_at_once_one_trains(calm: tuple[Config, dict[str, Any]]) -> None:
    config, whole = calm
    drivers = [start_job("train", config, "--run", "twice") for _ in range(2)]
    folder = run_folder(config, "twice")
    wait_until(lambda: folder.exists("config.yaml"), "one of them has the run")
    owner = read_owner(folder)
    assert owner
    winner, other = sorted(drivers, key=lambda driver: driver.pid != owner.pid)
    stop(winner.pid)  # so that it surely trains when the other one asks
    _is_refused(other, owner)
    before = _tree(config, "twice")
    _is_refused(start_job("train", config, "--run", "twice"), owner)
    assert _tree(config, "twice") == before
    winner.send_signal(signal.SIGCONT)
    outcome = finish_job(winner)
    assert outcome.code == 0, outcome.out + outcome.err
    assert (folder / "attempts").names() == [owner.attempt]
    _holds(config, "twice", whole)


def _is_refused(driver: Process, owner: Owner) -> None:
    refused = finish_job(driver)
    assert refused.code == 2, refused.out + refused.err
    assert f"is being trained by process {owner.pid} on {owner.host} (attempt {owner.attempt})" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.long
def test_a_driver_under_ray_that_lost_its_run_ends_with_its_workers_and_writes_nothing(
    calm: tuple[Config, dict[str, Any]],
) -> None:
    config, _ = calm
    flags = ("--launch", "ray", "--scaling.workers", "1", "--train.steps", "1000000")
    driver, folder = start_job("train", config, "--run", "lost", *flags), run_folder(config, "lost")
    wait_for_checkpoint(config, "lost", 40, driver)
    theirs = asdict(Owner.this_process("theirs")) | {"machine": "another", "host": "h2", "term": 9}
    with lease._exclusive(folder):  # not between a renewal's read and its write
        folder.put_json("owner.json", theirs)
    outcome = finish_job(driver)
    assert outcome.code == 2, outcome.out + outcome.err
    assert "on h2 has taken over run lost (attempt theirs)" in outcome.err
    assert "Traceback" not in outcome.err
    owner = read_owner(folder)
    assert owner
    assert owner.attempt == "theirs"
    assert not {"summary.json", "report.html", "metrics.jsonl"} & set(folder.names())


@pytest.mark.long
def test_a_killed_driver_is_followed_by_the_next(calm: tuple[Config, dict[str, Any]]) -> None:
    config, whole = calm
    driver = start_job("train", config, "--run", "killed")
    wait_for_checkpoint(config, "killed", 40, driver)
    driver.kill()
    assert finish_job(driver).code == -signal.SIGKILL
    run_well("train", config, "--run", "killed")
    assert 40 <= summary(config, "killed")["resumed_from"] < STEPS
    _holds(config, "killed", whole)


def _mlflow_of(driver: Process) -> psutil.Process:
    found: list[psutil.Process] = []

    def is_there() -> bool:
        found[:] = find_children(driver.pid, "spawn_main")
        return bool(found)

    wait_for(is_there, driver)
    (process,) = found
    return process


@pytest.mark.long
def test_a_killed_driver_takes_its_mlflow_process_along(calm: tuple[Config, dict[str, Any]]) -> None:
    config = replace(calm[0], record=RecordConfig(mlflow=True), train=replace(calm[0].train, steps=100_000))
    driver = start_job("train", config, "--run", "alone")
    process = _mlflow_of(driver)
    driver.kill()
    assert finish_job(driver).code == -signal.SIGKILL
    process.wait(60)


@pytest.mark.weekly
@pytest.mark.long
def test_a_killed_mlflow_process_costs_nothing(calm: tuple[Config, dict[str, Any]]) -> None:
    config, whole = calm
    config = replace(config, record=RecordConfig(mlflow=True))
    driver = start_job("train", config, "--run", "unheard")
    _mlflow_of(driver).kill()
    outcome = finish_job(driver)
    assert outcome.code == 0, outcome.out + outcome.err
    _holds(config, "unheard", whole)
    measured = [entry for entry in read_entries(run_folder(config, "unheard")) if entry["kind"] == "metrics"]
    logged = [entry["step"] for entry in measured if "train_loss" in entry["values"]]
    assert logged == list(range(20, STEPS + 1, 20))
    storage = run_folder(config, "unheard").parent
    run = only_run(storage, "unheard")
    assert run.info.status == "FINISHED"
    assert [step for step, _, _ in history(storage, run.info.run_id, "train/loss")] == logged


@pytest.mark.long
def test_a_driver_whose_run_was_taken_over_ends_without_touching_it(calm: tuple[Config, dict[str, Any]]) -> None:
    """As where nothing was heard of it for a minute and a driver on another machine has taken the run."""
    config = replace(calm[0], train=replace(calm[0].train, steps=100_000))
    driver = start_job("train", config, "--run", "taken")
    folder = run_folder(config, "taken")
    wait_for(lambda: (folder / "journal").names(), driver)
    owner = read_owner(folder)
    assert owner
    theirs = asdict(replace(owner, host="elsewhere", machine="another", pid=1, attempt="theirs"))
    with lease._exclusive(folder):
        folder.put_json("owner.json", theirs)
    outcome = finish_job(driver)
    assert outcome.code == 2, outcome.out + outcome.err
    assert "process 1 on elsewhere has taken over run taken" in outcome.err
    assert "Traceback" not in outcome.err
    assert folder.read_json("owner.json") == theirs
    assert not folder.exists("summary.json")
