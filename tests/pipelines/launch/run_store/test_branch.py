"""A branch begins at its parent's checkpoint with its bits, changes nothing of it, and needs it until it has its own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    GuardConfig,
    LaunchConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    SettingError,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.launch.console.failure import TrainingFailed
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.run_store.lease import RunLease
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import AuditFailed, audit
from raystride.pipelines.train.checkpoint.layout import BRANCHED_FROM, content_sha256, read_manifest
from tests.bases import SHAPES, write_base
from tests.errors import refused
from tests.pipelines.train.own_model.test_training import own_job
from tests.pipelines.train.strategies.course import run_course
from tests.processes import make_job, run_workers
from tests.tiny import tiny, write_text

CONSTANT = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant")
TRAIN = TrainConfig(steps=6, slots=4, slot_size=2, log_every=2, exact=True, ema=0.9)
DECAY = OptimizerConfig(learning_rate=2e-2, schedule="wsd", warmup_steps=2, decay_steps=4)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Settings of a run `parent` of six steps, whose checkpoints of steps 2, 4 and 6 all stay."""
    return tiny(
        write_text(tmp_path),
        storage=str(tmp_path / "runs"),
        run="parent",
        launch=LaunchConfig(mode="inline"),
        checkpoint=CheckpointConfig(every=2, keep=9),
        validation=ValidationConfig(every=2, samples=16),
        optimizer=CONSTANT,
        train=TRAIN,
        scaling=ScalingConfig(threads=1),
    )


@pytest.fixture
def runs(tmp_path: Path) -> Folder:
    """The storage."""
    return Folder.from_uri(str(tmp_path / "runs"))


def _train(config: Config, **changes: Any) -> dict[str, Any]:
    return dict(train(replace(config, **changes), Folder.from_uri(config.storage), Screen()))


