"""Checkpoints that lie damaged on the disk: the newest whole one is used, and the run ends with the same bits."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import CheckpointConfig
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from raystride.pipelines.train.worker.job import Job
from tests.faults.moments import Blow, Group, finish, short_job
from tests.tiny import write_text


def _data(step: Path) -> Path:
    """The folder of the files of the only group that wrote there."""
    (found,) = (path for path in step.iterdir() if path.is_dir())
    return found


def _cut(step: Path) -> None:
    data = _data(step) / "rank-1.bin"
    data.write_bytes(data.read_bytes()[:-100])


def _flip(step: Path) -> None:
    data = _data(step) / "rank-0.bin"
    content = bytearray(data.read_bytes())
    content[len(content) // 3] ^= 16
    data.write_bytes(bytes(content))


def _lose_a_file(step: Path) -> None:
    (_data(step) / "rank-1.bin").unlink()


def _lose_all_files(step: Path) -> None:
    shutil.rmtree(_data(step))


def _lose_the_manifest(step: Path) -> None:
    for manifest in step.glob("MANIFEST*.json"):
        manifest.unlink()


def _cut_the_manifest(step: Path) -> None:
    for manifest in step.glob("MANIFEST*.json"):
        manifest.write_bytes(manifest.read_bytes()[:1000])


def _flip_in_the_manifest(step: Path) -> None:
    for manifest in step.glob("MANIFEST*.json"):
        manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0', 1))


DAMAGES = [_flip, _lose_a_file, _cut_the_manifest]
MORE = [_cut, _lose_all_files, _lose_the_manifest, _flip_in_the_manifest]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text of some 300 samples."""
    path = tmp_path_factory.mktemp("damage")
    write_text(path, 6_000)
    return path


@pytest.fixture(scope="module")
def killed(folder: Path) -> Job:
    """A run on two workers that was killed when it had the checkpoints of steps 4, 8, 10 and 12."""
    job = replace(
        short_job(folder / "text.txt", folder, "killed", checkpoint=CheckpointConfig(every=4, keep=9)), attempt="a1"
    )
    Group(job, 2, folder, Blow("hint", 12, 0)).codes()
    assert _steps(job.folder) == [4, 8, 10, 12]
    return job


def _steps(run: Folder) -> list[int]:
    assert run.local
    return sorted(int(path.parent.name[5:]) for path in run.local.glob("checkpoints/*/MANIFEST.json"))


def _copy(job: Job, run: str, keep: int = 2) -> tuple[Job, Path]:
    """The killed run under another name, and where its checkpoints lie."""
    assert job.folder.local
    place = job.folder.local.with_name(run)
    shutil.copytree(job.folder.local, place)
    config = replace(job.config, checkpoint=CheckpointConfig(every=4, keep=keep))
    return replace(job, run=run, folder=Folder(str(place)), config=config), place / "checkpoints"


@pytest.mark.parametrize("damage", [*DAMAGES, *(pytest.param(damage, marks=pytest.mark.long) for damage in MORE)])
def test_the_one_before_a_damaged_one_is_used(
    folder: Path, undisturbed: dict[str, Any], killed: Job, damage: Callable[[Path], None]
) -> None:
    job, checkpoints = _copy(killed, damage.__name__.strip("_"))
    damage(checkpoints / "step-00000012")
    after = finish(job, 1, folder)
    assert after["resumed_from"] == 10
    assert after["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert audit(job.folder / "checkpoints").samples == undisturbed["samples_seen"]


def test_where_none_is_whole_the_run_does_not_begin_again(folder: Path, killed: Job) -> None:
    job, checkpoints = _copy(killed, "none")
    for step in checkpoints.glob("step-*"):
        _flip(step)
    before = {path: path.read_bytes() for path in checkpoints.glob("step-*/**/*") if path.is_file()}
    group = Group(replace(job, attempt="after"), 3, folder)
    assert group.codes() == [1, 1, 1]
    for error in group.errors().values():
        assert re.search(r"SettingError: run none has 4 checkpoint\(s\), and none that is whole", error), error
    assert before == {path: path.read_bytes() for path in checkpoints.glob("step-*/**/*") if path.is_file()}


@pytest.mark.parametrize("damage", [_flip, _cut_the_manifest, _lose_the_manifest])
@pytest.mark.long
def test_damaged_ones_do_not_push_whole_ones_out(
    folder: Path, undisturbed: dict[str, Any], killed: Job, damage: Callable[[Path], None]
) -> None:
    """Those of later steps must not count as the newest, where `keep` is 1; and step 10 is the best."""
    job, checkpoints = _copy(killed, f"pushed-by{damage.__name__}", keep=1)
    for step in (10, 12):
        damage(checkpoints / f"step-{step:08d}")
    each = replace(job, attempt="each", config=replace(job.config, checkpoint=CheckpointConfig(every=1, keep=1)))
    Group(each, 2, folder, Blow("data", 10, 0)).codes()  # it went on from step 8, saved step 9, and no more
    after = finish(job, 1, folder)
    assert after["resumed_from"] == 9
    assert after["parameters_sha256"] == undisturbed["parameters_sha256"]
    assert audit(job.folder / "checkpoints").samples == undisturbed["samples_seen"]
