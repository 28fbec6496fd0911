"""A checkpoint of any strategy, number of workers and precision is one of any other: the run goes on where it was."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Checkpoint, Optimizer, Scaling, Train
from tests.pipelines.strategies.course import SLOTS, Course, changed, course_job, run_course
from tests.pipelines.strategies.test_parity import TOLERANCE

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]

LEGS, LEG = 4, 6
"""How often a strategy goes on from another's checkpoint, and for how many steps."""
Leg = tuple[int, Scaling, str]
"""Workers, strategy and precision."""
DDP, FSDP, SINGLE = (Scaling(strategy=name) for name in ("ddp", "fsdp", "single"))  # type: ignore[arg-type]
HYBRID = Scaling(strategy="fsdp", shard_workers=2)
ZERO = {stage: Scaling(strategy="deepspeed", zero=stage) for stage in (1, 2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data is prepared once."""
    return tmp_path_factory.mktemp("across")


def _train(steps: int, precision: str) -> Train:
    return Train(steps=steps, slots=SLOTS, slot_size=2, log_every=1, precision=precision)  # type: ignore[arg-type]


def _sections() -> dict[str, Any]:
    schedule = Optimizer(learning_rate=1e-2, warmup_steps=2, decay_steps=LEGS * LEG)
    return {"optimizer": schedule, "checkpoint": Checkpoint(every=LEG)}


@pytest.fixture(scope="module")
def calm(folder: Path) -> Course:
    """A single worker in fp32 that is undisturbed."""
    return run_course(course_job(folder, "calm", train=_train(LEGS * LEG, "fp32"), **_sections()), 1)


def _relay(folder: Path, run: str, legs: list[Leg]) -> list[float]:
    """Losses of a run of which every leg goes on from the checkpoint of the one before."""
    losses: list[float] = []
    job = course_job(folder, run, **_sections())
    for number, (world, scaling, precision) in enumerate(legs):
        job = changed(job, f"a{number + 1}", scaling=scaling, train=_train((number + 1) * LEG, precision))
        course = run_course(job, world)
        assert course.said == ([f"resumed from step {number * LEG}"] if number else [])
        losses += course.losses
    return losses


def test_from_strategy_to_strategy(folder: Path, calm: Course) -> None:
    legs = [(2, DDP, "fp32"), (4, FSDP, "fp32"), (1, ZERO[2], "fp32"), (1, SINGLE, "fp32")]
    assert _relay(folder, "strategies", legs) == pytest.approx(calm.losses, rel=TOLERANCE)


def test_from_a_hybrid_mesh_through_zero(folder: Path, calm: Course) -> None:
    """Parameters of four workers in two copies go to three, which cut each of them where no row ends."""
    legs = [(4, HYBRID, "fp32"), (3, ZERO[3], "fp32"), (2, ZERO[1], "fp32"), (2, FSDP, "fp32")]
    assert _relay(folder, "mesh", legs) == pytest.approx(calm.losses, rel=TOLERANCE)


def test_from_precision_to_precision(folder: Path, calm: Course) -> None:
    """Master copies become parameters and the other way round, and lose nothing: the last leg is fp32 again."""
    legs = [(1, SINGLE, "fp32"), (2, ZERO[3], "pure_bf16"), (2, DDP, "pure_bf16"), (1, SINGLE, "fp32")]
    # Eight bits of a bfloat16 factor, as in tests/pipelines/train/test_precision.py.
    assert _relay(folder, "precisions", legs) == pytest.approx(calm.losses, rel=2**-7)
