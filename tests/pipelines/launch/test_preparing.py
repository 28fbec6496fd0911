"""Trainings beside a preparation that goes on: stopped, killed and started again, to the bits of an undisturbed one."""

import json
import os
import shlex
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest

from raystride.pipelines.config import DataConfig, LaunchConfig, TrainConfig
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.checkpoint.audit import audit
from tests.children import find_children
from tests.gated import write_plugin, write_source
from tests.ray_jobs.jobs import Forked, Process, finish_job, start_script
from tests.tiny import tiny
from tests.waiting import LIMIT_S, wait_until

FLAGS = shlex.split(
    """
    --launch inline --data.kind text --data.validation tail --data.validation_fraction 0.05 --data.shard_mib 0.25
    --data.start_after_mib 0.25 --tokenizer.kind bytes --model.layers 1 --model.heads 2 --model.hidden_size 8
    --model.context 128 --train.slots 4 --train.slot_size 32 --train.steps 45 --train.log_every 10 --train.exact true
    --checkpoint.every 10 --validation.every 0 --optimizer.schedule constant --record.mlflow false --sample.tokens 0
    """
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of six parts, of which all but two are not read before a training's gate is open."""
    return write_source(tmp_path_factory.mktemp("preparing"))


WAITS = "training waits for its data"
CLOCK = """
import os, time
from types import SimpleNamespace
from raystride.pipelines.train import loop

loop.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + 86400 * os.path.exists({late!r}))
"""


def _says(storage: Path, text: str) -> bool:
    """Whether the run's journal has a text."""
    return any(text.encode() in file.read_bytes() for file in (storage / "mine").rglob("*.jsonl"))


STARTED: list[Process] = []


@pytest.fixture(autouse=True)
def end_processes() -> Iterator[None]:
    """Ends what a test that failed has left."""
    yield
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Training:
    """A training, or a preparation, beside which others may run."""

    def __init__(self, source: Path, storage: Path, job: str = "train", *more: str) -> None:
        self.storage, self.gate = storage, storage / "gate"
        where = ["--data.source", str(source), "--storage", str(storage), "--run", "mine"]
        where += ["--plugins", write_plugin(self.gate)]
        self.process = start_script(job, *where, *FLAGS, "--task", "gated", *more)
        STARTED.append(self.process)

    def begun(self) -> psutil.Process:
        """The process that prepares, once a checkpoint was made of what is ready."""
        wait_until(lambda: list(self.storage.glob("mine/checkpoints/step-*/MANIFEST.json")), "no checkpoint")
        return find_children(self.process.pid, "spawn_main")[0]

    def end(self) -> tuple[int, str]:
        """The exit code, and what was printed."""
        outcome = finish_job(self.process)
        return outcome.code, outcome.out + outcome.err

    def same(self, undisturbed: dict[str, Any]) -> bool:
        """Whether the bits are those of the other training, and each sample was fed once."""
        summary = json.loads((self.storage / "mine" / "summary.json").read_text())
        assert audit(Folder.from_uri(str(self.storage)) / "mine" / "checkpoints").samples == undisturbed["samples_seen"]
        return bool(summary["parameters_sha256"] == undisturbed["parameters_sha256"])


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The summary of a training that nothing disturbs."""
    storage = tmp_path_factory.mktemp("undisturbed")
    (storage / "gate").touch()
    code, output = Training(source, storage).end()
    assert code == 0, output
    assert "tokens are prepared to begin with, the rest follows" in output
    return dict(json.loads((storage / "mine" / "summary.json").read_text()))


@pytest.mark.weekly
@pytest.mark.long
def test_a_training_that_is_faster_waits_and_says_so(source: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    training = Training(source, tmp_path)
    training.begun()
    wait_until(lambda: _says(tmp_path, WAITS), "no word")
    training.gate.touch()
    code, output = training.end()
    assert code == 0, output
    assert WAITS in output
    assert training.same(undisturbed)


@pytest.mark.long
def test_a_stop_that_all_processes_hear_is_heeded_by_the_training(source: Path, tmp_path: Path) -> None:
    """As a terminal sends ^C, and Ray and batch systems SIGTERM."""
    training = Training(source, tmp_path)
    preparing = training.begun()
    os.killpg(training.process.pid, signal.SIGTERM)
    code, output = training.end()
    assert code == 128 + signal.SIGTERM, output
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert (summary["ending"], summary["interrupted_by"]) == ("stopped", "SIGTERM")
    psutil.wait_procs([preparing], LIMIT_S)
    assert not preparing.is_running()


@pytest.mark.long
@pytest.mark.weekly
def test_a_training_whose_time_is_over_while_it_waits_ends(source: Path, tmp_path: Path) -> None:
    """On a clock that stands at its beginning plus a day once it waits."""
    late, plugin = tmp_path / "late", tmp_path / "clock.py"
    plugin.write_text(CLOCK.format(late=str(late)))
    plugins = json.dumps([str(plugin), *json.loads(write_plugin(tmp_path / "gate"))])
    training = Training(source, tmp_path, "train", "--train.hours", "20", "--plugins", plugins)
    training.begun()
    wait_until(lambda: _says(tmp_path, WAITS), "no word")
    late.touch()
    code, output = training.end()
    assert code == 0, output
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())
    assert summary["ending"] == "out_of_time"
    assert 0 < summary["steps"] < 45
    assert audit(Folder.from_uri(str(tmp_path)) / "mine" / "checkpoints").steps == summary["steps"]


@pytest.mark.long
@pytest.mark.parametrize("victim", [pytest.param("preparation", marks=pytest.mark.weekly), "training"])
def test_what_is_killed_goes_on_to_the_same_bits(
    source: Path, tmp_path: Path, undisturbed: dict[str, Any], victim: str
) -> None:
    training = Training(source, tmp_path)
    preparing = training.begun()
    (preparing if victim == "preparation" else training.process).kill()
    code, output = training.end()
    assert code != 0
    if victim == "preparation":
        assert "its process ended with code -9: start this run again" in output
    psutil.wait_procs([preparing], LIMIT_S)
    assert not preparing.is_running(), "it ends with its driver"
    training.gate.touch()
    again = Training(source, tmp_path)
    code, output = again.end()
    assert code == 0, output
    assert again.same(undisturbed)


@pytest.mark.long
def test_a_preparation_and_a_training_run_at_once(source: Path, tmp_path: Path, undisturbed: dict[str, Any]) -> None:
    alone = Training(source, tmp_path, "prepare")
    wait_until(lambda: list(tmp_path.glob(".prepared/*/generations/000000/manifest.json")), "no generation")
    training = Training(source, tmp_path)
    training.begun()
    forked = training.process
    assert isinstance(forked, Forked)
    wait_until(lambda: "another process prepares" in forked.printed, "no word")
    alone.gate.touch()
    for each in (alone, training):
        code, output = each.end()
        assert code == 0, output
    assert training.same(undisturbed)


@pytest.mark.long
def test_a_training_follows_a_folder_that_begins_with_too_little_and_whose_files_go(tmp_path: Path) -> None:
    source, storage = tmp_path / "data", tmp_path / "runs"

    def add(name: str, files: int) -> None:
        for number in range(files):
            (source / f"{name}{number:02d}.txt").write_text(f"{name} {number} has more to say " * 9)

    def grow() -> None:
        wait_until(lambda: list(storage.glob(".prepared/*/parts/*.json")), "nothing is prepared")
        add("then", 20)
        wait_until(lambda: list(storage.glob("mine/checkpoints/step-*/MANIFEST.json")), "no checkpoint")
        for file in source.iterdir():
            file.unlink()
        add("last", 40)

    source.mkdir()
    (source / "a.txt").write_text("too little")
    data = DataConfig(source=str(source), kind="text", validation_fraction=0.3, start_after_mib=0.0001, follow=True)
    config = tiny(
        source, data=data, train=TrainConfig(steps=50, slots=4, slot_size=2), run="mine", launch=LaunchConfig(mode="inline")
    )
    Thread(target=grow, daemon=True).start()
    summary = train(replace(config, storage=str(storage)), Folder.from_uri(str(storage)), SilentScreen())
    assert summary["steps"] == 50
    assert audit(Folder.from_uri(str(storage)) / "mine" / "checkpoints").samples == 400
    newest = json.loads((storage / "mine/checkpoints/step-00000050/MANIFEST.json").read_text())
    assert newest["order"]["generations"][0] < 400
