"""What a worker of a mesh is told to need: its own part of the parameters, and the micro-batches that it keeps."""

from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, Model, Scaling, Train
from raystride.pipelines.memory.cut import blocks_held, micro_batches_held
from raystride.pipelines.memory.estimate import estimate
from raystride.pipelines.worker.job import Job, WorkerInfo
from raystride.pipelines.worker.worker import build_training
from tests.distributed import run_distributed
from tests.pipelines.strategies.course import course_job

SHAPE = Model(layers=4, heads=4, width=64, context=32, tied=False)


def _bytes(rank: int, world: int, job: Job) -> int:
    training = build_training(job, WorkerInfo(rank=rank, world=world), [], lambda: False, lambda _: None)
    return sum(each.numel() * each.element_size() for each in training.model.parameters())


def _told(scaling: Scaling, **train: Any) -> Any:
    config = Config(model=SHAPE, scaling=scaling, train=Train(steps=1, slots=8, **train))
    return estimate(config, {"vocabulary_size": 257}, workers=scaling.group, device="cpu")


@pytest.mark.parametrize("scaling", [Scaling(tensor=2, workers=2), Scaling(pipeline=2, workers=2)], ids=str)
def test_parameters_are_those_of_the_worker_that_has_most(tmp_path: Path, scaling: Scaling) -> None:
    job = course_job(tmp_path, "meshed", model=SHAPE, scaling=scaling, train=Train(steps=1, slots=8, slot_size=1))
    held = max(run_distributed(_bytes, 2, job))
    told = _told(scaling).parameters
    # With stages the head and the embedding, which lie on two workers, are counted for one; the vocabulary is small here.
    assert held <= told * 1.01
    assert told <= held * (1.02 if scaling.tensor > 1 else 1.2)


def test_less_is_needed_the_more_share_it() -> None:
    whole = _told(Scaling())
    for scaling in (Scaling(tensor=2), Scaling(tensor=4), Scaling(context=2), Scaling(pipeline=2, workers=2)):
        assert _told(scaling).tensors < whole.tensors
    assert _told(Scaling(tensor=4)).tensors < _told(Scaling(tensor=2)).tensors
    assert _told(Scaling(context=2)).parameters == pytest.approx(whole.parameters, rel=0.02)


def test_a_pipeline_keeps_micro_batches() -> None:
    assert micro_batches_held(Scaling(pipeline=4), 8) == 4
    assert micro_batches_held(Scaling(pipeline=4), 2) == 2
    assert micro_batches_held(Scaling(pipeline=4, schedule="interleaved"), 8) == 6
    assert micro_batches_held(Scaling(), 8) == 1
    assert blocks_held(12, Scaling(pipeline=4)) == 3
    assert blocks_held(12, Scaling(pipeline=4, schedule="zbv")) == 4