def _branch(config: Config, branch_from: str, steps: int = 8, run: str = "branch", **changes: Any) -> dict[str, Any]:
    own = replace(config.train, branch_from=branch_from, steps=steps)
    return _train(config, run=run, train=own, **changes)


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {str(path): (stat.st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path, stat in files.items()}


@pytest.mark.parametrize("world", [1, 2])
def test_under_the_same_settings_it_has_the_bits_of_the_parent_going_on(tmp_path: Path, world: int) -> None:
    """Also those of its average, and on other workers than the parent's."""
    settings = tiny(write_text(tmp_path), optimizer=CONSTANT, train=TRAIN, checkpoint=CheckpointConfig(every=4, keep=9))
    longer, branch = (
        replace(settings, train=replace(TRAIN, steps=8, **more)) for more in ({}, {"branch_from": "parent/step-4"})
    )
    run_workers(make_job(settings, tmp_path, "parent"), 3 - world)
    end = run_workers(make_job(branch, tmp_path, "branch"), world)
    whole = run_workers(make_job(longer, tmp_path, "parent", "a2"), 1)
    for key in ("parameters_sha256", "val_loss", "steps", "samples_seen", "tokens_seen"):
        assert end[key] == whole[key], key
    assert end["resumed_from"] == 4
    step = Folder(str(tmp_path / "parent" / "checkpoints" / "step-00000004"))
    found = read_manifest(Folder(str(tmp_path / "branch" / "checkpoints" / "step-00000008")))
    assert found[BRANCHED_FROM] == {"run": "parent", "step": 4, "manifest_sha256": content_sha256(read_manifest(step))}
    assert audit(Folder(str(tmp_path / "branch" / "checkpoints"))).branches == (("parent", 4),)


def test_adapters_branch_over_the_base_of_the_parent(tmp_path: Path) -> None:
    shape = replace(SHAPES["llama"], init_from=str(write_base(tmp_path / "base", SHAPES["llama"])))
    settings = tiny(write_text(tmp_path), optimizer=CONSTANT, train=TRAIN, checkpoint=CheckpointConfig(every=4, keep=9))
    settings = replace(settings, model=shape, lora=LoraConfig(rank=2))
    run_workers(make_job(settings, tmp_path, "parent"), 1)
    branch = replace(settings, train=replace(TRAIN, branch_from="parent/step-4"))
    ends = [run_workers(make_job(own, tmp_path, run), 1) for run, own in (("whole", settings), ("branch", branch))]
    assert ends[0]["parameters_sha256"] == ends[1]["parameters_sha256"]
    assert ends[1]["resumed_from"] == 4


@pytest.mark.parametrize("name", ["momentum", "noisy"])
def test_a_model_of_ones_own_branches_with_all_that_its_optimizer_keeps(tmp_path: Path, name: str) -> None:
    whole = run_course(own_job(tmp_path, name, "whole"), 1)
    run_course(own_job(tmp_path, name, "parent", steps=3), 1)
    branch = run_course(own_job(tmp_path, name, "branch", branch_from="parent/step-3"), 1)
    assert (branch.sha256, branch.losses) == (whole.sha256, whole.losses[3:])


def test_the_parent_is_never_written_and_may_go_once_the_branch_has_a_checkpoint(config: Config, runs: Folder) -> None:
    """The parent's driver may be training it meanwhile."""
    _train(config)
    folder = Path(config.storage) / "parent"
    text = Path(config.data.source)
    text.write_text(text.read_text() + "one more line\n")  # the branch has the data that was prepared
    with RunLease.acquire(runs / "parent", "another", str):
        before = _files(folder)
        summary = _branch(config, "parent/step-4", optimizer=DECAY)
        after = _files(folder)
        for files in (before, after):
            del files[str(folder / "owner.json")]  # which the other driver renews
        assert after == before
    assert summary["resumed_from"] == 4
    assert summary["parameters_sha256"] != json.loads((folder / "summary.json").read_text())["parameters_sha256"]
    proof = str(audit(runs / "branch" / "checkpoints"))
    assert "8 steps" in proof
    assert "up to step 4 in run parent" in proof
    with refused("train.steps", 6):
        _branch(config, "parent/step-4", 6, optimizer=DECAY)

    shutil.rmtree(folder)
    assert _branch(config, "parent/step-4", 10, optimizer=DECAY)["resumed_from"] == 8
    with pytest.raises(
        AuditFailed, match="step-00000006 follows step-00000004 of run parent, of which there is no manifest"
    ):
        audit(runs / "branch" / "checkpoints")


def test_an_audit_walks_through_branches_of_branches_and_sees_a_parent_that_was_trained_anew(
    config: Config, runs: Folder
) -> None:
    _train(config)
    _branch(config, "parent/step-4", 8, "first")
    _branch(config, "first/step-6", 10, "second", optimizer=DECAY)
    found = audit(runs / "second" / "checkpoints")
    assert (found.steps, found.branches) == (10, (("first", 6), ("parent", 4)))
    _train(config, launch=replace(config.launch, start_over=True), optimizer=DECAY)
    with pytest.raises(AuditFailed, match="step-00000004 of run parent, whose manifest is not the one that it began at"):
        audit(runs / "second" / "checkpoints")


def test_the_newest_step_is_chosen_once_and_kept_until_there_is_a_checkpoint(config: Config, runs: Folder) -> None:
    """A start that ended before its first checkpoint, while the parent went on."""
    _train(config)
    unsaved = replace(config, checkpoint=CheckpointConfig(every=0))
    assert _branch(unsaved, "parent", 8)["resumed_from"] == 6
    _train(config, train=replace(config.train, steps=8))
    assert _branch(config, "parent", 10)["resumed_from"] == 6
    stored = from_yaml(Config, (runs / "branch").read("config.yaml").decode())
    assert stored.train.branch_from == "parent/step-00000006"
    assert _train(stored, train=replace(stored.train, steps=12))["resumed_from"] == 10


def test_the_best_of_a_branch_is_its_own_and_a_rewind_has_a_checkpoint(config: Config, runs: Folder) -> None:
    _train(config)
    worse = replace(config, optimizer=replace(CONSTANT, learning_rate=3.0), guard=GuardConfig(policy="rewind"))
    summary = _branch(worse, "parent/step-4", 8)
    assert summary["best_step"] > 4
    assert (runs / "branch" / "checkpoints" / "step-00000004").exists("MANIFEST.json")
    assert audit(runs / "branch" / "checkpoints").steps == 8


def _remove_data(folder: Path) -> None:
    for file in folder.glob("checkpoints/step-00000004/*/rank-0.bin"):
        file.unlink()


def _damage_data(folder: Path) -> None:
    for file in folder.glob("checkpoints/step-00000004/*/rank-0.bin"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def _remove_manifest(folder: Path) -> None:
    for file in folder.glob("checkpoints/step-00000004/MANIFEST*"):
        file.unlink()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_remove_data, "step-00000004 is not complete, or its data has been removed; complete are steps 2, 6"),
        (_remove_manifest, "step-00000004 is not complete"),
        (_damage_data, "rank-0.bin differs from the manifest's SHA-256"),
        (lambda folder: shutil.rmtree(folder / "checkpoints" / "step-00000004"), "step-00000004 is not there"),
        (shutil.rmtree, "there is no run parent"),
    ],
)
def test_a_step_that_is_not_whole_is_refused_by_name(config: Config, fault: Callable[[Path], None], words: str) -> None:
    _train(config)
    fault(Path(config.storage) / "parent")
    # Hashes are verified by the workers.
    with pytest.raises((SettingError, TrainingFailed), match=words) as error:
        _branch(config, "parent/step-4")
    refusal = error.value if isinstance(error.value, SettingError) else error.value.__cause__
    assert isinstance(refusal, SettingError)
    assert refusal.setting == "train.branch_from"
    assert not (Path(config.storage) / "branch" / "checkpoints" / "step-00000006").exists()


