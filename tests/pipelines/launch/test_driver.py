"""What the driver refuses before anything expensive starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.cluster.resources import Resources, Share
from raystride.pipelines.config import Config, Data, Launch, Model, Optimizer, Scaling, Train, Validation
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.files import Folder
from raystride.pipelines.launch.driver import (
    _complete,
    _data,
    _facts,
    _nothing_left,
    _ray_tags,
    _show_pages,
    _tags,
    _total_steps,
    _watch_over,
    run_training,
    surroundings,
)
from raystride.pipelines.launch.exit_codes import DONE, WRONG_SETTINGS
from raystride.pipelines.launch.resume import Earlier
from raystride.pipelines.launch.screen import Screen
from raystride.pipelines.prepare.manifest import Manifest
from raystride.pipelines.prepare.one_source import Prepared
from raystride.pipelines.prepare.stage_speed import SPEED_FILE
from raystride.pipelines.record import describe_environment
from tests.errors import refused
from tests.processes import make_job
from tests.ray_jobs.jobs import finish_job, start_job
from tests.tiny import tiny, write_text

PLACE = Path("text.txt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": Validation(metric="accuracy")}, "must be one of val_loss, val_perplexity"),
        ({"model": Model(context=5_000, width=16, heads=2)}, "which is not one sample"),
        ({"data": Data(source="/no/such/file")}, "does not exist"),
    ],
)
def test_what_cannot_work_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, object], message: str
) -> None:
    config = tiny(write_text(tmp_path), storage=str(tmp_path), launch=Launch(mode="inline"), **changes)
    assert run_training(Parsed(config, "tiny")) == WRONG_SETTINGS
    assert message in capsys.readouterr().err


def test_a_training_ends_with_0_and_once_more_there_is_nothing_to_do(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), launch=Launch(mode="inline"))
    first = finish_job(start_job("train", config, "--run", "a"))
    assert first.code == DONE, first.err
    assert Folder(str(tmp_path / "runs/a")).read_json("summary.json")["status"] == "finished"
    again = finish_job(start_job("train", config, "--run", "a"))
    assert again.code == DONE
    assert "6 steps" in again.out
    assert "step 1 " not in again.out


def test_weights_of_another_network_are_refused_before_the_name_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    model = Model(layers=2, heads=2, width=16, context=16, init_from=str(tmp_path))
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), launch=Launch(mode="inline"), model=model)
    assert run_training(Parsed(config, "tiny")) == WRONG_SETTINGS
    assert f"model.init_from is '{tmp_path}': " in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*/config.yaml"))


def test_a_folder_of_hugging_face_is_no_base_of_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    model = Model(layers=2, heads=2, width=16, context=16, init_from=str(tmp_path))
    data = Data(source="trec", kind="huggingface")
    config = tiny(write_text(tmp_path), storage=str(tmp_path / "runs"), task="classification", model=model)
    config = replace(config, launch=Launch(mode="inline"), data=data)
    assert run_training(Parsed(config, "tiny")) == WRONG_SETTINGS
    assert "model.init_from is " in (said := capsys.readouterr().err)
    assert "task `classification`" in said


def environment(**changes: Any) -> Any:
    """Returns the environment of a run."""
    found = {"commit": "c" * 40, "dirty": True, "python": "3.11", "cpu": "EPYC", "gpus": [], "data": "d" * 16}
    return found | {"versions": {"torch": "2.13.0", "raystride": "0.5"}, "host": "h"} | changes


def test_a_checkpoint_says_where_it_was_made_and_an_exact_one_what_its_bits_depend_on(tmp_path: Path) -> None:
    config, folder, share = tiny(PLACE), Folder(str(tmp_path)), Share(2, "cpu", 3)
    plain = {"commit": "c" * 40, "python": "3.11", "versions": environment()["versions"], "device": "cpu", "threads": 3}
    assert _facts(config, folder, environment(), share) == plain
    without = environment()
    del without["commit"]
    assert _facts(config, folder, without, share).keys() == plain.keys() - {"commit"}
    exact = replace(config, train=replace(config.train, exact=True))
    facts = _facts(exact, folder, environment(), share)
    assert facts.keys() == plain.keys() | {"bits"}
    (folder / "checkpoints" / "step-00000002").put_json("MANIFEST.json", {"bits": facts["bits"]})
    assert _facts(exact, folder, environment(), share) == facts
    with refused("train.exact", True):
        _facts(exact, folder, environment(), Share(2, "cpu", 4))


def prepared(folder: Path, **changes: Any) -> Prepared:
    """Data that was prepared there."""
    manifest = Manifest(fingerprint="f", id_type="uint16", vocabulary_size=9, end_id=0, splits={}, **changes)
    return Prepared(Folder(str(folder)), manifest, reused=True, learned="l")


def test_what_is_kept_of_the_data_is_its_fingerprint_and_those_of_its_sources(tmp_path: Path) -> None:
    earlier = Earlier(tiny(PLACE), "e", None, {"gone": "g", "web": "before"})
    assert _data(prepared(tmp_path), earlier) == {"data": "f"}
    sources = {"web": "w", "code": "c"}
    assert _data(prepared(tmp_path, sources=sources), None) == {"data": "f", "sources": sources, "learned": "l"}
    both = _data(prepared(tmp_path, sources=sources), earlier)
    assert both["sources"] == {"gone": "g", "web": "w", "code": "c"}, "one that has ended is known, too"
    Folder(str(tmp_path)).put_json(SPEED_FILE, {"bytes": 2e6, "documents": 3, "seconds": {"read": 2.0}})
    found = _data(prepared(tmp_path), None)
    assert found["data"] == "f"
    assert found["prepared_at"].startswith("read 1 MB/s")


@pytest.mark.parametrize(("steps", "more"), [(500, 1000), (None, 12), (0, 12)])
def test_a_complete_run_says_how_to_train_it_further(tmp_path: Path, steps: int | None, more: int) -> None:
    folder, config = Folder(str(tmp_path / "my run")), replace(tiny(PLACE), run="my run")
    earlier = Earlier(config, None, {"steps": steps, "status": "finished", "run": "my run"})  # type: ignore[typeddict-item]
    first, command, other, *_ = _complete(folder, config, "500 steps", earlier).splitlines()
    assert "complete (500 steps)" in first
    assert command.endswith(f"train --run 'my run' --storage {tmp_path} --train.steps {more}")
    assert "--run NAME" in other
    assert f"--train.steps {2 * 6}" in _complete(folder, config, "", Earlier(config, None, None))


@pytest.mark.parametrize(
    ("strategy", "workers", "named"),
    [("auto", 1, "single"), ("auto", 2, "ddp"), ("fsdp", 1, "fsdp"), ("single", 1, "single")],
)
def test_tags_say_what_is_known(strategy: Any, workers: int, named: str) -> None:
    config = replace(tiny(PLACE), scaling=Scaling(strategy=strategy))
    assert _tags(environment(dirty=None), config, Share(workers, "cpu", 1)) == {
        "raystride.strategy": named,
        "raystride.version": "0.5",
        "raystride.commit": "c" * 40,
        "raystride.data": "d" * 16,
        "raystride.workers": str(workers),
        "raystride.device": "cpu",
    }
    assert _tags(environment(), config, Share(workers, "cuda", 1))["raystride.dirty"] == "True"
    assert _ray_tags(None) == {}


def test_pages_are_shown_where_the_run_has_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(str(tmp_path))
    _show_pages(folder, {}, Screen())
    folder.put_json("mlflow.json", {"uri": "sqlite:///x", "run_id": "r", "experiment_id": "1"})
    _show_pages(folder, {}, Screen())
    assert capsys.readouterr().out == ""
    folder.put_json("mlflow.json", {"uri": "http://host:1", "run_id": "r", "experiment_id": "1"})
    _show_pages(folder, {"raystride.ray_job": "http://ray/#/jobs/j"}, Screen())
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ray      http://ray/#/jobs/j"
    assert second.startswith("mlflow   http://host:1/#/experiments/1/runs/r")


def left(folder: Path, config: Config, steps: int | None = None, saved: int | None = None) -> bool:
    """Whether a run that came to its end after so many steps, with such a checkpoint, has nothing left to do."""
    summary: Any = {"status": "finished", "complete": True, "steps": steps} if steps else None
    if saved:
        (Folder(str(folder)) / "a" / "checkpoints" / f"step-{saved:08d}").put_json("MANIFEST.json", {})
    earlier = Earlier(config, None, summary) if saved or steps else None
    return _nothing_left(replace(config, run="a"), Folder(str(folder)), Folder(str(folder)) / "a", earlier, Screen())


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


def test_the_end_of_a_run_is_that_of_its_steps_or_of_its_epochs_whichever_comes_first(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path), optimizer=Optimizer(schedule="constant"))
    job = make_job(config, tmp_path / "runs", "a")
    tokens = Manifest.load(job.prepared).tokens("train")
    windows = (tokens - 1) // 16
    a_pass = -(-windows // 8)  # steps of four slots of two windows each
    for steps, epochs, hours, expected in (
        (6, 0, 0, 6),
        (0, 1, 0, a_pass),
        (6, 1, 0, 6),
        (10**6, 1, 0, a_pass),
        (0, 0, 1.0, None),
    ):
        train = Train(steps=steps, epochs=epochs, hours=hours, slots=4, slot_size=2)
        assert _total_steps(replace(job, config=replace(config, train=train))) == expected


def test_nobody_can_submit_a_job_again_that_was_not_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny(PLACE)
    _watch_over(config, "http://dashboard", Screen())
    assert capsys.readouterr().err == ""
    for dashboard in (None, "http://dashboard"):
        _watch_over(replace(config, launch=Launch(resubmit=1)), dashboard, Screen())
        assert "launch.resubmit has no effect" in capsys.readouterr().err


def test_gpus_that_no_driver_names_are_those_that_were_counted() -> None:
    config, there = replace(tiny(PLACE), launch=Launch(mode="inline")), Resources(1, 1, 1, 7, gpu_name="Other")
    known = describe_environment()["gpus"]
    named = [{"name": "Other", "memory_bytes": 7, "driver": ""}]
    assert surroundings(config, there, Share(1, "cuda", 1))["gpus"] == (known or named)
    assert surroundings(config, there, Share(1, "cpu", 1))["gpus"] == known
    assert surroundings(config, replace(there, gpu_name=None), Share(1, "cuda", 1))["gpus"] == known
