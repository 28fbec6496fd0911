"""The loop in this process: it learns, logs, validates, saves, ends for every reason it may end, and goes on exactly."""

import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.observability.observers.observer import Observer
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.fence import FILE as CLAIM
from raystride.pipelines.train.checkpoint.pieces import parameters_sha256
from raystride.pipelines.train.guard import Diverged
from raystride.pipelines.train.loop import Ending, Training
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.flips import flip_bit, without_hash_lists
from tests.plain_training import train_plainly
from tests.processes import make_job, run_workers, start_workers
from tests.some import some
from tests.tiny import tiny, write_text

INF, NAN = math.inf, math.nan
SHORT = TrainConfig(steps=5, slots=4, slot_size=2, log_every=50)


class Notes(Observer):
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.then: Callable[[int], None] = lambda step: None
        """Called after each step."""

    def on_step(self, step: int) -> None:
        self.calls.append(("step", step))
        self.then(step)

    def on_log(self, step: int, measured: dict[str, float]) -> None:
        self.logged.setdefault(step, {}).update(measured)

    def on_checkpoint(self, step: int, path: str) -> None:
        self.calls.append(("checkpoint", step))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, prepared once."""
    path = tmp_path_factory.mktemp("loop")
    write_text(path)
    return path


def _config(folder: Path, **changes: Any) -> Config:
    return tiny(folder / "text.txt", **changes)


def _training(
    folder: Path, config: Config, run: str, notes: Notes | None = None, stopping: Callable[[], bool] = lambda: False
) -> Training:
    job: Job = make_job(config, folder, run)
    return build_training(job, WorkerInfo(), [notes] if notes else [], stopping, lambda _: None)


def test_the_loss_falls_and_everything_due_happens(folder: Path) -> None:
    notes = Notes()
    config = _config(folder, train=TrainConfig(steps=40, slots=4, slot_size=2, log_every=10))
    ending, metrics = _training(folder, config, "falls", notes).run()
    assert ending is Ending.DONE
    losses = [notes.logged[step]["train_loss"] for step in (10, 20, 30, 40)]
    assert losses[-1] < losses[0]
    assert metrics["val_loss"] == notes.logged[40]["val_loss"]
    assert [step for kind, step in notes.calls if kind == "step"] == list(range(1, 41))
    assert {3, 6, 39, 40} <= {step for kind, step in notes.calls if kind == "checkpoint"}
    assert notes.logged[40]["tokens_seen"] == 40 * 8 * 16
    assert set(notes.logged[10]) >= {"learning_rate", "gradient_norm", "data_wait_share", "epoch"}


def test_the_share_of_clipped_steps_is_that_of_the_interval_also_through_a_stop(folder: Path) -> None:
    """The norm of each step is known from a run that logs each of them."""
    train = TrainConfig(steps=12, slots=4, slot_size=2, log_every=1, clip_norm=0.0)
    plain, every, notes, first, second = (Notes() for _ in range(5))
    _training(folder, _config(folder, train=train), "never-clipped", plain).run()
    assert "clipped_share" not in plain.logged[5]
    limit = sorted(plain.logged[step]["gradient_norm"] for step in range(1, 13))[6]
    config = _config(folder, train=replace(train, log_every=5, clip_norm=limit))
    _training(folder, config, "clipped", notes).run()
    shares = {step: measured["clipped_share"] for step, measured in notes.logged.items() if "clipped_share" in measured}
    assert list(shares) == [5, 10, 12]
    _training(folder, replace(config, train=replace(config.train, log_every=1)), "clipped-each", every).run()
    clipped = [every.logged[step]["gradient_norm"] > limit for step in range(1, 13)]
    assert 0 < sum(clipped) < 12
    assert list(shares.values()) == [sum(clipped[:5]) / 5, sum(clipped[5:10]) / 5, sum(clipped[10:]) / 2]
    cut = _training(folder, config, "clipped-cut", first, stopping=lambda: ("step", 6) in first.calls)
    cut.run()
    assert 5 < cut.state.step < 10
    _training(folder, config, "clipped-cut", second).run()
    assert [second.logged[step]["clipped_share"] for step in (10, 12)] == [shares[10], shares[12]]


@pytest.mark.parametrize("at", [1, 5, 9])
def test_a_stopped_run_goes_on_with_the_same_bits(folder: Path, at: int) -> None:
    config = _config(
        folder,
        train=TrainConfig(steps=12, slots=4, slot_size=2, log_every=5),
        model=ModelConfig(layers=1, hidden_size=16, dropout=0.1),
    )
    undisturbed, after = Notes(), Notes()
    whole = _training(folder, config, f"whole{at}", undisturbed)
    whole.run()
    notes = Notes()
    stopped = _training(folder, config, f"stopped{at}", notes, stopping=lambda: len(notes.calls) >= at)
    ending, _ = stopped.run()
    assert ending is Ending.STOPPED
    assert at <= stopped.state.step <= at + 2
    resumed = _training(folder, config, f"stopped{at}", after)
    assert resumed.state.step == stopped.state.step
    resumed.run()
    assert parameters_sha256(resumed.model) == parameters_sha256(whole.model)
    assert resumed.state.tokens_seen == whole.state.tokens_seen
    assert resumed.state.train_loss == whole.state.train_loss
    for step in {5, 10, 12} & after.logged.keys():
        for name in ("train_loss", "tokens_seen"):
            assert after.logged[step][name] == undisturbed.logged[step][name], "also where the stop lay between two logs"


def test_epochs_end_a_run_after_every_sample(folder: Path) -> None:
    config = _config(folder, train=TrainConfig(steps=0, epochs=1.0, slots=4, slot_size=8, log_every=50))
    training = _training(folder, config, "epochs")
    samples = training.loader.plan.order.samples
    training.run()
    assert training.state.position == samples
    assert training.state.step == -(-samples // 32)
    assert training.state.tokens_seen == samples * 16


def test_validations_and_checkpoints_by_epochs(folder: Path) -> None:
    notes = Notes()
    config = _config(
        folder,
        train=TrainConfig(steps=0, epochs=2.0, slots=4, slot_size=8, log_every=50),
        validation=ValidationConfig(every=1, every_epochs=0.5, samples=8),
        checkpoint=CheckpointConfig(every=1, every_epochs=1.0, keep=9, minutes=0),
    )
    training = _training(folder, config, "by epochs", notes)
    steps_of_epoch = training.loader.plan.order.samples / 32
    training.run()
    validated = [step for step, values in notes.logged.items() if "val_loss" in values]
    assert sorted(validated) == [math.ceil(part * steps_of_epoch) for part in (0.5, 1, 1.5, 2)]
    saved = {step for kind, step in notes.calls if kind == "checkpoint"}
    assert {math.ceil(steps_of_epoch), math.ceil(2 * steps_of_epoch)} <= saved <= set(validated), "the best ones as well"


def test_a_run_ends_when_its_time_is_over_and_saves(folder: Path) -> None:
    config = _config(folder, train=TrainConfig(steps=10**6, hours=1e-4, slots=4, slot_size=2, log_every=50))
    training = _training(folder, config, "time")
    ending, _ = training.run()
    assert ending is Ending.OUT_OF_TIME
    assert training.checkpoints is not None
    found = training.checkpoints.find_newest()
    assert found is not None
    assert found.step == training.state.step < 10**6


def test_early_stopping_keeps_the_best(folder: Path) -> None:
    config = _config(
        folder,
        train=TrainConfig(steps=1000, slots=4, slot_size=2, log_every=50),
        optimizer=OptimizerConfig(learning_rate=3.0, schedule="constant", warmup_steps=0, kind="sgd"),
        validation=ValidationConfig(every=2, samples=8, patience=3),
    )
    training = _training(folder, config, "early")
    ending, _ = training.run()
    assert ending is Ending.EARLY
    assert training.state.step < 1000
    assert training.checkpoints is not None
    best = training.checkpoints.find_best()
    assert best is not None
    assert best.step == training.state.best_step
    again = _training(folder, config, "early")
    assert again.run()[0] is Ending.EARLY
    assert again.state.step == training.state.step


def test_patience_begins_anew_with_each_better_validation(folder: Path) -> None:
    config = _config(
        folder,
        train=TrainConfig(steps=100, slots=4, slot_size=2, log_every=50),
        validation=ValidationConfig(every=2, samples=8, patience=3),
    )
    training = _training(folder, config, "patience")
    losses = iter([3.0, 4.0, 4.0, 2.0, 4.0, 4.0, 4.0, 1.0])
    training.validate = lambda: {"val_loss": next(losses)}
    assert training.run()[0] is Ending.EARLY
    assert (training.state.step, training.state.best_step, training.state.best) == (14, 8, 2.0)


TIED = [(0.9, 0.5), (1.0, 0.4), (1.0, 0.2), (1.0, 0.3), (1.0, 0.2), (1.0, NAN)]
"""Accuracy and loss at steps 2 to 12."""


@pytest.mark.parametrize(
    ("measured", "before", "step"),
    [
        (TIED, {}, 10),
        (TIED[:4], {}, 6),
        ([(1.0, 0.1)], {"best": 1.0, "best_step": 1}, 1),
        ([(1.0, 0.1)], {"best": 1.0, "best_step": 1, "best_loss": 0.2}, 2),
    ],
    ids=["the later of equals", "the lower loss", "a best of 0.3 stays", "a best with its loss"],
)
def test_of_equally_good_ones_the_lower_loss_is_the_best_and_then_the_later(
    folder: Path, measured: list[tuple[float, float]], before: dict[str, Any], step: int
) -> None:
    config = _config(
        folder,
        train=TrainConfig(steps=2 * len(measured), slots=4, slot_size=2, log_every=50),
        validation=ValidationConfig(every=2, samples=8, metric="val_accuracy"),
        checkpoint=CheckpointConfig(every=2),
    )
    run = f"tied-{step}-{len(before)}"
    training, found = _training(folder, config, run), iter(measured)
    vars(training.state).update(before)
    training.validate = lambda: dict(zip(("val_accuracy", "val_loss"), next(found), strict=True))
    training.run()
    assert training.state.best_step == step
    assert training.checkpoints is not None
    if step > 1:
        best = training.checkpoints.find_best()
        assert best is not None
        assert best.step == step


def test_a_tie_is_no_improvement_for_early_stopping(folder: Path) -> None:
    config = _config(
        folder,
        train=TrainConfig(steps=100, slots=4, slot_size=2, log_every=50),
        validation=ValidationConfig(every=2, samples=8, metric="val_accuracy", patience=3),
    )
    training, losses = _training(folder, config, "tied-patience"), iter(range(9, 0, -1))
    training.validate = lambda: {"val_accuracy": 1.0, "val_loss": float(next(losses))}
    assert training.run()[0] is Ending.EARLY
    assert (training.state.step, training.state.best_step) == (8, 8)


@pytest.mark.parametrize(
    ("direction", "values", "best", "steps"),
    [
        ("min", [NAN, 2.0, 1.5, NAN, INF, -INF], 1.5, 6),
        ("max", [NAN, 0.2, 0.5, NAN, INF, -INF], 0.5, 6),
        ("min", [INF, NAN, NAN], None, 0),
    ],
)
def test_what_is_no_finite_number_is_never_the_best(
    folder: Path, direction: Any, values: list[float], best: float | None, steps: int
) -> None:
    config = _config(
        folder,
        train=TrainConfig(steps=100, slots=4, slot_size=2, log_every=50),
        validation=ValidationConfig(every=2, samples=8, patience=3, direction=direction),
        checkpoint=CheckpointConfig(every=2),
    )
    run = f"no-number-{direction}-{best}"
    training, measured = _training(folder, config, run), iter(values)
    training.validate = lambda: {"val_loss": next(measured)}
    assert training.run()[0] is Ending.EARLY
    assert (training.state.best, training.state.best_step) == (best, steps)
    assert training.checkpoints is not None
    found = training.checkpoints.find_best()
    assert (found and found.step) == (steps or None)
    _strict(folder / run / "checkpoints")


def test_a_run_whose_best_was_no_number_finds_one(folder: Path) -> None:
    """As earlier versions left it: NaN as best, in a manifest that only Python reads."""
    config = _config(folder, train=replace(SHORT, steps=4), validation=ValidationConfig(every=2, samples=8))
    training = _training(folder, config, "best-nan")
    training.state.best, training.state.best_step = NAN, 0
    losses = iter([3.0, 4.0])
    training.validate = lambda: {"val_loss": next(losses)}
    training.run()
    assert (training.state.best, training.state.best_step) == (3.0, 2)


def _strict(checkpoints: Path) -> None:
    """Fails where a manifest has what strict JSON does not know."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    for manifest in some(checkpoints.glob("step-*/MANIFEST.json")):
        json.loads(manifest.read_text(), parse_constant=refuse)


