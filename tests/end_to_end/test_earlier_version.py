"""A run of an earlier version, commit 395d810, opens, is audited, and goes on: folder, settings, data and checkpoints."""

import os
import tarfile
from pathlib import Path

import pytest

import raystride
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit

MADE_AT = "/tmp/raystride-395d810"
TEXT_TIME_NS = 1_700_000_000_000_000_000
"""When its text was written, which prepared data is known by."""


@pytest.fixture
def storage(tmp_path: Path) -> str:
    """The storage as that version left it, moved to another place."""
    with tarfile.open(Path(__file__).with_name("run-395d810.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    place = tmp_path / "raystride-395d810"
    for file in place.rglob("*"):
        if file.suffix in (".yaml", ".json", ".jsonl") and "checkpoints" not in file.parts:
            file.write_text(file.read_text().replace(MADE_AT, str(place)))
    os.utime(place / "text.txt", ns=(TEXT_TIME_NS, TEXT_TIME_NS))
    return str(place / "runs")


def test_it_opens_and_goes_on(storage: str) -> None:
    run = raystride.Run.open("earlier", storage)
    assert (run.summary["status"], run.summary["steps"]) == ("finished", 6)
    assert [each.step for each in run.checkpoints] == [3, 6]
    before = run.metrics("train_loss").to_pandas()
    assert list(before["step"]) == [2, 4, 6]
    text = raystride.generate(run, "line", {"sample.tokens": 4, "checkpoint": "last"})
    assert text
    on = raystride.train(
        f"{run.folder}/config.yaml", {"train.steps": 10, "launch.mode": "inline"}, run="earlier", storage=storage
    )
    assert (on.summary["resumed_from"], on.summary["steps"]) == (6, 10)
    assert (Folder.from_uri(storage) / ".prepared").names() == ["30acf313ae19bdd0"]  # nothing was prepared again
    after = on.metrics("train_loss").to_pandas()
    assert list(after["step"]) == [2, 4, 6, 8, 10]
    assert list(after["train_loss"][:3]) == list(before["train_loss"])
    assert audit(on.folder / "checkpoints").samples == 10 * 8
