"""The wall clock set back by a day between two attempts: checkpoints do not go by it, and the bits are the same."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.train.checkpoint.audit import audit
from tests.clock import no_clock, wrong_clock
from tests.faults.moments import Blow, Group, finish, short_job
from tests.ray_jobs.jobs import run_folder, run_well, summary
from tests.tiny import write_text

DAY_S = 24 * 3600


@pytest.fixture
def yesterday(tmp_path: Path) -> dict[str, str]:
    """Variables under which a process has the time of yesterday."""
    if problem := no_clock():
        pytest.skip(problem)
    return wrong_clock(tmp_path, -DAY_S)


@pytest.mark.weekly
@pytest.mark.long
def test_a_clock_that_was_set_back_changes_nothing(tmp_path: Path, yesterday: dict[str, str]) -> None:
    text, storage = write_text(tmp_path, 6_000), tmp_path / "runs"
    calm = finish(short_job(text, tmp_path, "calm"), 1, tmp_path)
    job = short_job(text, storage, "back")
    Group(job, 2, tmp_path, Blow("hint", 8, 0)).codes()
    config = replace(job.config, launch=LaunchConfig(mode="inline"), storage=str(storage))
    run_well("train", config, "--run", "back", env=yesterday)
    after = summary(config, "back")
    (attempt,) = (run_folder(config, "back") / "attempts").names()
    assert attempt < time.strftime("%Y%m%d-%H%M%S", time.gmtime(time.time() - DAY_S + 3600)), "the clock was set back"
    assert after["resumed_from"] == 8
    assert after["parameters_sha256"] == calm["parameters_sha256"]
    assert audit(run_folder(config, "back") / "checkpoints").samples == calm["samples_seen"]
