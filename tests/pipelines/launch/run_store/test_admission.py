"""A run that resumes says from where, and a complete one how to train it further."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, RecordConfig
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.run_store.admission import _describe_completed_run, _has_nothing_left
from raystride.pipelines.launch.run_store.lease import read_owner
from raystride.pipelines.launch.run_store.resume import PreviousAttempt
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.observability.record.mlflow.log import read_reference
from raystride.pipelines.observability.record.summary import read_summary
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.observability.record.conftest import history, only_run
from tests.tiny import tiny, write_text

PLACE = Path("text.txt")


@pytest.mark.parametrize(("steps", "more"), [(500, 1000), (None, 12), (0, 12)])
def test_a_complete_run_says_how_to_train_it_further(tmp_path: Path, steps: int | None, more: int) -> None:
    folder, config = Folder(str(tmp_path / "my run")), replace(tiny(PLACE), run="my run")
    earlier = PreviousAttempt(config, None, {"steps": steps, "status": "finished", "run": "my run"})  # type: ignore[typeddict-item]
    first, command, other, *_ = _describe_completed_run(folder, config, "500 steps", earlier).splitlines()
    assert "complete (500 steps)" in first
    assert command.endswith(f"train --run 'my run' --storage {tmp_path} --train.steps {more}")
    assert "--run NAME" in other
    assert f"--train.steps {2 * 6}" in _describe_completed_run(folder, config, "", PreviousAttempt(config, None, None))


def left(folder: Path, config: Config, steps: int | None = None, saved: int | None = None) -> bool:
    """Whether a run that came to its end after so many steps, with such a checkpoint, has nothing left to do."""
    summary: Any = {"status": "finished", "complete": True, "steps": steps} if steps else None
    if saved:
        (Folder(str(folder)) / "a" / "checkpoints" / f"step-{saved:08d}").put_json("MANIFEST.json", {})
    earlier = PreviousAttempt(config, None, summary) if saved or steps else None
    return _has_nothing_left(RunContext(replace(config, run="a"), Folder(str(folder)), Screen().log), earlier)


def test_it_is_said_from_which_step_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(write_text(tmp_path))
    assert not left(tmp_path, config)
    assert capsys.readouterr().out == f"run a in {tmp_path}\n"
    assert not left(tmp_path, config, saved=3)
    assert capsys.readouterr().out == f"run a in {tmp_path}, going on from step 3\n"
    assert left(tmp_path, config, steps=6, saved=6)
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert (first, "complete (6 steps)" in second) == (f"run a in {tmp_path}", True)
    with refused("train.steps", 2):
        left(tmp_path, replace(config, train=replace(config.train, steps=2)), saved=6)


def test_mlflow_gets_the_end_of_a_complete_run_whose_driver_was_killed_after_the_summary(tmp_path: Path) -> None:
    config = replace(tiny(write_text(tmp_path)), record=RecordConfig())
    storage = Folder(str(tmp_path))
    folder = storage / "a"
    entry = new_entry("metrics", {"train_loss": 3.0}, step=6) | {"attempt": "a1", "sender": "rank0", "sequence": 1}
    Journal(folder, "a1").append([entry])  # type: ignore[list-item]
    assert left(tmp_path, config, steps=6, saved=6)
    run = only_run(storage, "a")
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    assert len(history(storage, run.info.run_id, "train/loss")) == 1
    assert read_summary(folder)["mlflow_run_id"] == run.info.run_id
    reference, ended = read_reference(folder), run.info.end_time
    assert left(tmp_path, config, steps=6, saved=6)
    assert (read_reference(folder), only_run(storage, "a").info.end_time) == (reference, ended)
    assert not read_owner(folder), "it is released"
