"""A run that resumes says from where, a complete one how to train it further, and a name means one result."""

import re
import warnings
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, RecordConfig, SettingError
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.launch.console.screen import Screen, SilentScreen
from raystride.pipelines.launch.run_store.admission import _describe_completed_run, _has_nothing_left
from raystride.pipelines.launch.run_store.lease import read_owner
from raystride.pipelines.launch.run_store.resume import PreviousAttempt, read_previous_attempt, write_settings
from raystride.pipelines.observability.record.entry import new_entry
from raystride.pipelines.observability.record.journal import Journal
from raystride.pipelines.observability.record.mlflow.log import read_reference
from raystride.pipelines.observability.record.summary import put_summary, read_summary
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.pipelines.observability.record.conftest import history, only_run
from tests.tiny import tiny, write_text

PLACE = Path("text.txt")


@pytest.mark.parametrize(("steps", "more"), [(500, 1000), (None, 12), (0, 12)])
def test_a_complete_run_says_how_to_train_it_further(tmp_path: Path, steps: int | None, more: int) -> None:
    folder, config = Folder(str(tmp_path / "my run")), replace(tiny(PLACE), run="my run")
    earlier = PreviousAttempt(config, None, {"steps": steps, "status": "finished", "run": "my run"})  # type: ignore[typeddict-item]
    first, command, other = _describe_completed_run(folder, config.train, config.run, "500 steps", earlier).splitlines()
    assert "complete (500 steps)" in first
    assert command.endswith(f"train --run 'my run' --storage {tmp_path} --train.steps {more}")
    assert "--run NAME" in other
    assert f"--train.steps {2 * 6}" in _describe_completed_run(
        folder, config.train, config.run, "", PreviousAttempt(config, None, None)
    )


@pytest.mark.parametrize("section", ["model", "lora"])
def test_dropout_beside_a_reference_is_refused_in_new_runs(section: str, tmp_path: Path) -> None:
    base = tiny(PLACE)
    config = replace(
        base,
        task="preference",
        model=replace(base.model, init_from="base"),
        lora=replace(base.lora, rank=2),
        run="a",
    )
    random = replace(config, **{section: replace(getattr(config, section), dropout=0.1)})
    context = RunContext(random, Folder(str(tmp_path)), log=lambda _: None)
    with refused(f"{section}.dropout", 0.1):
        _has_nothing_left(context, None)
    for fine in (config, replace(random, objective=replace(random.objective, reference_free=True))):
        assert not _has_nothing_left(context.with_config(fine), None)
    assert not _has_nothing_left(context, PreviousAttempt(random, None, None)), "a run that has begun goes on"


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


PLUGIN, EDITED = "x = 1", "x = 2"
TRAINED = replace(tiny(PLACE), run="a", plugins=("own.py",))


def _store(folder: Path, *, complete: bool) -> Folder:
    """Stores a run with a plug-in, that ended after six steps or was killed after step 3."""
    run, saved = Folder(str(folder)) / "a", 6 if complete else 3
    write_settings(run, "a1", TRAINED, {"code_sha256": {"own.py": sha256(PLUGIN.encode()).hexdigest()}})  # type: ignore[typeddict-item]
    (run / "checkpoints" / f"step-{saved:08d}").put_json("MANIFEST.json", {"step": saved})
    if complete:
        put_summary(run, {"run": "a", "status": "finished", "complete": True, "steps": 6})
    return run


def _with(**changes: Any) -> Config:
    """The settings of the run with others in some sections."""
    return replace(TRAINED, **{name: replace(getattr(TRAINED, name), **values) for name, values in changes.items()})


RATE, LONGER = {"learning_rate": 0.5}, {"steps": 12}
SAME, RETURNED, GOES_ON = _with(), "returned", "goes on"
CASES = {
    "complete, the same": (True, SAME, PLUGIN, RETURNED, "complete (6 steps), and stays as it is"),
    "complete, run otherwise": (True, _with(scaling={"workers": 2}, train={"log_every": 1}), PLUGIN, RETURNED, "complete"),
    "complete, other settings": (True, _with(optimizer=RATE), PLUGIN, "optimizer.learning_rate", "0.01 before, 0.5 now"),
    "complete, other code": (True, SAME, EDITED, "run", "own.py has changed"),
    "complete, fewer steps": (True, _with(train={"steps": 4}), PLUGIN, "train.steps", "at least 6"),
    "complete, more steps": (True, _with(train=LONGER), PLUGIN, GOES_ON, ""),
    "complete, more steps, other settings": (True, _with(train=LONGER, optimizer=RATE), PLUGIN, GOES_ON, "0.5 now"),
    "incomplete, the same": (False, SAME, PLUGIN, GOES_ON, ""),
    "incomplete, other settings": (
        False,
        _with(optimizer=RATE),
        PLUGIN,
        GOES_ON,
        "a goes on with other settings: optimizer",
    ),
    "incomplete, other code": (False, SAME, EDITED, GOES_ON, "a goes on with other code: own.py has changed"),
    "incomplete, fewer steps": (False, _with(train={"steps": 2}), PLUGIN, "train.steps", "at least 3"),
    "incomplete, fixed settings": (False, _with(model={"layers": 3}), PLUGIN, "model.layers", "2 before, 3 now"),
}
"""Whether the run is complete, the start, its plug-in, what becomes of it (or the setting refused), and what is said."""


@pytest.mark.parametrize("screen", [Screen(), SilentScreen()], ids=["prompt", "library"])
@pytest.mark.parametrize("case", CASES)
def test_a_name_means_one_result(
    tmp_path: Path, case: str, screen: Screen, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    complete, config, plugin, wanted, said = CASES[case]
    (tmp_path / "own.py").write_text(plugin)
    previous = read_previous_attempt(_store(tmp_path, complete=complete))
    context = RunContext(config, Folder(str(tmp_path)), screen.log, notice=screen.notice)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        if wanted not in (RETURNED, GOES_ON):
            with pytest.raises(SettingError, match=re.escape(said)) as raised:
                _has_nothing_left(context, previous)
            assert raised.value.setting == wanted
            return
        assert _has_nothing_left(context, previous) is (wanted == RETURNED)
    shown = [str(warning.message) for warning in warned]
    lines = "\n".join(shown) if not screen.is_visible else capsys.readouterr().out
    assert said in lines
    assert said or not shown
