"""Every strategy on 1, 2, 3 and 4 processes takes the course of a single worker."""

from functools import cache
from pathlib import Path

import pytest

from raystride.pipelines.config import Model, Scaling, Train
from tests.pipelines.strategies.course import SLOTS, STEPS, Course, course_job, run_course

TOLERANCE = 2e-6
"""Relative, of losses and norms over 30 steps in fp32. Sums of some 10^3 gradients in another order differ by up to 10^3
units of 2^-24 in the worst and some 30, 2e-6, in the usual case. Measured: 1.5e-7, of norms 2.7e-6."""
DDP, FSDP = Scaling(strategy="ddp"), Scaling(strategy="fsdp")
WAYS = [(DDP, 2), (DDP, 3), (DDP, 4), (FSDP, 1), (FSDP, 2), (FSDP, 3), (FSDP, 4)]
WAYS += [(Scaling(strategy="fsdp", reshard=False), 2), (Scaling(strategy="fsdp", shard_workers=2), 4)]


@cache
def _single(folder: Path) -> Course:
    return run_course(course_job(folder, "single"), 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the data is prepared once."""
    return tmp_path_factory.mktemp("parity")


def assert_same_course(found: Course, wanted: Course, tolerance: float = TOLERANCE) -> None:
    """Losses, norms and validations agree, step by step."""
    assert len(found.losses) == len(wanted.losses)
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert found.validations == pytest.approx(wanted.validations, rel=tolerance)


@pytest.mark.parametrize(("scaling", "world"), WAYS, ids=str)
def test_the_course_is_that_of_one_worker(folder: Path, scaling: Scaling, world: int) -> None:
    train = Train(steps=STEPS, slots=SLOTS, slot_size=2, log_every=1, micro_batch_slots=1)
    job = course_job(folder, f"run-{WAYS.index((scaling, world))}", scaling=scaling, train=train)
    assert_same_course(run_course(job, world), _single(folder))


def test_the_other_flavour_in_shards(folder: Path) -> None:
    model = Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=16, context=16)
    single = run_course(course_job(folder, "llama", model=model), 1)
    job = course_job(folder, "llama-fsdp", model=model, scaling=Scaling(strategy="fsdp"))
    assert_same_course(run_course(job, 2), single)
