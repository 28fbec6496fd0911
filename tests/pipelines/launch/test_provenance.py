"""What a run records of its environment and data, its tags, and the links to its pages."""

import getpass
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, LaunchConfig, RecordConfig, ResumeConfig, ScalingConfig
from raystride.pipelines.config.parse import load_settings, to_stored_yaml
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.data.prepare.manifest import Manifest
from raystride.pipelines.data.prepare.one_source import PreparedData
from raystride.pipelines.data.prepare.progress import SPEED_FILE
from raystride.pipelines.data.prepare.raw_files import hash_raw_files, list_raw_files, write_raw_files
from raystride.pipelines.data.sources.source import open_source
from raystride.pipelines.data.tasks.task import Column
from raystride.pipelines.launch.cluster.internals import JOB_CONFIG_VARIABLE
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.console.ray_job_status import job_metadata
from raystride.pipelines.launch.console.screen import Screen
from raystride.pipelines.launch.provenance import (
    _ray_tags,
    checkpoint_facts,
    describe_changes,
    describe_data,
    describe_surroundings,
    find_owner,
    metric_labels,
    owner_tags,
    run_tags,
    show_pages,
)
from raystride.pipelines.launch.run_store.resume import PreviousAttempt
from raystride.pipelines.observability.observers.ray_metrics import fill_labels
from raystride.pipelines.observability.record import describe_environment
from raystride.pipelines.sweep.trial import SweepPlan
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused
from tests.tiny import tiny

PLACE = Path("text.txt")


def environment(**changes: Any) -> Any:
    """Returns the environment of a run."""
    found = {"commit": "c" * 40, "dirty": True, "python": "3.11", "cpu": "EPYC", "gpus": [], "data": "d" * 16}
    return found | {"versions": {"torch": "2.13.0", "raystride": "0.5"}, "host": "h"} | changes


def test_a_checkpoint_says_where_it_was_made_and_an_exact_one_what_its_bits_depend_on(tmp_path: Path) -> None:
    config, folder, share = tiny(PLACE), Folder(str(tmp_path)), Allocation(2, "cpu", 3)
    plain = {"commit": "c" * 40, "python": "3.11", "versions": environment()["versions"], "device": "cpu", "threads": 3}
    assert checkpoint_facts(config, folder, environment(), share) == plain
    without = environment()
    del without["commit"]
    assert checkpoint_facts(config, folder, without, share).keys() == plain.keys() - {"commit"}
    exact = replace(config, train=replace(config.train, exact=True))
    facts = checkpoint_facts(exact, folder, environment(), share)
    assert facts.keys() == plain.keys() | {"bits"}
    (folder / "checkpoints" / "step-00000002").put_json("MANIFEST.json", {"step": 2, "bits": facts["bits"]})
    assert checkpoint_facts(exact, folder, environment(), share) == facts
    with refused("train.exact", True):
        checkpoint_facts(exact, folder, environment(), Allocation(2, "cpu", 4))
    taken, found = replace(exact, resume=ResumeConfig(accept="bits")), environment()
    facts = checkpoint_facts(taken, folder, found, Allocation(2, "cpu", 4))
    assert (facts["bits"]["changed_at"], found["bits_changed_at"]) == ([2], [2])  # type: ignore[index]
    tags, lines = run_tags(found, taken.scaling, taken.record, Allocation(2, "cpu", 4), None), list[str]()
    show_pages(folder, tags, lines.append)
    assert "after step 2 " in lines[0]


def prepared(folder: Path, **changes: Any) -> PreparedData:
    """Data that was prepared there."""
    manifest = Manifest(fingerprint="f", id_type="uint16", vocabulary_size=9, end_id=0, splits={}, **changes)
    return PreparedData(Folder(str(folder)), manifest, reused=True, learned="l")