def test_the_loss_that_is_logged_is_the_mean_since_the_last_log(folder: Path) -> None:
    notes, train = Notes(), TrainConfig(steps=10, slots=4, slot_size=2, log_every=4)
    config = _config(folder, train=train, checkpoint=CheckpointConfig(every=0))
    plain = train_plainly(make_job(config, folder, "logged"), steps=10)
    _training(folder, config, "logged", notes).run()
    # The last log is of what is left.
    for step, first in ((4, 0), (8, 4), (10, 8)):
        sums = [(each.loss * each.targets, each.targets) for each in plain[first:step]]
        loss, targets = map(sum, zip(*sums, strict=True))
        assert notes.logged[step]["train_loss"] == pytest.approx(loss / targets, rel=1e-6)
        assert notes.logged[step]["learning_rate"] == pytest.approx(plain[step - 1].rate, rel=1e-12)


def test_seconds_go_on_from_those_of_the_checkpoint(folder: Path) -> None:
    training = _training(folder, _config(folder, train=SHORT, checkpoint=CheckpointConfig(every=0)), "seconds")
    later = replace(training, state=replace(training.state, seconds=1000.0))
    later.run()
    assert 1000.0 < later.state.seconds < 1000.0 + time.perf_counter() - training._began


def test_a_run_goes_back_as_often_as_it_may_and_then_ends(folder: Path) -> None:
    config = _config(
        folder,
        optimizer=OptimizerConfig(kind="sgd", learning_rate=1e30, warmup_steps=0),
        train=TrainConfig(steps=50, slots=4, slot_size=2, log_every=5, clip_norm=0.0),
        validation=ValidationConfig(every=0, samples=8),
        guard=GuardConfig(policy="rewind", max_bad_steps=2),
    )
    training = _training(folder, config, "rewinds")
    with pytest.raises(Diverged, match=r"guard\.max_bad_steps 2 ") as raised:
        training.run()
    assert raised.value.bad_steps == 2
    assert training.state.rewinds == 2


