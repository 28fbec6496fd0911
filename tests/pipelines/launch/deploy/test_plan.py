"""Plans of deployments: the run's share of a place, and the checks that refuse a run."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.hugging_face_config import describe
from raystride.pipelines.config import Config, ModelConfig
from raystride.pipelines.config.deploy import CloudConfig, DeployConfig, SlurmConfig, TargetConfig
from raystride.pipelines.config.parse import Parsed, load_settings
from raystride.pipelines.config.presets import presets
from raystride.pipelines.data.prepare.choose_task import choose_task
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.deploy.plan import DEFAULT_PLACES, KINDS, Kind, known_places, load_place, plan_deployment
from tests.errors import cannot_run, refused
from tests.some import some

PLACE = TargetConfig(
    nodes=4, gpus_per_node=8, cpus_per_node=64, memory_gib=2000, gpu_memory_gib=80, storage="/shared/runs", shared=True
)


def _load_config(preset: str = "lm_124m", **changes: Any) -> Parsed[Config]:
    return load_settings(Config, preset, {"data.source": "python"} | changes) if changes else _load_preset(preset)


@cache
def _load_preset(preset: str) -> Parsed[Config]:
    return load_settings(Config, preset, {"data.source": "python"})


def _plan(place: TargetConfig = PLACE, kind: Kind = "slurm", nodes: int = 4, gpus: int = 8, **changes: Any) -> Any:
    return plan_deployment(kind, DeployConfig(nodes=nodes, gpus_per_node=gpus), place, _load_config(**changes))


def test_every_gpu_has_a_worker_in_the_settings() -> None:
    found = _plan()
    assert (found.workers, found.cpus_per_node, found.has_whole_nodes) == (32, 64, True)
    assert yaml.safe_load(found.settings)["scaling"] == {"workers": 32, "device": "cuda"}
    assert yaml.safe_load(found.settings)["storage"] == "/shared/runs"


def test_some_gpus_of_a_node_get_their_share_of_cpus_and_memory() -> None:
    found = _plan(nodes=1, gpus=2)
    assert (found.cpus_per_node, found.memory_gib, found.has_whole_nodes) == (16, 500, False)


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("gpus", [0, pytest.param(8, marks=pytest.mark.long)])
def test_the_written_settings_are_those_of_the_same_run(preset: str, gpus: int) -> None:
    """The written settings, loaded again, give the run the same name and fixed settings as here."""
    if preset == "sweep_scaling":
        pytest.skip("a sweep")
    request = DeployConfig(nodes=1, gpus_per_node=gpus)
    base = {"model.init_from": "/shared/model", "model.context": ModelConfig.context} if preset == "finetune" else {}
    parsed = _load_config(preset, **base, **({"train.slots": 32} if gpus else {}))
    found = plan_deployment("slurm", request, PLACE, parsed)
    loaded = load_settings(Config, yaml.safe_load(found.settings))
    loaded.require_source()
    again = loaded.settings
    named = choose_task(parsed.settings)
    assert again.run == named.default_run(preset)
    assert again.fixed_settings() == named.fixed_settings()


def test_a_default_given_together_with_a_base_is_written(tmp_path: Path) -> None:
    """If it were left out, it would be read from the base's folder, which has another value."""
    description = describe(ModelConfig(architecture="llama", layers=2, context=512), 300, end_id=0)
    (tmp_path / "config.json").write_text(json.dumps(description))
    parsed = _load_config("finetune", **{"model.init_from": str(tmp_path), "model.context": ModelConfig.context})
    found = plan_deployment("slurm", DeployConfig(nodes=1, gpus_per_node=0), PLACE, parsed)
    again = load_settings(Config, yaml.safe_load(found.settings)).settings
    assert again.model == parsed.settings.model
    assert again.model.context == ModelConfig.context


