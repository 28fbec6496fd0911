"""How many workers a machine without GPUs gets: as given, as before, the prior for little work, else what was measured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, LaunchConfig, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.launch.cluster.resources import Allocation, Resources
from raystride.pipelines.launch.preflight.choose_workers import choose_workers, describe_layout_speed, worker_layouts
from raystride.pipelines.system.node_folder import CACHE_VARIABLE
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.worker import rehearsal
from raystride.pipelines.train.worker.job import Job
from raystride.pipelines.train.worker.rehearsal import Speed

CONFIG = Config(
    data=DataConfig(source="text"),
    model=ModelConfig(layers=4, hidden_size=128, context=128),
    train=TrainConfig(slots=4, slot_size=8),
)
ASKED = Allocation(4, "cpu", 1)
FOUND = {
    (1, 4): Speed(950.0, 1000.0, 1100.0),
    (2, 2): Speed(1400.0, 1500.0, 1600.0),
    (4, 1): Speed(1450.0, 1520.0, 1600.0),
}
LONG = 10**5


def _there(cpus: float = 4, **changes: Any) -> Resources:
    return Resources(**{"cpus": cpus, "gpus": 0, "memory_bytes": 2**34, "gpu_memory_bytes": None} | changes)


def _job(tmp_path: Path, config: Config = CONFIG) -> Job:
    folder = Folder(str(tmp_path / "run"))
    return Job(config=config, run="run", attempt="a1", folder=folder, prepared=folder, device="cpu", threads=1)


@pytest.fixture
def rehearsals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Rehearsals that were asked for; each finds `FOUND`."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    asked: list[Any] = []

    def rehearse(job: Job, places: list[tuple[int, int]]) -> dict[tuple[int, int], Speed]:
        asked.append(places)
        return FOUND

    monkeypatch.setattr(rehearsal, "rehearse", rehearse)
    return asked


def test_the_fastest_is_taken_but_no_more_workers_than_help(tmp_path: Path, rehearsals: list[Any]) -> None:
    log: list[str] = []
    # Four are faster by less than what tells them from two.
    assert choose_workers(_job(tmp_path), _there(), ASKED, LONG, log.append) == Allocation(2, "cpu", 2)
    assert log[-1] == "; ".join(describe_layout_speed(*each) for each in FOUND.items())
    assert rehearsals == [[(1, 4), (2, 2), (4, 1)]]
    assert choose_workers(_job(tmp_path), _there(), ASKED, LONG, log.append) == Allocation(2, "cpu", 2)
    assert len(rehearsals) == 1, "this machine knows"
    other = replace(CONFIG, train=replace(CONFIG.train, precision="bf16"))
    choose_workers(_job(tmp_path, other), _there(), ASKED, LONG, log.append)
    assert len(rehearsals) == 2


def test_steps_that_differ_by_more_than_what_is_gained_leave_the_first(
    tmp_path: Path, rehearsals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = {
        (1, 4): Speed(500.0, 1000.0, 1450.0),
        (2, 2): Speed(1400.0, 1500.0, 1600.0),
        (4, 1): Speed(900.0, 1520.0, 1600.0),
    }
    monkeypatch.setattr(rehearsal, "rehearse", lambda *_: busy)
    assert choose_workers(_job(tmp_path), _there(), ASKED, LONG, lambda _: None) == Allocation(1, "cpu", 4)


def test_a_run_that_repeats_another_has_its_workers_where_there_is_room(tmp_path: Path, rehearsals: list[Any]) -> None:
    job, said = _job(tmp_path, replace(CONFIG, repeat="other")), list[str]()
    made = {"step": 4, "world": 3, "threads": 1, "device": "cpu"}
    (Folder(str(tmp_path / "other")) / "checkpoints" / "step-00000004").put_json("MANIFEST.json", made)
    assert choose_workers(job, _there(), ASKED, LONG, said.append) == Allocation(3, "cpu", 1)
    assert not said
    choose_workers(job, _there(2), replace(ASKED, workers=2), LONG, said.append)
    assert said[0] == "repeat: run other had 3 worker(s) of 1 thread(s), for which there is no room here"


def test_little_work_is_not_tried(tmp_path: Path, rehearsals: list[Any]) -> None:
    assert choose_workers(_job(tmp_path), _there(), ASKED, 10, print) == Allocation(1, "cpu", 4)
    assert not rehearsals


@pytest.mark.parametrize(
    ("changes", "there", "share"),
    [
        ({"scaling": ScalingConfig(workers=4)}, _there(), ASKED),
        ({"scaling": ScalingConfig(strategy="fsdp")}, _there(), ASKED),
        ({"scaling": ScalingConfig(strategy="ddp")}, _there(), ASKED),
        ({"scaling": ScalingConfig(threads=8)}, _there(), ASKED),
        ({"launch": LaunchConfig(mode="inline")}, _there(), ASKED),
        ({"train": replace(CONFIG.train, exact=True)}, _there(), ASKED),
        ({}, _there(nodes=2, node_cpus=(2, 2)), ASKED),
        ({}, _there(gpus=4), Allocation(4, "cuda", 1)),
    ],
    ids=["given", "sharded", "several", "no places", "inline", "exact", "nodes", "gpus"],
)
def test_what_is_not_open_stays(
    tmp_path: Path, rehearsals: list[Any], changes: dict[str, Any], there: Resources, share: Allocation
) -> None:
    assert choose_workers(_job(tmp_path, replace(CONFIG, **changes)), there, share, LONG, print) == share
    assert not rehearsals


def test_a_run_goes_on_with_what_it_had_where_that_finds_places(tmp_path: Path, rehearsals: list[Any]) -> None:
    job = _job(tmp_path)
    made = {"step": 4, "world": 3, "threads": 1, "device": "cpu"}
    (job.folder / "checkpoints" / "step-00000004").put_json("MANIFEST.json", made)
    assert choose_workers(job, _there(), ASKED, LONG, print) == Allocation(3, "cpu", 1)
    assert not rehearsals
    assert choose_workers(job, _there(2), replace(ASKED, workers=2), LONG, print).workers in (1, 2)
    assert rehearsals


def test_places_share_out_the_cores_and_never_exceed_the_slots() -> None:
    assert list(worker_layouts(CONFIG.train, CONFIG.scaling, _there(6))) == [(1, 6), (2, 3), (4, 1)]
    assert list(worker_layouts(replace(CONFIG.train, slots=2), CONFIG.scaling, _there(6))) == [(1, 6), (2, 3)]
    assert list(worker_layouts(CONFIG.train, ScalingConfig(threads=2), _there(6))) == [(1, 2), (2, 2)]
    assert describe_layout_speed((1, 2), Speed(0, 11900.4, 0)) == "1 worker of 2 threads: 11,900 tokens/s"
    assert describe_layout_speed((2, 1), Speed(0, 9000, 0)) == "2 workers of 1 thread: 9,000 tokens/s"
