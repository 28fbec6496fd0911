"""DeepSpeed's ZeRO, every stage, takes the course of a single worker, and comes back from our own checkpoints."""

import math
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import (
    CheckpointConfig,
    GuardConfig,
    ModelConfig,
    OptimizerConfig,
    SampleConfig,
    ScalingConfig,
    TrainConfig,
)
from tests.pipelines.train.strategies.course import SLOTS, STEPS, Course, course_job, next_attempt, run_course
from tests.pipelines.train.strategies.test_strategy import assert_same_course
from tests.pipelines.train.test_guard import BAD, plant_nan
from tests.plain_training import PlainStep, assert_plain, train_plainly
from tests.processes import run_workers

# Each process takes seconds to import DeepSpeed.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]

TRAIN = TrainConfig(steps=STEPS, slots=SLOTS, slot_size=2, log_every=1, micro_batch_slots=1)
SHORT = replace(TRAIN, steps=8)
CUT = 5
"""Step at which a run is cut in two."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("deepspeed")


@pytest.fixture(scope="module")
def single(folder: Path) -> Course:
    """The course of one worker in fp32."""
    return run_course(course_job(folder, "single", train=TRAIN), 1)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[PlainStep]:
    """The same in plain PyTorch."""
    return train_plainly(course_job(folder, "single", train=TRAIN), steps=5)


def _zero(stage: int) -> ScalingConfig:
    return ScalingConfig(strategy="deepspeed", zero=stage)


def _course(folder: Path, run: str, stage: int, world: int, prepare: Any = None, **sections: Any) -> Course:
    return run_course(course_job(folder, run, scaling=_zero(stage), **{"train": TRAIN} | sections), world, prepare)


MORE = [pytest.param(*way, marks=pytest.mark.long) for way in ((2, 1), (3, 3), (1, 4))]


@pytest.mark.parametrize(("stage", "world"), [(1, 2), (2, 2), (3, 2), *MORE])
def test_the_course_is_that_of_one_worker(
    folder: Path, single: Course, plain: list[PlainStep], stage: int, world: int
) -> None:
    course = _course(folder, f"zero-{stage}-{world}", stage, world)
    assert_same_course(course, single)
    assert_plain(course, plain)


@pytest.mark.parametrize(("precision", "stage"), [("bf16", 2), ("pure_bf16", 3)])
@pytest.mark.long
def test_precisions(folder: Path, precision: str, stage: int) -> None:
    train = replace(SHORT, precision=precision)  # type: ignore[arg-type]
    single = run_course(course_job(folder, f"single-{precision}-{stage}", train=train), 1)
    found = _course(folder, f"{precision}-{stage}", stage, 2, train=train)
    # Eight bits of a bfloat16 factor, as in tests/pipelines/train/test_precision.py.
    assert found.losses == pytest.approx(single.losses, rel=2**-9)


@pytest.mark.long
def test_what_is_recomputed_and_gathered_again_changes_nothing(folder: Path) -> None:
    """Llama's flavour, whose embedding is not tied, with plain momentum, and blocks that are computed twice."""
    model = ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=16, context=16)
    sections = {"model": model, "optimizer": OptimizerConfig(kind="sgd", momentum=0.9, learning_rate=0.1, warmup_steps=2)}
    single = run_course(course_job(folder, "llama", train=SHORT, **sections), 1)
    train = replace(SHORT, activation_checkpointing="selective")
    assert_same_course(_course(folder, "llama-3", 3, 2, train=train, **sections), single)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_resumed_run_has_the_bits_of_one_that_was_left_undisturbed(folder: Path, stage: int) -> None:
    schedule = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=SHORT.steps)
    calm = _course(folder, f"calm-{stage}", stage, 2, train=SHORT, optimizer=schedule)
    sections = {"optimizer": schedule, "scaling": _zero(stage), "checkpoint": CheckpointConfig(every=CUT)}
    job = course_job(folder, f"cut-{stage}", train=replace(SHORT, steps=CUT), **sections)
    run_course(job, 2)
    resumed = run_course(next_attempt(job, train=SHORT), 2)
    assert resumed.said == [f"resumed from step {CUT}"]
    assert resumed.losses == calm.losses[CUT:]
    assert resumed.sha256 == calm.sha256


def test_a_bad_step_is_skipped(folder: Path) -> None:
    train = replace(TRAIN, steps=BAD[0] + 3)
    course = _course(folder, "skip", 3, 2, plant_nan, train=train, guard=GuardConfig(policy="skip"))
    assert [number for number, loss in enumerate(course.losses) if math.isnan(loss)] == [BAD[0]]
    assert course.logged[-1]["dropped_steps"] == 1


@pytest.mark.long
def test_the_sample_is_that_of_one_worker(folder: Path) -> None:
    """A whole job, with parameters in partitions: the workers generate together."""
    texts = []
    for scaling, world in ((ScalingConfig(strategy="single"), 1), (_zero(3), 2)):
        sample = SampleConfig(prompt="line ", tokens=12, temperature=0.0)
        job = course_job(folder, f"sample-{scaling.strategy}", train=SHORT, scaling=scaling, sample=sample)
        summary = run_workers(job, world)
        assert summary["steps"] == SHORT.steps
        texts.append(job.folder.read("sample.txt").decode())
    assert texts[0] == texts[1]
