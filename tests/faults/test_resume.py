"""A run that is killed and started again ends with the same bits as one that was left in peace."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.config import Checkpoint, Model, Train, Validation
from pipelines.launch.job import Job
from tests.processes import finish, make_job, run_workers, start_workers
from tests.tiny import tiny, write_text


def _job(tmp_path: Path, run: str, dropout: float = 0.2) -> Job:
    text = tmp_path / "text.txt"
    config = tiny(
        text if text.exists() else write_text(tmp_path),
        model=Model(layers=2, heads=2, width=16, context=16, dropout=dropout),
        train=Train(steps=60, slots=6, slot_size=2, log_every=7),
        validation=Validation(every=25, samples=16),
        checkpoint=Checkpoint(every=10, keep=2),
    )
    return make_job(config, tmp_path, run)


def _wait_for_checkpoint(job: Job, step: int) -> None:
    deadline = time.monotonic() + 90
    while not job.folder.exists(f"checkpoints/step-{step:08d}/MANIFEST.json"):
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.02)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_killed_and_resumed_run_ends_with_the_same_bits(tmp_path: Path, world: int) -> None:
    whole = run_workers(_job(tmp_path, "whole"), world)
    job = _job(tmp_path, "killed")
    processes = start_workers(job, world)
    _wait_for_checkpoint(job, 20)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
    resumed = run_workers(replace(job, attempt="a2"), world)
    assert 20 <= resumed["resumed_from"] < 60
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    for key in ("steps", "samples_seen", "tokens_seen", "val_loss"):
        assert resumed[key] == whole[key]


def test_corrupt_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    job = _job(tmp_path, "run")
    whole = run_workers(job, 1)
    steps = [name for name in (job.folder / "checkpoints").names() if name.startswith("step-")]
    newest = job.folder / "checkpoints" / steps[-1]
    assert newest.local
    data = newest.local / "a1" / "rank-0.bin"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    again = run_workers(replace(job, attempt="a2"), 1)
    assert again["resumed_from"] < 60
    assert again["parameters_sha256"] == whole["parameters_sha256"]


def test_run_goes_on_with_another_number_of_workers(tmp_path: Path) -> None:
    # Dropout is drawn for a micro-batch at a time, and how many slots that is depends on the workers.
    job = _job(tmp_path, "run", dropout=0.0)
    processes = start_workers(job, 2)
    _wait_for_checkpoint(job, 20)
    for process in processes:
        process.kill()
        process.wait()
    resumed = run_workers(replace(job, attempt="a2"), 3)
    whole = run_workers(_job(tmp_path, "whole", dropout=0.0), 1)
    assert resumed["samples_seen"] == whole["samples_seen"]
    # Sums in another order differ in the last bits, which some steps make larger; the data are the same.
    assert resumed["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-4)


def test_worker_that_lost_its_peer_does_not_hang(tmp_path: Path) -> None:
    job = _job(tmp_path, "run")
    job = replace(job, config=replace(job.config, train=replace(job.config.train, steps=100_000)))
    processes = start_workers(job, 2)
    _wait_for_checkpoint(job, 20)
    processes[1].kill()
    assert processes[0].wait(timeout=60) != 0
    with pytest.raises(AssertionError):
        finish(processes)
