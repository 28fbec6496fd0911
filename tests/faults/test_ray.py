"""Ray workers that really die or fail: one screen that names the rank, or a run that mends itself to the same bits."""

import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    LaunchConfig,
    ModelConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from tests.children import find_children
from tests.processes import make_job, run_workers
from tests.ray_jobs.jobs import Outcome, Process, finish_job, start_job, summary, wait_for_checkpoint
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Tiny settings on two Ray workers, with steps enough to be disturbed in the middle."""
    path = tmp_path_factory.mktemp("ray")
    return tiny(
        write_text(path),
        storage=str(path / "runs"),
        model=ModelConfig(layers=2, heads=2, hidden_size=16, context=16, dropout=0.1),
        train=TrainConfig(steps=800, slots=4, slot_size=2, log_every=20),
        validation=ValidationConfig(every=0, samples=16),
        checkpoint=CheckpointConfig(every=40, keep=2),
        scaling=ScalingConfig(workers=2, threads=1),
    )


def _start(config: Config, run: str) -> Process:
    """Starts a run and waits until it is in its middle."""
    driver = start_job("train", config, "--run", run)
    wait_for_checkpoint(config, run, 80, driver)
    return driver


def _workers(driver: Process) -> list[psutil.Process]:
    return find_children(driver.pid, "RayTrainWorker", recursive=True)


def _one_screen(outcome: Outcome) -> str:
    """The text for a person, which is all that a failure prints besides the three lines."""
    assert outcome.code == 1, outcome.out + outcome.err
    everything = outcome.out + outcome.err
    assert "Traceback" not in everything
    assert everything.count("training failed") == 1
    assert len(outcome.err.splitlines()) <= 12, outcome.err
    assert [line.split()[0] for line in outcome.lines[-3:]] == ["results", "mlflow", "next"]
    return outcome.err


@pytest.mark.long
def test_a_killed_worker_ends_the_run_with_one_screen(config: Config) -> None:
    driver = _start(config, "killed")
    workers = _workers(driver)
    assert len(workers) == 2
    workers[1].kill()
    screen = _one_screen(finish_job(driver))
    assert re.match(r"training failed: rank [01], step \d+\n", screen)
    assert "died" in screen
    assert "--launch.max_restarts" in screen
    assert summary(config, "killed")["status"] == "failed"


@pytest.mark.long
def test_with_restarts_a_killed_worker_changes_nothing(config: Config) -> None:
    mending = replace(config, launch=LaunchConfig(max_restarts=2))
    driver = _start(mending, "mended")
    _workers(driver)[0].kill()
    outcome = finish_job(driver)
    assert outcome.code == 0, outcome.out + outcome.err
    mended = summary(config, "mended")
    assert (mended["status"], mended["steps"]) == ("finished", 800)
    assert mended["resumed_from"] >= 80
    # Two workers without Ray, which nothing disturbed.
    whole = run_workers(make_job(config, Path(config.storage), "whole"), 2)
    for key in ("parameters_sha256", "samples_seen", "tokens_seen", "val_loss"):
        assert mended[key] == whole[key], key


@pytest.mark.weekly
@pytest.mark.long
def test_a_shard_that_rots_under_a_run_names_the_rank_and_the_line(config: Config, tmp_path: Path) -> None:
    own = replace(config, storage=str(tmp_path / "runs"))
    driver = _start(own, "rotten")
    (shard,) = (tmp_path / "runs" / ".prepared").glob("*/train/*.arrow")
    size = shard.stat().st_size
    with shard.open("r+b") as stream:  # its size stays, and workers that have it mapped see it at once
        stream.seek(size // 4)
        stream.write(b"\xff" * (size // 2))
    screen = _one_screen(finish_job(driver))
    assert re.match(r"training failed: rank [01], step \d+\n  IndexError: ", screen)
    assert re.search(r"^    raystride/(model|pipelines)/\S+\.py:\d+ in ", screen, re.MULTILINE)
