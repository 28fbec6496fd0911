"""A training whose screen fails or goes away: it goes on, saves, and ends with its own exit code."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import CheckpointConfig, Config, LaunchConfig, TrainConfig, ValidationConfig
from tests.ray_jobs.jobs import ROOT, environment, finish_job, run_folder, start_job, summary, wait_for_checkpoint
from tests.tiny import tiny, write_text
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(600)
STEPS = 120
UNSHOWN = "not shown on the screen"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """An inline training of some seconds, which shows a line every step."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        train=TrainConfig(steps=STEPS, slots=1, slot_size=2, log_every=1),
        validation=ValidationConfig(every=0, samples=2),
        checkpoint=CheckpointConfig(every=20),
        launch=LaunchConfig(mode="inline"),
    )


def _command(config: Config, *flags: str) -> list[str]:
    from raystride.pipelines.config.parse import to_yaml

    file = Path(config.storage).parent / "tiny.yaml"
    file.write_text(to_yaml(config))
    return [sys.executable, "-m", "raystride", "train", "--config", str(file), "--run", "r", *flags]


def _start(config: Config, *flags: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen(_command(config, *flags), cwd=ROOT, env=environment(), text=True, **options)


def _reader_leaves(config: Config) -> tuple[int, str]:
    process = _start(config, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, said = process.communicate()
    return process.returncode, said


def _device_is_full(config: Config) -> tuple[int, str]:
    with open("/dev/full", "w") as full:
        process = _start(config, stdout=full, stderr=subprocess.PIPE)
        _, said = process.communicate()
    return process.returncode, said


def _both_are_closed(config: Config) -> tuple[int, str]:
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *_command(config)]
    return subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode, ""


def _latin(config: Config) -> tuple[int, str]:
    command, env = _command(config), environment() | {"PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False)
    assert done.stdout.decode("latin-1").count("step ")
    return done.returncode, done.stderr.decode("latin-1")


@pytest.mark.parametrize(
    ("run", "unshown"),
    [
        pytest.param(_reader_leaves, True, marks=pytest.mark.long),
        pytest.param(_device_is_full, True, marks=[pytest.mark.long, pytest.mark.weekly]),
        pytest.param(_both_are_closed, True, marks=[pytest.mark.long, pytest.mark.weekly]),
        pytest.param(_latin, False, marks=[pytest.mark.long, pytest.mark.weekly]),
    ],
)
def test_a_screen_that_fails_ends_no_training(
    config: Config, run: Callable[[Config], tuple[int, str]], unshown: bool
) -> None:
    code, said = run(config)
    assert code == 0, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert (summary(config, "r")["status"], summary(config, "r")["steps"]) == ("finished", STEPS)
    log = run_folder(config, "r").read("log.txt").decode()
    assert (UNSHOWN in log) == unshown
    assert ("results  " in log.partition(UNSHOWN)[2]) == unshown


@pytest.mark.long
def test_a_terminal_that_goes_away_saves_the_run(config: Config) -> None:
    """Its processes get a SIGHUP, and what they write fails with EIO, as in a pseudo-terminal whose master is closed."""
    master, slave = os.openpty()
    process = _start(config, "--train.steps", "100000", stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
    os.close(slave)
    _read_until_step(master)
    os.close(master)
    os.kill(process.pid, signal.SIGHUP)
    assert process.wait() == 129
    told = summary(config, "r")
    assert (told["status"], told["interrupted_by"]) == ("stopped", "SIGHUP")
    checkpoints = run_folder(config, "r") / "checkpoints"
    assert checkpoints.read("last") == f"step-{told['steps']:08}\n".encode()


def _read_until_step(master: int) -> None:
    seen = b""

    def has_begun() -> bool:
        nonlocal seen
        seen += os.read(master, 1 << 16)
        return b"step " in seen

    wait_until(has_begun, lambda: f"a step: {seen[-2000:]!r}")


@pytest.mark.weekly
@pytest.mark.long
def test_a_sighup_that_nohup_has_ignored_ends_nothing(config: Config) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = _start(config, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until(lambda: run_folder(config, "r").exists("checkpoints/last"), "a checkpoint")
    process.send_signal(signal.SIGHUP)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert summary(config, "r")["steps"] == STEPS


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_signals_at_once_are_one_request(config: Config, number: int) -> None:
    driver = start_job("train", config, "--run", "r", "--train.steps", "100000")
    wait_for_checkpoint(config, "r", 20, driver)
    driver.send_signal(number)
    driver.send_signal(number)
    outcome = finish_job(driver)
    assert outcome.code == 128 + number, outcome.out + outcome.err
    assert (summary(config, "r")["status"], summary(config, "r")["interrupted_by"]) == (
        "stopped",
        signal.Signals(number).name,
    )


@pytest.mark.long
@pytest.mark.weekly
def test_a_hangup_of_all_processes_saves_a_run_on_ray(config: Config) -> None:
    """A shell that ends sends SIGHUP to the group of its job, in which Ray's processes and MLflow's are."""
    driver = start_job(
        "train", config, "--run", "r", "--train.steps", "100000", "--launch", "ray", "--record.mlflow", "true"
    )
    wait_for_checkpoint(config, "r", 40, driver)
    os.killpg(driver.pid, signal.SIGHUP)
    outcome = finish_job(driver)
    assert outcome.code == 129, outcome.out + outcome.err
    told = summary(config, "r")
    assert (told["status"], told["interrupted_by"]) == ("stopped", "SIGHUP"), outcome.err
    assert (run_folder(config, "r") / "checkpoints").read("last") == f"step-{told['steps']:08}\n".encode()
    assert told["mlflow_run_id"]