def test_a_save_that_the_store_refused_at_the_end_is_tried_again(folder: Path) -> None:
    in_the_way = folder / "refused" / "checkpoints" / "step-00000006"

    def say(text: str) -> None:
        said.append(text)
        if "could not be written" in text:
            in_the_way.unlink()

    def block(step: int) -> None:
        if step == 5:
            in_the_way.write_text("a file where a folder should be")

    said: list[str] = []
    notes = Notes()
    notes.then = block
    training = build_training(make_job(_config(folder), folder, "refused"), WorkerInfo(), [notes], lambda: False, say)
    assert training.run()[0] is Ending.DONE
    assert [text for text in said if "could not be written" in text]
    assert training.checkpoints is not None
    found = training.checkpoints.find_newest()
    assert found is not None
    assert found.step == 6
    assert notes.calls[-1] == ("checkpoint", 6)


def test_old_checkpoints_that_cannot_be_cleared_are_said_and_end_nothing(folder: Path) -> None:
    said: list[str] = []
    job = make_job(_config(folder), folder, "hints")
    (folder / "hints" / "checkpoints" / "last").mkdir(parents=True)  # where a file should be
    training = build_training(job, WorkerInfo(), [], lambda: False, said.append)
    assert training.run()[0] is Ending.DONE
    assert [text.split(" (")[0] for text in said if "cleared" in text] == [
        f"warning: what checkpoint step-0000000{step} replaces could not be cleared" for step in (3, 6)
    ]


