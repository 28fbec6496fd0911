"""Ctrl-C and SIGTERM end a job, wherever it is, in one line and with the exit code that a shell expects."""

import signal
from pathlib import Path

import psutil
import pytest

from raystride.pipelines.config import CheckpointConfig, Config, RecordConfig, TrainConfig, ValidationConfig
from tests.ray_jobs.jobs import Process, finish_job, run_folder, start_job, summary, wait_for, wait_for_checkpoint
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(600)
SLOW = """
import time
from pathlib import Path
import raystride

@raystride.register_source("slow")
def slow(split):
    Path({marker!r}).touch()
    for _ in range(6000):
        time.sleep(0.1)  # not all at once: a signal just before a sleep is seen after it
    yield {{"text": "never"}}
"""
AT_THE_END = """
import os, signal
import raystride

@raystride.register_observer
class Late(raystride.Observer):
    def on_end(self, summary):
        os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A long training of small steps."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        train=TrainConfig(steps=100_000, slots=2, slot_size=2, log_every=50),
        validation=ValidationConfig(every=0, samples=4),
        checkpoint=CheckpointConfig(every=50),
        record=RecordConfig(mlflow=False),
    )


def _start_endless_preparation(config: Config, folder: Path, mode: str, env: dict[str, str] | None = None) -> Process:
    """Starts a training whose data never end; returns when it reads them."""
    marker, plugin = folder / "reading", folder / "slow.py"
    plugin.write_text(SLOW.format(marker=str(marker)))
    source = ["--plugins", f'["{plugin}"]', "--data.source", "slow", "--data.kind", "auto"]
    driver = start_job("train", config, *source, "--launch", mode, "--run", "never", env=env)
    wait_for(marker.exists, driver)
    return driver


@pytest.mark.long
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_saves_and_says_that_it_is_not_done(config: Config, number: int, code: int) -> None:
    driver = start_job("train", config, "--run", "stopped", "--launch", "inline")
    wait_for_checkpoint(config, "stopped", 50, driver)
    driver.send_signal(number)
    outcome = finish_job(driver)
    assert outcome.code == code, outcome.out + outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    told = summary(config, "stopped")
    assert (told["status"], told["interrupted_by"]) == ("stopped", signal.Signals(number).name)
    assert (run_folder(config, "stopped") / "checkpoints").read("last") == f"step-{told['steps']:08}\n".encode()


@pytest.mark.parametrize("mode", ["inline", pytest.param("ray", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long)]
)
def test_a_preparation_ends_in_one_line(config: Config, tmp_path: Path, mode: str, number: int, code: int) -> None:
    driver = _start_endless_preparation(config, tmp_path, mode)
    driver.send_signal(number)
    outcome = finish_job(driver)
    assert outcome.code == code, outcome.out + outcome.err
    assert outcome.err.startswith("interrupted by "), outcome.err
    assert len(outcome.err.strip().splitlines()) == 1, outcome.err
    assert not run_folder(config, "never").exists("owner.json")


@pytest.mark.long
def test_a_job_that_ignores_ctrl_c_says_so_and_how_to_stop_it(config: Config, tmp_path: Path) -> None:
    """Its starter ignores SIGINT, as `nohup`, cron and a script's `&` do. SIGTERM ends it, although it comes second."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        driver = _start_endless_preparation(config, tmp_path, "inline", env={})
    finally:
        signal.signal(signal.SIGINT, before)
    driver.send_signal(signal.SIGINT)
    driver.send_signal(signal.SIGTERM)
    outcome = finish_job(driver)
    assert outcome.code == 143, outcome.out + outcome.err
    warning, ended = outcome.err.strip().splitlines()
    assert warning == f"Ctrl-C is ignored: this process was started with SIGINT ignored; `kill {driver.pid}` stops it"
    assert ended.startswith("interrupted by SIGTERM")


@pytest.mark.long
def test_a_signal_while_the_record_is_closed_costs_nothing(config: Config, tmp_path: Path) -> None:
    """The observer is told of the end in the training's process, which inline is the driver."""
    plugin = tmp_path / "late.py"
    plugin.write_text(AT_THE_END)
    driver = start_job(
        "train", config, "--plugins", f'["{plugin}"]', "--train.steps", "60", "--launch", "inline", "--run", "late"
    )
    outcome = finish_job(driver)
    assert outcome.code == 0, outcome.out + outcome.err
    assert "Traceback" not in outcome.out + outcome.err
    assert (summary(config, "late")["status"], summary(config, "late")["steps"]) == ("finished", 60)
    assert run_folder(config, "late").exists("report.html")


@pytest.mark.long
def test_the_end_of_the_head_that_a_driver_started_is_noticed_and_the_record_closed(config: Config) -> None:
    """Ray ended the driver a minute later, without a word of its own; its workers save before that."""
    driver = start_job("train", config, "--run", "headless", "--launch", "ray", "--scaling.workers", "1")
    wait_for_checkpoint(config, "headless", 50, driver)
    (head,) = [child for child in psutil.Process(driver.pid).children(recursive=True) if child.name() == "gcs_server"]
    head.kill()
    outcome = finish_job(driver)
    assert outcome.code == 1, outcome.out + outcome.err
    assert "HeadLost: Ray on this machine has ended" in outcome.err
    assert "the same command resumes it" in outcome.err
    assert any(line.startswith("results") for line in outcome.out.splitlines()), outcome.out
    assert summary(config, "headless")["status"] == "failed"
    assert run_folder(config, "headless").exists("report.html")
