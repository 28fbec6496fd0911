"""What a worker of a mesh is told to need: its own part of the parameters, and the micro-batches that it keeps."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import measure
from raystride.pipelines.config import Config, Model, Scaling, Train
from raystride.pipelines.memory.cut import network_parts
from raystride.pipelines.memory.estimate import estimate
from raystride.pipelines.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.pipelines.strategies.course import course_job

SHAPE = Model(layers=4, heads=4, width=128, context=32)
SPREAD = {
    "tensor": Scaling(tensor=2, workers=2),
    "context": Scaling(context=2, workers=2),
    "pipeline": Scaling(pipeline=2, workers=2),
    "interleaved": Scaling(pipeline=2, schedule="interleaved", workers=2),
    "zbv": Scaling(pipeline=2, schedule="zbv", workers=2),
}


def _measured(rank: int, world: int, job: Job) -> dict[str, float]:
    return measure(job, WorkerInfo(rank=rank, world=world))


def _told(scaling: Scaling, shape: Model = SHAPE, **train: Any) -> Any:
    config = Config(model=shape, scaling=scaling, train=Train(**{"steps": 2, "slots": 4, "slot_size": 4} | train))
    return estimate(config, {"vocabulary_size": 257}, workers=scaling.group, device="cpu")


@pytest.mark.parametrize("name", SPREAD)
def test_it_is_what_the_worker_holds_that_has_most(tmp_path: Path, name: str) -> None:
    train = Train(steps=2, slots=4, slot_size=4)
    job = course_job(tmp_path, "meshed", model=SHAPE, scaling=SPREAD[name], train=train)
    held = max(run_distributed(_measured, 2, job), key=lambda each: each["tensors"])
    told = _told(SPREAD[name])
    assert {part: getattr(told, part) / each for part, each in held.items()} == pytest.approx(
        dict.fromkeys(held, 1.0), abs=0.15
    )


def test_less_is_needed_the_more_share_it() -> None:
    whole = _told(Scaling())
    for scaling in (Scaling(tensor=2), Scaling(tensor=4, workers=4), Scaling(context=2), Scaling(pipeline=2)):
        assert _told(scaling).tensors < whole.tensors
    assert _told(Scaling(tensor=4)).tensors < _told(Scaling(tensor=2)).tensors
    assert _told(Scaling(context=2)).parameters == whole.parameters


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_the_workers_of_a_pipeline_have_all_between_them(schedule: Any, stages: int) -> None:
    shape = Model(layers=9, heads=4, width=64, context=32, tied=False)
    config = Config(model=shape, scaling=Scaling(pipeline=4, schedule=schedule), train=Train(slots=8))
    parts = list(network_parts(config, 257, slots=8))
    assert [len(part.stages) for part in parts] == [stages] * 4
    assert sum(sum(part.stages) for part in parts) == 9
    assert [sum(each) for each in zip(*((part.first, part.last) for part in parts), strict=True)] == [1, 1]
