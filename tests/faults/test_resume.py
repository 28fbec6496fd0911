"""A run that is killed and started again ends with the same bits as one that was undisturbed."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import CheckpointConfig, ModelConfig, TrainConfig, ValidationConfig
from raystride.pipelines.train.worker.job import Job
from tests.processes import Workers, finish, make_job, run_workers, start_workers
from tests.tiny import tiny, write_text
from tests.waiting import wait_until


def _job(tmp_path: Path, run: str, dropout: float = 0.2) -> Job:
    text = tmp_path / "text.txt"
    config = tiny(
        text if text.exists() else write_text(tmp_path),
        model=ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=dropout),
        train=TrainConfig(steps=60, slots=6, slot_size=2, log_every=7),
        validation=ValidationConfig(every=25, samples=16),
        checkpoint=CheckpointConfig(every=10, keep=2),
    )
    return make_job(config, tmp_path, run)


def _wait_for_checkpoint(job: Job, step: int) -> None:
    wait_until(lambda: job.folder.exists(f"checkpoints/step-{step:08d}/MANIFEST.json"), "the checkpoint")


def _kill_all(workers: Workers, job: Job) -> None:
    """Kills them (SIGKILL) when they are in the run's middle."""
    _wait_for_checkpoint(job, 20)
    for process in workers.processes:
        process.kill()
    for process in workers.processes:
        process.join()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.long), 3])
def test_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path, world: int) -> None:
    whole = run_workers(_job(tmp_path, "whole"), world)
    job = _job(tmp_path, "killed")
    _kill_all(start_workers(job, world), job)
    resumed = run_workers(replace(job, attempt="a2"), world)
    assert 20 <= resumed["resumed_from"] < 60
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    for key in ("steps", "samples_seen", "tokens_seen", "val_loss"):
        assert resumed[key] == whole[key]


def test_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    # Dropout is drawn for a micro-batch at a time, and how many slots that is depends on the workers.
    job = _job(tmp_path, "run", dropout=0.0)
    _kill_all(start_workers(job, 2), job)
    resumed = run_workers(replace(job, attempt="a2"), 3)
    whole = run_workers(_job(tmp_path, "whole", dropout=0.0), 1)
    assert resumed["samples_seen"] == whole["samples_seen"]
    # Sums in another order differ in the last bits, which some steps make larger; the data are the same.
    assert resumed["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)


def test_worker_that_lost_its_peer_does_not_hang(tmp_path: Path) -> None:
    job = _job(tmp_path, "run")
    job = replace(job, config=replace(job.config, train=replace(job.config.train, steps=100_000)))
    workers = start_workers(job, 2)
    _wait_for_checkpoint(job, 20)
    workers.processes[1].kill()
    workers.processes[0].join(60)
    assert workers.processes[0].exitcode == 1
    with pytest.raises(AssertionError):
        finish(workers)
