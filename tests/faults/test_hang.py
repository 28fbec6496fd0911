"""A worker that hangs: the run is ended with one screen that names it, or mends itself to the same bits."""

import re
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    LaunchConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.launch.hang.detector import FIRST_STEPS_S, WARMUP_CHECKS, Hang, HangDetector
from raystride.pipelines.launch.hang.heartbeat import Heartbeat
from raystride.pipelines.observability.record import read_entries
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from tests.children import find_children, stop
from tests.faults.moments import finish, short_job
from tests.fork_server import CONTEXT
from tests.ray_jobs.jobs import Process, finish_job, run_folder, run_well, start_job, summary, wait_for
from tests.tiny import tiny, write_text

pytestmark = pytest.mark.timeout(900)
ENOUGH = 100_000
"""Steps that no test comes to, however fast the machine."""
HANG_S = 10
POLL_S = 0.5
"""How often the driver looks at its workers; it has to see steps end at some of these looks before it judges them."""


def _workers(driver: Process) -> set[psutil.Process]:
    return set(find_children(driver.pid, "RayTrainWorker", recursive=True))


def _starts(folder: Folder) -> list[str]:
    """What each group said when it began to train."""
    entries = read_entries(folder) if folder.exists("journal") else []
    texts = [str(entry["values"].get("text")) for entry in entries]
    return [text for text in texts if text.startswith("training on")]


def _stop_one(config: Config, driver: Process, starts: int) -> psutil.Process:
    """Stops a worker of the group that trains after so many starts, when its first steps are over."""
    folder = run_folder(config, "stopped")
    wait_for(lambda: len(_starts(folder)) == starts, driver)
    wait_for(lambda: folder.exists("checkpoints/last"), driver)
    for _ in range(2 * WARMUP_CHECKS):
        before = folder.read("checkpoints/last")
        wait_for(lambda before=before: folder.read("checkpoints/last") != before, driver)  # type: ignore[misc]
        time.sleep(POLL_S)
    victim = max(_workers(driver), key=lambda process: process.create_time())
    stop(victim.pid)
    return victim


@pytest.mark.long
def test_a_stopped_worker_is_found_out_with_one_restart_and_without(tmp_path: Path) -> None:
    job = short_job(
        write_text(tmp_path, 6_000),
        tmp_path,
        "calm",
        train=TrainConfig(steps=ENOUGH, slots=6, slot_size=2, log_every=20, exact=True, clip_norm=0.5),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
        checkpoint=CheckpointConfig(every=20, keep=2),
        validation=ValidationConfig(every=0, samples=15),
        scaling=ScalingConfig(workers=2, threads=1),
    )
    config = replace(job.config, storage=str(tmp_path / "runs"), launch=LaunchConfig(max_restarts=1, hang_s=HANG_S))
    driver = start_job("train", config, "--run", "stopped")
    first = _stop_one(config, driver, 1)
    second = _stop_one(config, driver, 2)  # which there is by itself
    outcome = finish_job(driver)
    assert outcome.code == 1, outcome.out + outcome.err
    folder = run_folder(config, "stopped")
    rank = re.search(rf"training failed: rank ([01]), step \d+\n  Hung: rank \1 on \S+ \(pid {second.pid}\) ", outcome.err)
    assert rank, outcome.err
    assert "has not been heard of" in outcome.err
    assert re.search(r"^    raystride/(model|pipelines)/\S+\.py:\d+ in ", outcome.err, re.MULTILINE), "where it stood"
    assert "--launch.max_restarts" in outcome.err
    assert re.match(r"training on 2 worker\(s\) from step [1-9]", _starts(folder)[1]), "from the newest checkpoint"
    profiles = folder / "profiles"
    for name, victim in zip(profiles.names(), (first, second), strict=True):
        text = profiles.read(name).decode()
        assert name.startswith("hang-")
        assert outcome.err.count(name) == 1
        culprit, other = re.split(r"^rank ", text, flags=re.MULTILINE)[1:]
        assert f"pid {victim.pid}, " in culprit
        assert "State:\tT (stopped)" in culprit
        assert "(stopped)" not in other
        for part in (culprit, other):
            assert "run_worker (" in part, "the stack of a stopped process and of one that waits, in a step or between two"
    last = max(entry["step"] for entry in read_entries(folder) if entry["kind"] == "checkpoint") + 20
    run_well("train", config, *f"--run stopped --launch inline --scaling.workers 1 --train.steps {last}".split())
    shorter = replace(job.config, train=replace(job.config.train, steps=last))
    after, calm = summary(config, "stopped"), finish(replace(job, config=shorter), 1, tmp_path)
    assert (after["status"], after["parameters_sha256"]) == ("finished", calm["parameters_sha256"])
    assert audit(folder / "checkpoints").samples == calm["samples_seen"]


@pytest.mark.long
def test_an_inline_training_that_hangs_is_left(tmp_path: Path) -> None:
    config = tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        run="alone",
        train=TrainConfig(steps=ENOUGH, slots=2, slot_size=1, log_every=1),
        validation=ValidationConfig(every=0, samples=2),
        launch=LaunchConfig(mode="inline", hang_s=5),
    )
    process = CONTEXT.Process(target=_train_and_hang, args=(config, tmp_path / "screen"))
    process.start()
    process.join(600)
    assert process.exitcode == 1
    screen = (tmp_path / "screen").read_text()
    assert re.search(r"^training failed: rank 0, step \d+\n  Hung: rank 0 on \S+ \(pid \d+\) ", screen, re.MULTILINE), screen
    assert "has stood still in forward" in screen
    assert re.search(r"^    tests/faults/test_hang\.py:\d+ in hang$", screen, re.MULTILINE), screen
    assert summary(config, "alone")["status"] == "failed"
    profiles = run_folder(config, "alone") / "profiles"
    (name,) = profiles.names()
    assert " in hang\n" in profiles.read(name).decode()


def _train_and_hang(config: Config, screen: Path) -> None:
    """Becomes a job whose training waits for ever after some steps, as does a thread that Python would wait for."""
    import torch

    from raystride.pipelines.config.parse import Parsed
    from raystride.pipelines.launch import inline
    from raystride.pipelines.launch.console.exit_codes import run_with_exit_code
    from raystride.pipelines.launch.train_job import run_training

    inline.LEAVE_S = 0.5
    for_ever, warm = threading.Event(), threading.Event()
    check = HangDetector.check

    def check_and_tell(detector: HangDetector, heartbeats: Mapping[int, Heartbeat], now: float) -> Hang | None:
        if detector.limit_s < FIRST_STEPS_S:
            warm.set()
        return check(detector, heartbeats, now)

    def hang(module: torch.nn.Module, inputs: object) -> None:
        if type(module).__name__ == "Decoder" and warm.is_set():
            threading.Thread(target=for_ever.wait).start()
            for_ever.wait()

    HangDetector.check = check_and_tell  # type: ignore[method-assign]
    torch.nn.modules.module.register_module_forward_pre_hook(hang)
    sys.stderr = screen.open("w", buffering=1)
    sys.exit(run_with_exit_code(lambda: run_training(Parsed(config, preset="tiny"))))