def test_other_data_slots_or_models_are_refused_by_name(config: Config, tmp_path: Path) -> None:
    _train(config)
    other = write_text(tmp_path / "more", 30_000) if (tmp_path / "more").mkdir() is None else None
    changes: list[tuple[str, dict[str, Any]]] = [
        ("train.slots", {"train": replace(config.train, slots=2, branch_from="parent/step-4", steps=8)}),
        ("model.hidden_size", {"model": ModelConfig(layers=2, heads=2, hidden_size=32, context=16)}),
        ("seed", {"seed": 1}),
        ("data.source", {"data": replace(config.data, source=str(other))}),
    ]
    branch = replace(config, run="branch", train=replace(config.train, branch_from="parent/step-4", steps=8))
    for setting, change in changes:
        with pytest.raises(SettingError, match="a branch has data, model and slots of the run that it begins at") as error:
            _train(branch, **change)
        assert error.value.setting == setting
        assert setting in str(error.value)
    assert not (Path(config.storage) / "branch").exists()


def test_what_cannot_be_a_branch_is_refused(config: Config) -> None:
    _train(config)
    with refused("train.steps", 4, names=["train.branch_from"]):
        _branch(config, "parent/step-4", 4)
    with refused("train.exact", True):
        _branch(config, "parent/step-4", scaling=ScalingConfig(threads=2))
    with refused("train.branch_from", "parent/step-00000004", names=["--run NAME"]):
        _branch(config, "parent/step-4", run="parent")
    with refused("train.branch_from", "parent/step-00000003", names=["complete are steps 2, 4, 6"]):
        _branch(config, "parent/step-3")
    for text in ("", "parent/4", "../parent/step-4", "a/b/step-4"):
        with refused("train.branch_from", text, names=["RUN/step-500"]):
            TrainConfig(branch_from=text)
    lora = LoraConfig(rank=2, adapters=2, variants={"seed": [1, 2]})
    with refused("train.branch_from", "parent"):
        Config(train=TrainConfig(branch_from="parent"), lora=lora, model=ModelConfig(init_from="base"))


def test_a_default_name_says_where_a_branch_began() -> None:
    names = {Config(train=TrainConfig(branch_from=text)).default_run("x") for text in (None, "a", "b", "a/step-4")}
    assert len(names) == 4
    assert TrainConfig(branch_from="a/step-4") == TrainConfig(branch_from="a/step-00000004")
