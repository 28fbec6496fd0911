"""Every strategy on 1 to 4 processes takes the course of a single worker, and reads the checkpoints of any other."""

from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raystride.model.hugging_face import hf_names
from raystride.model.lora import attach_adapters, start_adapters
from raystride.model.transformer import Decoder
from raystride.pipelines.config import (
    CheckpointConfig,
    Config,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ScalingConfig,
    TrainConfig,
)
from raystride.pipelines.train.strategies import build_strategy
from raystride.pipelines.train.strategies.sharded_base import ShardedBase
from tests.distributed import run_distributed
from tests.pipelines.train.strategies.course import SLOTS, STEPS, Course, course_job, documents, next_attempt, run_course
from tests.plain_training import PlainStep, assert_plain, train_plainly

TOLERANCE = 2e-6
"""Relative, of losses and norms over 12 steps in fp32. Sums of some 10^3 gradients in another order differ by up to 10^3
units of 2^-24 in the worst and some 30, 2e-6, in the usual case. Measured: 1.5e-7, of norms 2.7e-6."""
DDP, FSDP = ScalingConfig(strategy="ddp"), ScalingConfig(strategy="fsdp")
MORE = [(DDP, 3), (DDP, 4), (FSDP, 1), (FSDP, 2), (FSDP, 4)]
WAYS = [
    (DDP, 2),
    (FSDP, 3),
    (ScalingConfig(strategy="fsdp", reshard=False), 2),
    (ScalingConfig(strategy="fsdp", shard_workers=2), 4),
]
WAYS += [pytest.param(*way, marks=pytest.mark.long) for way in MORE]  # type: ignore[misc]


@cache
def _single(folder: Path) -> Course:
    return run_course(course_job(folder, "single"), 1)


@cache
def _plain(folder: Path) -> list[PlainStep]:
    return train_plainly(course_job(folder, "single"), steps=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("parity")


def assert_same_course(found: Course, wanted: Course, tolerance: float = TOLERANCE) -> None:
    """Losses, norms and validations agree, step by step."""
    assert len(found.losses) == len(wanted.losses)
    assert found.losses == pytest.approx(wanted.losses, rel=tolerance)
    assert found.norms == pytest.approx(wanted.norms, rel=10 * tolerance)
    assert found.validations == pytest.approx(wanted.validations, rel=tolerance)


@pytest.mark.parametrize(("scaling", "world"), WAYS, ids=str)
def test_the_course_is_that_of_one_worker(folder: Path, scaling: ScalingConfig, world: int) -> None:
    train = TrainConfig(steps=STEPS, slots=SLOTS, slot_size=2, log_every=1, micro_batch_slots=1)
    run = "-".join(map(str, (scaling.strategy, world, scaling.reshard, scaling.shard_workers)))
    job = course_job(folder, run, scaling=scaling, train=train)
    course = run_course(job, world)
    assert_same_course(course, _single(folder))
    for each in (course, _single(folder)):
        assert_plain(each, _plain(folder))


SMALL = ModelConfig(layers=2, heads=2, hidden_size=8, context=4)


def _make(seed: int, lora: LoraConfig) -> nn.Module:
    """A network whose values, those of adapters as well, are drawn from a seed."""
    torch.manual_seed(seed)
    model = Decoder(SMALL, 11)
    if lora.rank:
        attach_adapters(model, lora, hf_names(model))
        start_adapters(model, lora, seed)
    return model


def _parameters_after_own_draws(rank: int, world: int, configs: list[Config]) -> list[dict[str, torch.Tensor]]:
    """Full parameters after `prepare_model` of a worker that has drawn values of its own."""
    found = []
    for config in configs:
        strategy = build_strategy(config, device=torch.device("cpu"), rank=rank, world=world)
        assert isinstance(strategy, ShardedBase) is bool(config.lora.rank)
        model, _ = strategy.prepare_model(_make(rank, config.lora), lambda model: None)
        named = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in model.named_parameters()}
        found.append({name: each.detach().clone() for name, each in named.items()})
    return found


def test_all_workers_begin_with_the_values_of_the_first() -> None:
    """On one machine all draw the same, so that nothing else here would see it."""
    base = Config(model=replace(SMALL, init_from="base"), lora=LoraConfig(rank=2), scaling=FSDP)
    configs = [Config(model=SMALL, scaling=DDP), Config(model=SMALL, scaling=FSDP), base]
    for found in run_distributed(_parameters_after_own_draws, 2, configs):
        for config, values in zip(configs, found, strict=True):
            drawn = dict(_make(0, config.lora).named_parameters())
            assert values.keys() == drawn.keys()
            assert all(torch.equal(value, drawn[name]) for name, value in values.items()), config.scaling.strategy


def test_the_other_flavour_in_shards(folder: Path) -> None:
    model = ModelConfig(architecture="llama", layers=2, heads=4, kv_heads=2, hidden_size=16, context=16)
    single = run_course(course_job(folder, "llama", model=model), 1)
    job = course_job(folder, "llama-fsdp", model=model, scaling=ScalingConfig(strategy="fsdp"))
    assert_same_course(run_course(job, 2), single)


def test_packed_documents_are_the_same_for_any_number_of_workers(folder: Path) -> None:
    """In fp32 as any course; exact to the bit; and their attention is not that of windows."""
    data, courses = documents(folder), {}
    for exact, world in ((False, 1), (False, 2), (True, 1), (True, 2)):
        train = TrainConfig(steps=STEPS, slots=SLOTS, slot_size=2, log_every=1, packing="documents", exact=exact)
        courses[exact, world] = run_course(course_job(folder, f"packed-{exact}-{world}", data=data, train=train), world)
    assert_same_course(courses[False, 2], courses[False, 1])
    assert courses[True, 2].sha256 == courses[True, 1].sha256
    windows = run_course(course_job(folder, "windows", data=data), 1)
    assert windows.losses[0] != pytest.approx(courses[False, 1].losses[0], rel=1e-5)


NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")

LEGS, LEG = 4, 3
"""How often a strategy goes on from another's checkpoint, and for how many steps."""
Leg = tuple[int, ScalingConfig, str]
"""Workers, strategy and precision."""
DDP, FSDP, SINGLE = (ScalingConfig(strategy=name) for name in ("ddp", "fsdp", "single"))  # type: ignore[arg-type]
HYBRID = ScalingConfig(strategy="fsdp", shard_workers=2)
ZERO = {stage: ScalingConfig(strategy="deepspeed", zero=stage) for stage in (1, 2, 3)}


def _train(steps: int, precision: str) -> TrainConfig:
    return TrainConfig(steps=steps, slots=SLOTS, slot_size=2, log_every=1, precision=precision)  # type: ignore[arg-type]


def _sections() -> dict[str, Any]:
    schedule = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=LEGS * LEG)
    return {"optimizer": schedule, "checkpoint": CheckpointConfig(every=LEG)}


@pytest.fixture(scope="module")
def calm(folder: Path) -> Course:
    """A single worker in fp32 that is undisturbed."""
    return run_course(course_job(folder, "calm", train=_train(LEGS * LEG, "fp32"), **_sections()), 1)


def _relay(folder: Path, run: str, legs: list[Leg]) -> list[float]:
    """Losses of a run of which every leg goes on from the checkpoint of the one before."""
    losses: list[float] = []
    job = course_job(folder, run, **_sections())
    for number, (world, scaling, precision) in enumerate(legs):
        job = next_attempt(job, f"a{number + 1}", scaling=scaling, train=_train((number + 1) * LEG, precision))
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
