"""Each number of workers makes real steps on the prepared data, in processes that leave nothing behind."""

import pickle
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import CheckpointConfig, RecordConfig
from raystride.pipelines.train.worker.rehearsal import rehearse
from tests.processes import make_job
from tests.tiny import tiny, write_text


def test_one_and_two_workers_are_tried_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    tempfile.tempdir = None
    config = tiny(write_text(tmp_path), checkpoint=CheckpointConfig(every=1), record=RecordConfig(mlflow=False))
    job = make_job(config, tmp_path, "rehearsed")
    found = rehearse(job, [(1, 1), (2, 1), (8, 1)])
    tempfile.tempdir = None
    # Eight workers cannot share four slots: those fail, and the others stay known.
    assert list(found) in ([(1, 1), (2, 1)], [(1, 1)])
    assert all(0 < speed.low <= speed.middle <= speed.high for speed in found.values())
    assert not (tmp_path / "rehearsed").exists()
    assert not list((tmp_path / "tmp").glob("raystride-rehearsal-*"))
    assert not list((tmp_path / "tmp").glob("raystride-meeting-*"))


def test_what_cannot_be_tried_is_missing(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path))
    job = replace(make_job(config, tmp_path, "gone"), prepared=make_job(config, tmp_path, "gone").folder / "nowhere")
    assert rehearse(job, [(1, 1)]) == {}
    assert pickle.loads(pickle.dumps(job)) == job
