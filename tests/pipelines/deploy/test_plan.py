"""What a run takes of a place, and what no place can give."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.pipelines.cluster.cluster import CannotRun
from raystride.pipelines.config import Config
from raystride.pipelines.config.deploy import CloudPlace, Deploy, Place, SlurmPlace
from raystride.pipelines.config.parse import Parsed, configured, presets
from raystride.pipelines.deploy.plan import FIRST_PLACE, KINDS, Kind, find_place, known_places, plan
from tests.errors import cannot_run, refused
from tests.some import some

PLACE = Place(
    nodes=4, gpus_per_node=8, cpus_per_node=64, memory_gib=2000, gpu_memory_gib=80, storage="/shared/runs", shared=True
)


def _parsed(preset: str = "lm_124m", **changes: Any) -> Parsed[Config]:
    return configured(Config, preset, changes)


def _planned(place: Place = PLACE, kind: Kind = "slurm", nodes: int = 4, gpus: int = 8, **changes: Any) -> Any:
    return plan(kind, Deploy(nodes=nodes, gpus_per_node=gpus), place, _parsed(**changes))


def test_every_gpu_has_a_worker_and_the_settings_say_so() -> None:
    found = _planned()
    assert (found.workers, found.cpus_per_node, found.whole_nodes) == (32, 64, True)
    assert yaml.safe_load(found.settings)["scaling"] == {"workers": 32, "device": "cuda"}
    assert yaml.safe_load(found.settings)["storage"] == "/shared/runs"


def test_some_of_a_nodes_gpus_take_their_share_of_the_rest() -> None:
    found = _planned(nodes=1, gpus=2)
    assert (found.cpus_per_node, found.memory_gib, found.whole_nodes) == (16, 500, False)


@pytest.mark.parametrize("preset", presets())
@pytest.mark.parametrize("gpus", [0, pytest.param(8, marks=pytest.mark.long)])
def test_what_is_written_are_the_settings_of_the_same_run(preset: str, gpus: int) -> None:
    """Read again, they give the run the name, and the fixed settings, that it would have had here."""
    if preset == "sweep_scaling":
        pytest.skip("a sweep")
    request = Deploy(nodes=1, gpus_per_node=gpus)
    parsed = _parsed(preset, **({"train.slots": 32} if gpus else {}))
    found = plan("slurm", request, PLACE, parsed)
    again = configured(Config, yaml.safe_load(found.settings)).settings
    assert again.run == parsed.settings.default_run(preset)
    assert again.fixed() == parsed.settings.fixed()


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
        ({"slurm": SlurmPlace(time_limit="9")}, {}, "time limit", ("9 is", "120 s")),
        ({}, {"kind": "sky"}, "storage", ("SkyPilot",)),
        ({}, {"kind": "kuberay"}, "storage", ("kubernetes.storage_class",)),
        ({}, {"kind": "compose", "data.source": __file__}, "data", (f"data.source {__file__!r}",)),
        ({"cloud": CloudPlace(hosts=("a", "b"))}, {"kind": "launcher"}, "hosts", ("4 nodes", "2 in cloud.hosts")),
        ({"cloud": CloudPlace(provider="aws")}, {"kind": "launcher"}, "machines", ("cloud.region ''",)),
    ],
)
def test_what_a_place_has_too_little_of_is_named(
    place: dict[str, Any], options: dict[str, Any], problem: str, names: tuple[str, ...]
) -> None:
    with cannot_run(problem, *names):
        _planned(replace(PLACE, **place), **options)


def test_the_sentence_says_what_is_asked_what_there_is_and_what_to_do() -> None:
    with pytest.raises(CannotRun, match=r"^this place cannot run it:\nnodes: 5 asked, 4 there\n  lower --nodes to 4$"):
        _planned(PLACE, nodes=5, **{"train.slots": 40})


def test_files_of_this_machine_are_named_whole_and_refused_where_the_job_does_not_see_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    (tmp_path / "text.txt").touch()
    changes = {"data.source": "text.txt", "plugins": ["mine.py"], "run": "r"}
    found = yaml.safe_load(_planned(**changes).settings)
    assert (found["data"]["source"], found["plugins"]) == (str(tmp_path / "text.txt"), [str(tmp_path / "mine.py")])
    with cannot_run("data", f"data.source '{tmp_path}/text.txt'", f"plugins[0] '{tmp_path}/mine.py'"):
        _planned(kind="compose", **changes)


def test_a_loss_of_nodes_is_borne_where_the_run_bears_it() -> None:
    assert _planned().least_nodes == 4
    assert _planned(**{"scaling.workers": 32, "scaling.least_workers": 9}).least_nodes == 2


def test_saving_takes_time_by_the_size_of_the_model() -> None:
    larger = _planned(
        **{"model.width": 4096, "model.heads": 32, "model.layers": 32, "scaling.strategy": "fsdp", "train.slot_size": 1}
    )
    assert _planned().grace_s == 120
    assert larger.grace_s > 180


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_begins_with_a_place_that_is_there(kind: Kind) -> None:
    assert find_place(FIRST_PLACE[kind]).about


def test_all_places_are_read_and_say_which_they_are() -> None:
    for name in some(known_places()):
        assert find_place(name).about
        assert find_place(name).storage


def test_a_place_that_is_not_there_is_refused() -> None:
    with refused("place", "moon", names=["'moon'", "slurm"]):
        find_place("moon")


@pytest.mark.parametrize(
    ("written", "seconds"), [("30", 1800), ("10:30", 630), ("2:00:00", 7200), ("1-12", 129600), ("1-0:30", 88200)]
)
def test_times_are_read_as_slurm_writes_them(written: str, seconds: int) -> None:
    from raystride.pipelines.deploy.plan import _seconds

    assert _seconds(written) == seconds


@given(st.text(min_size=1, max_size=80))
@settings(max_examples=50, deadline=None)
def test_a_name_is_one_that_hosts_take(run: str) -> None:
    from raystride.pipelines.deploy.plan import _host_name

    name = _host_name(run)
    assert 0 < len(name) <= 40
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name.strip("-") == name