def test_what_is_kept_of_the_data_is_its_fingerprint_and_those_of_its_sources(tmp_path: Path) -> None:
    earlier = PreviousAttempt(tiny(PLACE), "e", None, {"gone": "g", "web": "before"})
    assert describe_data(prepared(tmp_path), earlier) == {"data": "f"}
    sources = {"web": "w", "code": "c"}
    assert describe_data(prepared(tmp_path, sources=sources), None) == {"data": "f", "sources": sources, "learned": "l"}
    both = describe_data(prepared(tmp_path, sources=sources), earlier)
    assert both["sources"] == {"gone": "g", "web": "w", "code": "c"}, "one that has ended is known, too"
    Folder(str(tmp_path)).put_json(SPEED_FILE, {"bytes": 2e6, "documents": 3, "seconds": {"read": 2.0}})
    found = describe_data(prepared(tmp_path), None)
    assert found["data"] == "f"
    assert found["prepared_at"].startswith("read 1 MB/s")
    assert describe_data(replace(prepared(tmp_path), lines=("files: 3 read",)), None)["data_lines"] == ["files: 3 read"]


@pytest.mark.parametrize(
    ("strategy", "workers", "named"),
    [("auto", 1, "single"), ("auto", 2, "ddp"), ("fsdp", 1, "fsdp"), ("single", 1, "single")],
)
def test_tags_say_what_is_known(strategy: Any, workers: int, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/ray_jobs/train.py"])
    config = replace(tiny(PLACE), scaling=ScalingConfig(strategy=strategy))
    assert run_tags(environment(dirty=None), config.scaling, config.record, Allocation(workers, "cpu", 1), None) == {
        "raystride.strategy": named,
        "raystride.version": "0.5",
        "raystride.commit": "c" * 40,
        "raystride.data": "d" * 16,
        "raystride.workers": str(workers),
        "raystride.device": "cpu",
        "mlflow.user": getpass.getuser(),
        "mlflow.source.name": "train.py",
        "mlflow.source.type": "LOCAL",
        "mlflow.source.git.commit": "c" * 40,
    }
    assert (
        run_tags(environment(), config.scaling, config.record, Allocation(workers, "cuda", 1), None)["raystride.dirty"]
        == "True"
    )
    assert _ray_tags(None) == {}


def test_pages_are_shown_where_the_run_has_some(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Folder(str(tmp_path))
    show_pages(folder, {}, Screen().log)
    folder.put_json("mlflow.json", {"uri": "sqlite:///x", "run_id": "r", "experiment_id": "1"})
    show_pages(folder, {}, Screen().log)
    assert capsys.readouterr().out == ""
    folder.put_json("mlflow.json", {"uri": "http://host:1", "run_id": "r", "experiment_id": "1"})
    show_pages(folder, {"raystride.ray_job": "http://ray/#/jobs/j"}, Screen().log)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "ray      http://ray/#/jobs/j"
    assert second.startswith("mlflow   http://host:1/#/experiments/1/runs/r")


def test_gpus_that_no_driver_names_are_those_that_were_counted() -> None:
    config, there = replace(tiny(PLACE), launch=LaunchConfig(mode="inline")), Resources(1, 1, 1, 7, gpu_name="Other")
    known = describe_environment()["gpus"]
    named = [{"name": "Other", "memory_bytes": 7, "driver": ""}]
    assert describe_surroundings(config.launch, there, Allocation(1, "cuda", 1))["gpus"] == (known or named)
    assert describe_surroundings(config.launch, there, Allocation(1, "cpu", 1))["gpus"] == known
    assert describe_surroundings(config.launch, replace(there, gpu_name=None), Allocation(1, "cuda", 1))["gpus"] == known


def test_the_content_of_data_is_todays_and_of_ended_sources_the_last_known(tmp_path: Path) -> None:
    """Of two sources that go on one has changed; a third has ended, and a fourth was prepared by 0.3, without hashes."""
    files = {}
    for name in ("web", "code"):
        (tmp_path / f"{name}.txt").write_text(f"the text of {name}")
        opened = open_source(DataConfig(), str(tmp_path / f"{name}.txt"), (Column("data.column", "text"),))
        write_raw_files(Folder(str(tmp_path / "prepared" / name)), opened, None)
        files[name] = hash_raw_files(list_raw_files(opened, None))
    now = prepared(tmp_path / "prepared" / "mixture", sources={"web": "web", "code": "code", "old": "old"})
    content = {"gone": "g", "web": "before", "code": files["code"], "old": "o"}
    earlier = PreviousAttempt(tiny(PLACE), "e", None, {"gone": "g", "web": "before"}, content=content)
    assert describe_data(now, earlier)["content"] == {"gone": "g", **files, "old": "o"}
    assert describe_data(now, None)["content"] == files


def test_an_owner_is_given_or_of_the_job_or_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ann")
    assert find_owner(RecordConfig()) == "ann"
    job = {"metadata": {"job_submission_id": "raysubmit_1", "owner": "bob"}}
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, json.dumps(job))
    assert find_owner(RecordConfig()) == "bob"
    assert find_owner(RecordConfig(owner="carl")) == "carl"
    monkeypatch.delenv(JOB_CONFIG_VARIABLE)
    monkeypatch.delenv("USER")
    assert find_owner(RecordConfig()) == ""


def test_owner_and_tags_go_to_mlflow_ray_and_metrics() -> None:
    record = RecordConfig(tags={"project": "parser", "cost_center": 42})
    config = replace(tiny(PLACE), record=record)
    tags = run_tags(environment(owner="ann"), config.scaling, config.record, Allocation(1, "cpu", 1), None)
    given = {"raystride.owner": "ann", "project": "parser", "cost_center": "42"}
    assert {key: tags[key] for key in (*given, "mlflow.user")} == given | {"mlflow.user": "ann"}
    assert job_metadata("mine", "runs", False, owner_tags("ann", record)).items() >= given.items()
    assert fill_labels(metric_labels("ann", record)) == {"owner": "ann", "tags": "cost_center=42,project=parser"}
    assert fill_labels(metric_labels("", RecordConfig())) == {"owner": "none", "tags": "none"}


def test_a_trial_names_its_sweep_and_not_rays_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/ray/workers/default_worker.py"])
    tags = run_tags(environment(), tiny(PLACE).scaling, tiny(PLACE).record, Allocation(1, "cpu", 1), None)
    assert tags["mlflow.source.name"] == "raystride"
    base = replace(SweepJobConfig(), run="swept")
    trial = SweepPlan(base, Folder("/runs"), 0.0, Resources(1, 1, 1, 7), owner="ann").tags
    assert trial == {
        "mlflow.source.name": "raystride sweep swept", "raystride.sweep": "swept", "raystride.owner": "ann"
    }  # fmt: skip


def test_what_differs_from_the_preset_is_a_tag() -> None:
    preset = load_settings(Config, "lm_python", {"optimizer.learning_rate": 0.0071, "run": "mine"})
    found = describe_changes(preset.settings, preset.preset)
    assert found == {"raystride.preset": "lm_python", "raystride.changed": "optimizer.learning_rate=0.0071"}
    assert describe_changes(load_settings(Config, "lm_python").settings, "lm_python")["raystride.changed"] == "nothing"
    assert describe_changes(tiny(PLACE), "run") == {}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"owner": ""}, "record.owner"),
        ({"owner": "a\nb"}, "record.owner"),
        ({"tags": {"mlflow.user": "x"}}, "record.tags"),
        ({"tags": {"raystride.owner": "x"}}, "record.tags"),
        ({"tags": {"1st": "x"}}, "record.tags"),
        ({"tags": {"project": ""}}, "record.tags"),
        ({"tags": {"project": "a,b"}}, "record.tags"),
        ({"tags": {"project": ["a"]}}, "record.tags"),
        ({"tags": {f"t{number}": 1 for number in range(21)}}, "record.tags"),
    ],
)
def test_a_label_is_a_short_text(given: dict[str, Any], name: str) -> None:
    with refused(name, next(iter(given.values()))):
        RecordConfig(**given)


def test_owner_and_tags_without_effect_are_not_stored() -> None:
    stored = to_stored_yaml(tiny(PLACE))
    assert "owner:" not in stored
    assert "tags:" not in stored
    given = replace(tiny(PLACE), record=RecordConfig(owner="ann", tags={"a": 1}))
    assert "record.owner, record.tags" in to_stored_yaml(given).splitlines()[1]