def test_no_checkpoint_is_written_where_none_is_wanted(folder: Path) -> None:
    config = _config(folder, checkpoint=CheckpointConfig(every=0))
    _training(folder, config, "none").run()
    assert not (folder / "none" / "checkpoints").exists()


class Held:
    """The claim of a run as a pipe: whoever is about to commit a checkpoint reads it, and waits there for `release`."""

    def __init__(self, folder: Path, config: Config, run: str) -> None:
        self.notes = Notes()
        self.notes.then = self.release_after
        self.training = _training(folder, config, run, self.notes)
        self.checkpoints = self.training.checkpoints
        assert self.checkpoints
        self._claim = folder / run / "checkpoints" / CLAIM
        self._text = self._claim.read_text()
        self._claim.unlink()
        os.mkfifo(self._claim)

    def release_after(self, step: int) -> None:
        """Releases the save of step 3 after step 4, and waits for it."""
        if step == 4:
            self.release()
            while self.checkpoints.is_saving():
                time.sleep(0.001)

    def release(self) -> None:
        """Lets the save that is under way commit, and those after it pass."""
        assert not list(self._claim.parent.glob("step-*/MANIFEST.json"))
        whole = self._claim.with_name("whole")
        whole.write_text(self._text)
        with self._claim.open("w") as pipe:  # once the save reads it
            whole.replace(self._claim)  # or it could read the pipe twice, and wait there for ever
            pipe.write(self._text)


