"""A summary has every key, prefers given to measured figures, and has whole numbers as integers."""

import shutil
from pathlib import Path

import pytest

from raystride.pipelines.observability.record.summary import (
    COUNT_KEYS,
    STATUSES,
    SUMMARY_KEYS,
    build_summary,
    put_summary,
    read_summary,
)
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.system.storage.sealed import SealBroken


def test_what_the_loop_gave_counts_before_what_was_measured() -> None:
    newest = {"train_loss": 2.0, "tokens_seen": 640.0, "of_no_summary": 1.0}
    found = build_summary("r", "finished", newest, {"train_loss": 1.5, "ending": "done", "run": "other", "status": "failed"})
    assert (found["run"], found["status"], found["train_loss"], found["ending"]) == ("r", "finished", 1.5, "done")
    assert set(found) == {*SUMMARY_KEYS, "ending"}
    assert found["metrics"] == {}
    assert found["val_loss"] is None


def test_that_of_another_run_is_refused_and_a_run_may_have_another_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = Folder(str(tmp_path / name))
        run.put(f"attempts/{name}-1/environment.json", "{}")
        run.put(f"journal/{name}-1-00001.jsonl", "")
        put_summary(run, build_summary(name, "finished", {}, {}))
    shutil.copytree(tmp_path / "one", tmp_path / "renamed")
    assert read_summary(Folder(str(tmp_path / "renamed")))["run"] == "one"
    shutil.copy(tmp_path / "one" / "summary.json", tmp_path / "two")
    with pytest.raises(SealBroken, match="another run, one"):
        read_summary(Folder(str(tmp_path / "two")))


def test_counts_are_whole_and_nothing_else_is() -> None:
    given = {"steps": 3.0, "samples_seen": 12.5, "tokens_per_second": 100.0, "val_loss": float("nan")}
    found = build_summary("r", "stopped", {}, given)
    assert isinstance(found["steps"], int)
    assert (found["steps"], found["samples_seen"], found["val_loss"]) == (3, 12.5, "NaN")
    assert isinstance(found["tokens_per_second"], float)
    assert set(SUMMARY_KEYS) >= COUNT_KEYS


def test_each_status_is_one_of_mlflows_and_others_are_refused() -> None:
    assert set(STATUSES.values()) == {"FINISHED", "KILLED", "FAILED"}
    assert [STATUSES[name] for name in ("finished", "stopped_early", "stopped", "out_of_time", "failed")] == [
        "FINISHED",
        "FINISHED",
        "KILLED",
        "KILLED",
        "FAILED",
    ]
    with pytest.raises(ValueError, match="status is 'perhaps': it must be one of finished, done"):
        build_summary("r", "perhaps", {}, {})
