"""The estimate for a worker of a mesh: its own part of the parameters, and the micro-batches in flight."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.memory import measure
from raystride.pipelines.config import Config, ModelConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.memory.cut import network_parts
from raystride.pipelines.train.memory.estimate import estimate
from raystride.pipelines.train.worker.job import Job, WorkerInfo
from tests.distributed import run_distributed
from tests.pipelines.train.strategies.course import course_job

SHAPE = ModelConfig(layers=4, heads=4, hidden_size=128, context=32)
SPREAD = {
    "tensor": ScalingConfig(tensor=2, workers=2),
    "context": ScalingConfig(context=2, workers=2),
    "pipeline": ScalingConfig(pipeline=2, workers=2),
    "interleaved": ScalingConfig(pipeline=2, schedule="interleaved", workers=2),
    "zbv": ScalingConfig(pipeline=2, schedule="zbv", workers=2),
}


def _measure(rank: int, world: int, job: Job) -> dict[str, float]:
    return measure(job, WorkerInfo(rank=rank, world=world))


def _estimate_memory(scaling: ScalingConfig, shape: ModelConfig = SHAPE, **train: Any) -> Any:
    config = Config(model=shape, scaling=scaling, train=TrainConfig(**{"steps": 2, "slots": 4, "slot_size": 4} | train))
    return estimate(config, {"vocabulary_size": 257}, workers=scaling.group, device="cpu")


@pytest.mark.parametrize("name", SPREAD)
def test_estimate_is_that_of_the_largest_worker(tmp_path: Path, name: str) -> None:
    train = TrainConfig(steps=2, slots=4, slot_size=4)
    job = course_job(tmp_path, "meshed", model=SHAPE, scaling=SPREAD[name], train=train)
    held = max(run_distributed(_measure, 2, job), key=lambda worker_bytes: worker_bytes["tensors"])
    need = _estimate_memory(SPREAD[name])
    assert {part: getattr(need, part) / measured for part, measured in held.items()} == pytest.approx(
        dict.fromkeys(held, 1.0), abs=0.15
    )


def test_more_workers_need_less_each() -> None:
    whole = _estimate_memory(ScalingConfig())
    for scaling in (
        ScalingConfig(tensor=2),
        ScalingConfig(tensor=4, workers=4),
        ScalingConfig(context=2),
        ScalingConfig(pipeline=2),
    ):
        assert _estimate_memory(scaling).tensors < whole.tensors
    assert _estimate_memory(ScalingConfig(tensor=4)).tensors < _estimate_memory(ScalingConfig(tensor=2)).tensors
    assert _estimate_memory(ScalingConfig(context=2)).parameters == whole.parameters


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2)])
def test_pipeline_workers_cover_the_network(schedule: Any, stages: int) -> None:
    shape = ModelConfig(layers=9, heads=4, hidden_size=64, context=32, tie_embeddings=False)
    config = Config(model=shape, scaling=ScalingConfig(pipeline=4, schedule=schedule), train=TrainConfig(slots=8))
    parts = list(network_parts(config.scaling, config.model, 257, slots=8))
    assert [len(part.stages) for part in parts] == [stages] * 4
    assert sum(sum(part.stages) for part in parts) == 9
    assert [sum(flags) for flags in zip(*((part.first, part.last) for part in parts), strict=True)] == [1, 1]