STEADY = {"validation": ValidationConfig(every=0, samples=16), "checkpoint": CheckpointConfig(every=1000, minutes=1e-9)}
"""Saves by the clock alone, which asks for one in every step."""


def test_a_save_is_asked_for_by_the_clock_and_begins_within_a_step(folder: Path) -> None:
    notes = Notes()
    training = _training(folder, _config(folder, train=SHORT, **STEADY), "clock", notes)

    def wait(step: int) -> None:
        while training.checkpoints and training.checkpoints.is_saving():
            time.sleep(0.001)

    notes.then = wait
    training.run()
    saved = [step for kind, step in notes.calls if kind == "checkpoint"]
    # Asked for in step 1 and read behind step 2; then in step 3, or in 4 if that save was under way.
    assert saved[0] == 2
    assert saved[1] in (4, 5)


def test_no_save_is_asked_for_before_the_one_before_has_ended(folder: Path) -> None:
    train = TrainConfig(steps=8, slots=4, slot_size=2, log_every=50)
    held = Held(folder, _config(folder, train=train, **STEADY), "one")  # its first save ends behind step 4
    held.training.run()
    assert [step for kind, step in held.notes.calls if kind == "checkpoint"] == [2, 6, 8]


@pytest.mark.parametrize("checkpoint", [CheckpointConfig(every=1000, minutes=0), CheckpointConfig(every=0, minutes=1e-9)])
def test_the_clock_asks_for_nothing_where_it_is_off(folder: Path, checkpoint: CheckpointConfig) -> None:
    notes = Notes()
    run = f"off{checkpoint.every}"
    config = _config(folder, train=SHORT, checkpoint=checkpoint, validation=STEADY["validation"])
    _training(folder, config, run, notes).run()
    assert [step for kind, step in notes.calls if kind == "checkpoint"] == ([5] if checkpoint.every else [])


