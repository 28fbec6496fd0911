"""A worker that is killed or stopped at any moment of a step or of a save: the run goes on to the same bits."""

import os
import re
import signal
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.crash import PLAN, Bench
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from tests.faults.moments import Blow, Group, Moment, finish, short_job
from tests.tiny import write_text
from tests.waiting import wait_until

SAME = ("parameters_sha256", "steps", "samples_seen", "tokens_seen", "val_loss", "train_loss")
LOST_PEER = r"Connection closed by peer|Connection reset by peer|Broken pipe"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of some 300 samples."""
    path = tmp_path_factory.mktemp("kills")
    write_text(path, 6_000)
    return path


def _holds(checkpoints: Folder, summary: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    """The promise: the same bits, and every sample once."""
    assert {key: summary[key] for key in SAME} == {key: undisturbed[key] for key in SAME}
    assert audit(checkpoints).samples == undisturbed["samples_seen"]


@pytest.mark.parametrize(
    ("moment", "step", "victim", "world", "then", "resumed_from"),
    [
        pytest.param("between steps", 7, 0, 1, 2, 4, marks=pytest.mark.weekly),
        pytest.param("between steps", 7, 2, 3, 1, 4, marks=pytest.mark.long),
        pytest.param("forward", 7, 1, 2, 3, 4, marks=pytest.mark.long),
        pytest.param("backward", 7, 0, 2, 4, 4, marks=pytest.mark.weekly),
        ("backward", 7, 2, 3, 2, 4),
        ("reduction", 7, 1, 2, 1, 4),
        pytest.param("reduction", 7, 0, 4, 3, 4, marks=pytest.mark.weekly),
        ("data", 8, 1, 2, 3, 4),
        ("manifest", 8, 0, 3, 1, 4),
        pytest.param("hint", 8, 0, 2, 2, 8, marks=pytest.mark.long),
        pytest.param("pruning", 12, 0, 2, 1, 12, marks=pytest.mark.long),
    ],
)
def test_a_worker_killed_at_this_moment_changes_nothing(
    folder: Path,
    undisturbed: dict[str, Any],
    moment: Moment,
    step: int,
    victim: int,
    world: int,
    then: int,
    resumed_from: int,
) -> None:
    job = short_job(folder / "text.txt", folder, f"{moment}-{world}".replace(" ", "-"))
    group = Group(job, world, folder, Blow(moment, step, victim))
    codes = group.codes()
    assert codes[victim] == -signal.SIGKILL
    assert set(codes) <= {-signal.SIGKILL, 1}, "the others end with an error"
    assert len(group.errors()) == world - 1
    after = finish(job, then, folder)
    assert after["resumed_from"] == resumed_from
    _holds(job.folder / "checkpoints", after, undisturbed)


@pytest.mark.parametrize(("moment", "step"), [("backward", 7), ("manifest", 8)])
def test_a_worker_that_stood_still_and_goes_on_changes_nothing(
    folder: Path, undisturbed: dict[str, Any], moment: Moment, step: int
) -> None:
    job = short_job(folder / "text.txt", folder, f"still-{moment}")
    group = Group(job, 2, folder, Blow(moment, step, 0, signal.SIGSTOP))
    stopped = group.process(0)
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "stopped")
    assert group.workers[1].is_alive()
    assert not group.errors(), "the other one waits for it"
    stopped.send_signal(signal.SIGCONT)
    _holds(job.folder / "checkpoints", group.summary(), undisturbed)


@pytest.mark.long
def test_those_who_wait_for_a_stopped_worker_learn_of_its_end(folder: Path, undisturbed: dict[str, Any]) -> None:
    job = short_job(folder / "text.txt", folder, "still-killed")
    group = Group(job, 3, folder, Blow("forward", 7, 2, signal.SIGSTOP))
    stopped = group.process(2)
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, "stopped")
    assert not group.errors()
    stopped.kill()
    assert group.codes() == [1, 1, -signal.SIGKILL]
    for error in group.errors().values():
        assert re.search(LOST_PEER, error), error[-2000:]
    _holds(job.folder / "checkpoints", finish(job, 2, folder), undisturbed)


@pytest.mark.long
def test_six_kills_of_whole_process_trees_end_with_the_same_bits_and_one_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment from the start of the process to the last line, other ones each day; `benchmarks.crash` has more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RAYSTRIDE_LINEAR", "torch")
    seed, kills, numbers = int(os.environ["RAYSTRIDE_SEED"]), 0, count()
    with Bench(tmp_path, seed) as bench:
        while kills < 6:
            outcome = bench.run(PLAN[0], next(numbers))
            assert not outcome.problems, (seed, outcome)
            kills += outcome.blows
