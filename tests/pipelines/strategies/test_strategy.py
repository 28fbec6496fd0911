"""Every strategy on 1 to 4 processes takes the course of a single worker, and reads the checkpoints of any other."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raystride.model.hugging_face import names_there
from raystride.model.lora import attach, start_adapters
from raystride.model.transformer import Decoder
from raystride.pipelines.config import Checkpoint, Config, Lora, Model, Optimizer, Scaling, Train
from raystride.pipelines.strategies import build_strategy
from raystride.pipelines.strategies.sharded_base import ShardedBase
from tests.distributed import run_distributed
from tests.pipelines.strategies.course import SLOTS, STEPS, Course, changed, course_job, documents, run_course
from tests.plain_training import PlainStep, assert_plain, train_plainly

TOLERANCE = 2e-6
"""Relative, of losses and norms over 30 steps in fp32. Sums of some 10^3 gradients in another order differ by up to 10^3
units of 2^-24 in the worst and some 30, 2e-6, in the usual case. Measured: 1.5e-7, of norms 2.7e-6."""
DDP, FSDP = Scaling(strategy="ddp"), Scaling(strategy="fsdp")
MORE = [(DDP, 3), (DDP, 4), (FSDP, 1), (FSDP, 2), (FSDP, 4)]
WAYS = [(DDP, 2), (FSDP, 3), (Scaling(strategy="fsdp", reshard=False), 2), (Scaling(strategy="fsdp", shard_workers=2), 4)]
WAYS += [pytest.param(*way, marks=pytest.mark.long) for way in MORE]  # type: ignore[misc]


@cache
def _single(folder: Path) -> Course:
    return run_course(course_job(folder, "single"), 1)


@cache
def _plain(folder: Path) -> list[PlainStep]:
    return train_plainly(course_job(folder, "single"), steps=5)


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
    run = "-".join(map(str, (scaling.strategy, world, scaling.reshard, scaling.shard_workers)))
    job = course_job(folder, run, scaling=scaling, train=train)
    course = run_course(job, world)
    assert_same_course(course, _single(folder))
    for each in (course, _single(folder)):
        assert_plain(each, _plain(folder))


SMALL = Model(layers=2, heads=2, width=8, context=4)


def _make(seed: int, lora: Lora) -> nn.Module:
    """A network whose values, those of adapters as well, are drawn from a seed."""
    torch.manual_seed(seed)
    model = Decoder(SMALL, 11)
    if lora.rank:
        attach(model, lora, names_there(model))
        start_adapters(model, lora, seed)
    return model


def _drawn_apart(rank: int, world: int, configs: list[Config]) -> list[dict[str, torch.Tensor]]:
    """Whole parameters after `prepare` of a worker that has drawn values of its own."""
    found = []
    for config in configs:
        strategy = build_strategy(config, device=torch.device("cpu"), rank=rank, world=world)
        assert isinstance(strategy, ShardedBase) is bool(config.lora.rank)
        model, _ = strategy.prepare(_make(rank, config.lora), lambda model: None)
        named = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.named_parameters()}
        found.append({name: each.detach().clone() for name, each in named.items()})
    return found


def test_all_workers_begin_with_the_values_of_the_first() -> None:
    """On one machine all draw the same, so that nothing else here would see it."""
    base = Config(model=replace(SMALL, init_from="base"), lora=Lora(rank=2), scaling=FSDP)
    configs = [Config(model=SMALL, scaling=DDP), Config(model=SMALL, scaling=FSDP), base]
    for found in run_distributed(_drawn_apart, 2, configs):
        for config, values in zip(configs, found, strict=True):
            drawn = dict(_make(0, config.lora).named_parameters())
            assert values.keys() == drawn.keys()
            assert all(torch.equal(value, drawn[name]) for name, value in values.items()), config.scaling.strategy


def test_the_other_flavour_in_shards(folder: Path) -> None:
    model = Model(flavour="llama", layers=2, heads=4, kv_heads=2, width=16, context=16)
    single = run_course(course_job(folder, "llama", model=model), 1)
    job = course_job(folder, "llama-fsdp", model=model, scaling=Scaling(strategy="fsdp"))
    assert_same_course(run_course(job, 2), single)


def test_packed_documents_are_the_same_for_any_number_of_workers(folder: Path) -> None:
    """In fp32 as any course; exact to the bit; and their attention is not that of windows."""
    data, courses = documents(folder), {}
    for exact, world in ((False, 1), (False, 2), (True, 1), (True, 2)):
        train = Train(steps=STEPS, slots=SLOTS, slot_size=2, log_every=1, packing="documents", exact=exact)
        courses[exact, world] = run_course(course_job(folder, f"packed-{exact}-{world}", data=data, train=train), world)
    assert_same_course(courses[False, 2], courses[False, 1])
    assert courses[True, 2].sha256 == courses[True, 1].sha256
    windows = run_course(course_job(folder, "windows", data=data), 1)
    assert windows.losses[0] != pytest.approx(courses[False, 1].losses[0], rel=1e-5)


NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")

LEGS, LEG = 4, 6
"""How often a strategy goes on from another's checkpoint, and for how many steps."""
Leg = tuple[int, Scaling, str]
"""Workers, strategy and precision."""
DDP, FSDP, SINGLE = (Scaling(strategy=name) for name in ("ddp", "fsdp", "single"))  # type: ignore[arg-type]
HYBRID = Scaling(strategy="fsdp", shard_workers=2)
ZERO = {stage: Scaling(strategy="deepspeed", zero=stage) for stage in (1, 2, 3)}


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


@NEEDS_DEEPSPEED
@pytest.mark.timeout(600)
def test_from_strategy_to_strategy(folder: Path, calm: Course) -> None:
    legs = [(2, DDP, "fp32"), (4, FSDP, "fp32"), (1, ZERO[2], "fp32"), (1, SINGLE, "fp32")]
    assert _relay(folder, "strategies", legs) == pytest.approx(calm.losses, rel=TOLERANCE)


@NEEDS_DEEPSPEED
@pytest.mark.timeout(600)
@pytest.mark.long
def test_from_a_hybrid_mesh_through_zero(folder: Path, calm: Course) -> None:
    """Parameters of four workers in two copies go to three, which cut each of them where no row ends."""
    legs = [(4, HYBRID, "fp32"), (3, ZERO[3], "fp32"), (2, ZERO[1], "fp32"), (2, FSDP, "fp32")]
    assert _relay(folder, "mesh", legs) == pytest.approx(calm.losses, rel=TOLERANCE)


@NEEDS_DEEPSPEED
@pytest.mark.timeout(600)
@pytest.mark.long
def test_from_precision_to_precision(folder: Path, calm: Course) -> None:
    """Master copies become parameters and the other way round, and lose nothing: the last leg is fp32 again."""
    legs = [(1, SINGLE, "fp32"), (2, ZERO[3], "pure_bf16"), (2, DDP, "pure_bf16"), (1, SINGLE, "fp32")]
    # Eight bits of a bfloat16 factor, as in tests/pipelines/train/test_precision.py.
    assert _relay(folder, "precisions", legs) == pytest.approx(calm.losses, rel=2**-7)
