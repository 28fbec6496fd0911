"""Workers of an attempt that was given up, and that still write after the next one began: the run keeps its bits."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from raystride.pipelines.train.checkpoint.audit import audit
from tests.faults.moments import Blow, Group, Moment, finish, short_job
from tests.tiny import write_text
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of some 300 samples."""
    return write_text(tmp_path_factory.mktemp("stale"), 6_000)


@pytest.mark.long
@pytest.mark.parametrize("name", ["new", "old"], ids=["attempt", "restart"])  # Ray restarts a group within an attempt
@pytest.mark.parametrize(
    ("moment", "step"),
    [
        ("between steps", 7),
        ("data", 8),  # its half of a save was cleared away meanwhile
        ("manifest", 8),  # this manifest passes, the next not
    ],
    ids=["between", "data", "manifest"],
)
def test_an_old_group_that_wakes_up_changes_nothing(
    text: Path, undisturbed: dict[str, Any], tmp_path: Path, moment: Moment, step: int, name: str
) -> None:
    job = replace(short_job(text, tmp_path, "run"), attempt="old")
    old = Group(job, 2, tmp_path, Blow(moment, step, 0, signal.SIGSTOP))
    sleeper = old.process(0)
    wait_until(lambda: sleeper.status() == psutil.STATUS_STOPPED, "stopped")
    # As where a node stood still for so long that its driver gave it up and began again without it.
    after = finish(job, 3, tmp_path / "after", attempt=name)
    assert after["resumed_from"] == 4
    sleeper.send_signal(signal.SIGCONT)
    assert old.codes() == [1, 1]
    for error in old.errors().values():
        assert re.search(f"Superseded: attempt {name} has taken this run over from old", error), error
    assert job.folder.local
    assert len(list(job.folder.local.glob("checkpoints/*/MANIFEST.json"))) == 6  # of steps 4, 8, 10, 12, 16, 20
    newest = job.folder.read_json("checkpoints/step-00000020/MANIFEST.json")
    assert newest["attempt"] == name
    assert {file.partition("/")[0] for file in newest["files"]} == {newest["folder"]}
    assert newest["folder"].startswith(f"{name}-")
    again = finish(job, 1, tmp_path, attempt="again")
    assert again["resumed_from"] == 20
    assert again["parameters_sha256"] == after["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert audit(job.folder / "checkpoints").samples == undisturbed["samples_seen"]