def test_saves_by_the_clock_change_no_bits_on_two_workers(folder: Path) -> None:
    train = TrainConfig(steps=7, slots=4, slot_size=2, log_every=50)
    found = {}
    for run, minutes in (("never", 0.0), ("always", 1e-9)):
        config = _config(folder, train=train, **STEADY | {"checkpoint": CheckpointConfig(every=1000, minutes=minutes)})
        found[run] = run_workers(make_job(config, folder, run), 2)["parameters_sha256"]
    assert found["always"] == found["never"]
    saved = {run: len(list((folder / run).glob("checkpoints/*/MANIFEST.json"))) for run in found}
    assert saved["never"] == 1
    assert saved["always"] > 1


def test_observers_hear_of_a_checkpoint_when_its_manifest_is_there(folder: Path) -> None:
    held = Held(folder, _config(folder, train=SHORT), "slow")
    held.training.run()
    steps = [("step", step) for step in range(1, 6)]
    assert held.notes.calls == [*steps[:4], ("checkpoint", 3), steps[4], ("checkpoint", 5)]


def test_a_save_that_ends_after_an_error_is_heard_of(folder: Path) -> None:
    held = Held(folder, _config(folder, train=SHORT), "late")

    def fail(step: int) -> None:
        if step == 4:
            threading.Timer(0.2, held.release).start()
            raise RuntimeError("an observer of one's own")

    held.notes.then = fail
    with pytest.raises(RuntimeError, match="of one's own"):
        held.training.run()
    assert held.notes.calls[-2:] == [("step", 4), ("checkpoint", 3)]


def test_no_observer_hears_of_a_save_that_failed(folder: Path) -> None:
    notes = Notes()
    training = _training(folder, _config(folder, train=SHORT), "failed", notes)
    (folder / "failed" / "checkpoints" / CLAIM).write_text("another 12ab\n")
    with pytest.raises(Exception, match="another has taken this run over"):
        training.run()
    assert notes.calls == [("step", step) for step in range(1, 6)]


def test_a_loss_that_is_no_number_ends_the_run(folder: Path) -> None:
    config = _config(
        folder,
        optimizer=OptimizerConfig(kind="sgd", learning_rate=1e30, warmup_steps=0),
        train=TrainConfig(steps=50, slots=4, slot_size=2, log_every=5, clip_norm=0.0),
        validation=ValidationConfig(every=0, samples=8),
    )
    with pytest.raises(Diverged, match="learning_rate"):
        _training(folder, config, "diverged").run()


def test_bf16_learns_too(folder: Path) -> None:
    notes = Notes()
    train = TrainConfig(steps=30, slots=4, slot_size=2, log_every=10, precision="bf16")
    _training(folder, _config(folder, train=train), "bf16", notes).run()
    assert notes.logged[30]["train_loss"] < notes.logged[10]["train_loss"]