@pytest.mark.parametrize(
    ("place", "options", "problem", "names"),
    [
        ({}, {"nodes": 5}, "nodes", ("5 asked", "4 there")),
        ({}, {"gpus": 9}, "GPUs", ("9", "8")),
        ({}, {"train.slots": 16}, "slots", ("16 slots", "16 of 32 GPUs")),
        ({"storage": "/data", "shared": False}, {}, "storage", ("/data", "4 nodes")),
        ({"storage": ""}, {}, "storage", ("none",)),
        ({"storage": "runs"}, {}, "storage", ("runs is", "absolute path")),
        ({"gpu_memory_gib": 1.0}, {}, "memory", ("about",)),
        ({"slurm": SlurmConfig(activate='source "venv')}, {}, "slurm.activate", ('source "venv', "matching")),
        ({"slurm": SlurmConfig(time_limit="9")}, {}, "time limit", ("9 is", "120 s")),
        ({}, {"kind": "sky"}, "storage", ("SkyPilot",)),
        ({}, {"kind": "kuberay"}, "storage", ("kubernetes.storage_class",)),
        ({}, {"kind": "compose", "data.source": __file__}, "data", (f"data.source {__file__!r}",)),
        ({"cloud": CloudConfig(hosts=("a", "b"))}, {"kind": "launcher"}, "hosts", ("4 nodes", "2 in cloud.hosts")),
        ({"cloud": CloudConfig(provider="aws")}, {"kind": "launcher"}, "machines", ("cloud.region ''",)),
    ],
)
def test_missing_resources_of_a_place_are_named(
    place: dict[str, Any], options: dict[str, Any], problem: str, names: tuple[str, ...]
) -> None:
    with cannot_run(problem, *names):
        _plan(replace(PLACE, **place), **options)


def test_the_message_has_request_resources_and_remedy() -> None:
    with pytest.raises(CannotRun, match=r"^this place cannot run it:\nnodes: 5 asked, 4 there\n  lower --nodes to 4$"):
        _plan(PLACE, nodes=5, **{"train.slots": 40})


def test_local_files_get_absolute_paths_and_are_refused_if_the_job_cannot_see_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "text.txt").touch()
    changes = {"data.source": "text.txt", "plugins": ["mine.py"], "run": "r"}
    found = yaml.safe_load(_plan(**changes).settings)
    assert (found["data"]["source"], found["plugins"]) == (str(tmp_path / "text.txt"), [str(tmp_path / "mine.py")])
    with cannot_run("data", f"data.source '{tmp_path}/text.txt'", f"plugins[0] '{tmp_path}/mine.py'"):
        _plan(kind="compose", **changes)


def test_an_elastic_run_tolerates_the_loss_of_nodes() -> None:
    assert _plan().min_nodes == 4
    assert _plan(**{"scaling.workers": 32, "scaling.least_workers": 9}).min_nodes == 2


def test_the_time_for_saving_grows_with_the_model() -> None:
    larger = _plan(
        **{"model.width": 4096, "model.heads": 32, "model.layers": 32, "scaling.strategy": "fsdp", "train.slot_size": 1}
    )
    assert _plan().grace_s == 120
    assert larger.grace_s > 180


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_an_existing_default_place(kind: Kind) -> None:
    assert load_place(DEFAULT_PLACES[kind]).about


def test_all_bundled_places_load_and_have_a_description() -> None:
    for name in some(known_places()):
        assert load_place(name).about
        assert load_place(name).storage


def test_an_unknown_place_is_refused() -> None:
    with refused("place", "moon", names=["'moon'", "slurm"]):
        load_place("moon")


@pytest.mark.parametrize(
    ("written", "seconds"), [("30", 1800), ("10:30", 630), ("2:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200)]
)
def test_time_limits_are_parsed_in_the_forms_of_slurm(written: str, seconds: int) -> None:
    from raystride.pipelines.launch.deploy.plan import _parse_time_limit

    assert _parse_time_limit(written) == seconds


@given(st.text(min_size=1, max_size=80))
@settings(max_examples=50, deadline=None)
def test_a_run_name_becomes_a_valid_host_name(run: str) -> None:
    from raystride.pipelines.launch.deploy.plan import _host_name

    name = _host_name(run)
    assert 0 < len(name) <= 40
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name.strip("-") == name
