"""A disk that is full or read-only while a checkpoint is written: the job says so, and goes on when it is well again."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from raystride.pipelines.config import Config, LaunchConfig
from raystride.pipelines.train.checkpoint.audit import audit
from tests.faults.moments import Blow, Group, short_job
from tests.ray_jobs.jobs import Outcome, finish_job, run_folder, run_job, run_well, start_job, summary, wait_for_checkpoint
from tests.tiny import write_text
from tests.waiting import wait_until

LEFT = 100_000
"""Bytes that a full disk has left: room for settings and journal, none for the 130,000 of a checkpoint."""


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory, undisturbed: dict[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Settings, inline, and the summary of a run on one worker that nothing disturbs."""
    folder = tmp_path_factory.mktemp("disk")
    job = short_job(write_text(folder, 6_000), folder, "calm")
    return replace(job.config, launch=LaunchConfig(mode="inline")), undisturbed


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def _remount(disk: Path, option: str) -> None:
    """Tries until no file is open for writing, which a file system that becomes read-only may not have."""
    command = ["mount", "-o", f"remount,{option}", str(disk)]
    wait_until(lambda: subprocess.run(command, capture_output=True).returncode == 0, option)


def _fill(disk: Path, left: int) -> Path:
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 16))
    os.truncate(ballast, ballast.stat().st_size - left)
    return ballast


def _half(config: Config, disk: Path, run: str, blow: Blow) -> tuple[Config, Group]:
    """A run on this disk that is hit at step 8, and the settings of the command that goes on with it."""
    text = Path(config.data.source)
    job = short_job(text, disk, run)
    return replace(config, storage=str(disk)), Group(job, 2, text.parent, blow)


def _goes_on(config: Config, run: str, calm: dict[str, Any], resumed_from: int) -> None:
    """The same command ends with the right bits."""
    run_well("train", config, "--run", run)
    after = summary(config, run)
    assert after["resumed_from"] == resumed_from
    assert after["parameters_sha256"] == calm["parameters_sha256"]
    assert audit(run_folder(config, run) / "checkpoints").samples == calm["samples_seen"]


def _fails(outcome: Outcome, error: str, remedy: str) -> None:
    """One screen that names what the disk said and what to do, and the exit code of a disk that cannot do it."""
    assert outcome.code == 3, outcome.out + outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert re.search(rf"^training failed: .*\n  OSError: .*{error}", outcome.err, re.MULTILINE), outcome.err
    assert f"try: {remedy}" in outcome.err


def _is_refused(outcome: Outcome, error: str, remedy: str) -> None:
    """Two lines, before anything starts."""
    assert outcome.code == 3, outcome.out + outcome.err
    assert re.fullmatch(rf"error: .*{error}.*\n  try: {remedy}.*\n", outcome.err), outcome.err


@pytest.mark.long
def test_a_disk_that_becomes_full(calm: tuple[Config, dict[str, Any]], disk: Path) -> None:
    config, group = _half(calm[0], disk, "full", Blow("hint", 8, 0))
    group.codes()
    ballast = _fill(disk, left=0)
    _is_refused(run_job("train", config, "--run", "full"), "No space left on device", "free space")
    ballast.unlink()
    ballast = _fill(disk, LEFT)
    _fails(run_job("train", config, "--run", "full"), "No space left on device", "free space")
    ballast.unlink()
    _goes_on(config, "full", calm[1], resumed_from=8)


@pytest.mark.long
def test_a_disk_that_becomes_read_only(calm: tuple[Config, dict[str, Any]], disk: Path) -> None:
    config, group = _half(calm[0], disk, "locked", Blow("data", 8, 1, signal.SIGSTOP))
    stopped = group.process(1)
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "stopped in the middle of a save")
    _remount(disk, "ro")
    stopped.send_signal(signal.SIGCONT)
    assert group.codes() == [1, 1]
    for error in group.errors().values():
        assert re.search(r"^OSError: .* Read-only file system: .*step-000000(10|12)", error, re.MULTILINE), error
    _is_refused(run_job("train", config, "--run", "locked"), "Read-only file system", "give --storage")
    _remount(disk, "rw")
    _goes_on(config, "locked", calm[1], resumed_from=4)


@pytest.mark.long
def test_a_job_whose_disk_becomes_read_only_ends_with_one_screen(calm: tuple[Config, dict[str, Any]], disk: Path) -> None:
    config = replace(calm[0], storage=str(disk / "runs"))
    driver = start_job("train", config, "--run", "cut", "--train.steps", "100000")
    wait_for_checkpoint(config, "cut", 8, driver)
    _remount(disk, "ro")
    _fails(finish_job(driver), "Read-only file system", "give --storage")