def test_micro_batches_do_not_change_the_course(folder: Path) -> None:
    losses = []
    for group in (0, 1):
        notes = Notes()
        train = TrainConfig(steps=10, slots=4, slot_size=2, log_every=10, micro_batch_slots=group)
        config = _config(folder, train=train)
        _training(folder, replace(config, checkpoint=CheckpointConfig(every=0)), f"micro{group}", notes).run()
        losses.append(notes.logged[10]["train_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_more_epochs_leave_no_sample_out(folder: Path) -> None:
    def config(epochs: float) -> Config:
        return _config(folder, train=TrainConfig(steps=0, epochs=epochs, slots=4, slot_size=8, log_every=50))

    first = _training(folder, config(1.0), "more-epochs")
    first.run()
    again = _training(folder, config(2.0), "more-epochs")
    assert again.state.position == first.state.position == again.loader.plan.order.samples
    again.run()
    assert again.state.position == 2 * first.state.position
    assert again.state.tokens_seen == 2 * first.state.tokens_seen


# Prepared data that was changed since: local shards are verified where they are read, or beside the training.


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a text, on a node that has verified nothing."""
    monkeypatch.setenv("RAYSTRIDE_CACHE", str(tmp_path / "cache"))
    write_text(tmp_path)
    return tmp_path


def _sharded(folder: Path, **changes: Any) -> Config:
    """Settings that read four shards one after another."""
    data = DataConfig(
        source=str(folder / "text.txt"),
        kind="lines",
        validation="tail",
        validation_fraction=0.1,
        shard_mib=5e-3,
        shuffle="none",
    )
    train = replace(SHORT, steps=60)
    return _config(folder, **{"data": data, "train": train} | changes)


def _shard(folder: Path, config: Config, split: str, number: int) -> tuple[Folder, Path, int]:
    """The prepared folder, a shard in it, and the offset of its middle id."""
    prepared = make_job(config, folder, "any").prepared
    shard = Manifest.load(prepared).splits[split][number]
    assert (len(Manifest.load(prepared).splits["train"])) >= 3
    return prepared, Path(f"{prepared}/{shard.file}"), shard.ids_offset + shard.tokens // 2


def _newest_step(folder: Path, config: Config, run: str) -> int:
    return _training(folder, config, run).state.step


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_shard_that_is_wrong_from_the_start_ends_the_run_before_a_checkpoint(fresh: Path, split: str) -> None:
    config = _sharded(fresh)
    _, shard, offset = _shard(fresh, config, split, 0)
    flip_bit(shard, offset)
    with pytest.raises(DataError, match=re.escape(f"{shard}: bytes 0 to")):
        _training(fresh, config, "early").run()
    flip_bit(shard, offset)
    assert _newest_step(fresh, config, "early") == 0


def test_a_shard_that_is_read_late_ends_the_run_and_what_was_saved_goes_on_after_repair(fresh: Path) -> None:
    config = _sharded(fresh)
    whole = _training(fresh, config, "whole")
    whole.run()
    prepared, shard, offset = _shard(fresh, config, "train", 1)
    flip_bit(shard, offset)
    notes = Notes()
    with pytest.raises(DataError, match=re.escape(f"{shard}: bytes 0 to")):
        _training(fresh, config, "late", notes).run()
    saved = max(step for kind, step in notes.calls if kind == "checkpoint")
    tokens_before = Manifest.load(prepared).splits["train"][0].tokens
    assert 0 < saved <= tokens_before // (8 * 16) + 1 < 60
    shutil.rmtree(str(prepared))  # the remedy that the message names
    resumed = _training(fresh, config, "late")
    assert resumed.state.step == saved
    resumed.run()
    assert parameters_sha256(resumed.model) == parameters_sha256(whole.model)


@pytest.mark.parametrize("every", [3, 0], ids=["checkpoints", "without"])
def test_a_wrong_shard_without_a_list_ends_the_run_before_a_checkpoint(fresh: Path, every: int) -> None:
    config = _sharded(fresh, checkpoint=CheckpointConfig(every=every), train=replace(SHORT, steps=3))
    prepared, shard, offset = _shard(fresh, config, "train", 0)
    without_hash_lists(prepared)
    flip_bit(shard, offset)
    notes = Notes()
    with pytest.raises(DataError, match=re.escape(f"{shard}: bytes 0 to")):
        _training(fresh, config, "unlisted", notes).run()
    assert not [kind for kind, _ in notes.calls if kind == "checkpoint"]
    flip_bit(shard, offset)
    assert _newest_step(fresh, config, "unlisted") == 0
    assert _training(fresh, config, "unlisted").run()[0] is Ending.DONE


def test_no_worker_commits_what_another_found_wrong(fresh: Path) -> None:
    config = _sharded(fresh, train=replace(SHORT, steps=4))
    prepared, shard, offset = _shard(fresh, config, "train", 0)
    without_hash_lists(prepared)
    flip_bit(shard, offset)
    workers = start_workers(make_job(config, fresh, "two"), 2)
    for process in workers.processes:
        process.join()
        assert process.exitcode == 1
    assert f"DataError: {shard}: bytes 0 to" in "".join((workers.place / f"error-{rank}").read_text() for rank in (0, 1))
    flip_bit(shard, offset)
    assert _newest_step(fresh, config, "two") == 0
