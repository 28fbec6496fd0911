"""Each precision learns, agrees between strategies, and comes back; loss scale and stochastic rounding do their work."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.linear import has_bf16
from raystride.model.transformer import Decoder
from raystride.pipelines.config import CheckpointConfig, ModelConfig, OptimizerConfig, ScalingConfig, TrainConfig
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.precision import LossScale, Precision
from raystride.triton_kernels.adamw import round_stochastically
from tests.pipelines.train.strategies.course import Course, course_job, next_attempt, run_course
from tests.some import some

TRAIN = TrainConfig(steps=12, slots=4, slot_size=2, log_every=1)
PRECISIONS = ["bf16", "fp16", "pure_bf16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder with data that is prepared once."""
    return tmp_path_factory.mktemp("precision")


def _course(folder: Path, run: str, world: int = 1, strategy: str = "auto", **train: object) -> Course:
    scaling = ScalingConfig(strategy=strategy)  # type: ignore[arg-type]
    return run_course(course_job(folder, run, train=replace(TRAIN, **train), scaling=scaling), world)  # type: ignore[arg-type]


@cache
def _fp32(folder: Path) -> Course:
    return _course(folder, "fp32")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_it_learns_and_is_the_same_on_two_workers_and_in_shards(folder: Path, precision: str) -> None:
    single = _course(folder, f"{precision}-1", precision=precision)
    fp32 = _fp32(folder)
    assert (single.losses != fp32.losses) is (precision != "bf16" or has_bf16())
    fell_short = [text for text in single.said if text.startswith("train.precision")]
    assert len(fell_short) == (single.losses == fp32.losses)
    # Eight bits of a bfloat16 factor: 2^-9 a product; the losses are means over thousands of them.
    assert single.losses == pytest.approx(fp32.losses, rel=2**-7)
    for strategy in ("ddp", "fsdp"):
        found = _course(folder, f"{precision}-{strategy}", 2, strategy, precision=precision)
        assert found.losses == pytest.approx(single.losses, rel=2**-9)


@pytest.mark.parametrize("train", [{"precision": "fp16"}, {"precision": "pure_bf16"}, {"stochastic_rounding": True}])
def test_a_resumed_run_has_the_bits_of_one_that_was_left_undisturbed(folder: Path, train: dict[str, object]) -> None:
    settings = replace(TRAIN, **{"precision": "pure_bf16"} | train)  # type: ignore[arg-type]
    name = "-".join(map(str, train.values()))
    schedule = OptimizerConfig(learning_rate=1e-2, warmup_steps=2, decay_steps=12)
    calm = run_course(course_job(folder, f"calm-{name}", train=settings, optimizer=schedule), 1)
    short = replace(settings, steps=7)
    job = course_job(folder, f"cut-{name}", train=short, optimizer=schedule, checkpoint=CheckpointConfig(every=7))
    run_course(job, 1)
    resumed = run_course(next_attempt(job, train=settings, checkpoint=CheckpointConfig(every=7)), 1)
    assert resumed.said == ["resumed from step 7"]
    assert resumed.losses[-5:] == calm.losses[-5:]
    assert resumed.sha256 == calm.sha256


@pytest.mark.parametrize("train", [pytest.param({}, marks=pytest.mark.long), {"stochastic_rounding": True}])
def test_pure_bf16_is_exact_on_any_number_of_workers(folder: Path, train: dict[str, object]) -> None:
    hashes = {
        _course(folder, f"exact-{world}-{len(train)}", world, exact=True, precision="pure_bf16", **train).sha256
        for world in (1, 2, 3)
    }
    assert len(hashes) == 1


def _overflow(training: Training) -> None:
    training.rules.scale.value.fill_(2.0**40)  # type: ignore[union-attr]


def test_an_overflow_lowers_the_scale_and_changes_nothing(folder: Path) -> None:
    job = course_job(folder, "overflow", train=replace(TRAIN, precision="fp16", steps=40))
    course = run_course(job, 1, _overflow)
    scales = [measured["loss_scale"] for measured in course.logged]
    assert scales[0] == 2.0**39
    assert min(scales) == scales[-1] < 2.0**30
    lost = [number for number, loss in enumerate(course.losses) if math.isnan(loss)]
    assert lost[:10] == list(range(10))
    assert len(lost) == sum(before > after for before, after in zip([2.0**40, *scales], scales, strict=False))
    assert course.losses[-1] < next(loss for loss in course.losses if not math.isnan(loss))


def test_the_scale_rises_after_good_steps() -> None:
    scale = LossScale(torch.device("cpu"), 8.0, num_good_steps=1998)
    scale.update(torch.tensor(0.0))
    assert scale.read_state() == (8.0, 1999)
    scale.update(torch.tensor(0.0))
    assert scale.read_state() == (16.0, 0)
    scale.update(torch.tensor(1.0))
    assert scale.read_state() == (8.0, 0)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50))
def test_rounding_takes_a_neighbour_and_keeps_what_bfloat16_holds(values: list[float]) -> None:
    exact = torch.tensor(values)
    rounded = round_stochastically(exact)
    assert torch.equal(round_stochastically(rounded.float()), rounded)
    # The distance of two neighbours is 2^-7 of the lower one's power of two.
    assert ((rounded.float() - exact).abs() <= 2**-7 * exact.abs() + 1e-38).all()


def test_rounding_is_right_on_average() -> None:
    torch.manual_seed(0)
    value, count = 1.0 + 0.3 * 2**-7, 100_000
    mean = round_stochastically(torch.full((count,), value)).double().mean()
    deviation = 2**-7 * (0.3 * 0.7 / count) ** 0.5
    assert abs(float(mean) - value) < 5 * deviation


@pytest.mark.parametrize(("way", "moves"), [("nearest", False), ("stochastic", True), ("master", True)])
def test_small_updates_are_lost_without_masters_or_chance(way: str, moves: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.ones_(model.weight)
    Precision("pure_bf16").convert_model(model, sharded=False)
    optimizer = build_optimizer(OptimizerConfig(kind="sgd", weight_decay=0.0), model, stochastic=way != "master")
    for _ in range(200):
        model.weight.grad = torch.ones_like(model.weight, dtype=torch.float32)
        if way == "nearest":
            model.weight.data = (model.weight.float() - 1e-4).bfloat16()
        else:
            optimizer.update(1e-4)
    mean = float(model.weight.detach().float().mean())
    assert mean == pytest.approx(0.98 if moves else 1.0, abs=2**-9)


def test_masters_begin_alike_in_shards_and_whole() -> None:
    whole, sharded = (
        Decoder(ModelConfig(layers=1, heads=1, hidden_size=8, context=4), 9),
        Decoder(ModelConfig(layers=1, heads=1, hidden_size=8, context=4), 9),
    )
    sharded.load_state_dict(whole.state_dict())
    Precision("pure_bf16").convert_model(whole, sharded=False)
    Precision("pure_bf16").convert_model(sharded, sharded=True)
    for mine, other in some(zip(whole.parameters(), sharded.parameters(), strict=True)):
        assert mine.dtype is torch.bfloat16
        assert other.dtype is torch.float32
        assert torch.equal(mine.float(), other)


@pytest.mark.parametrize("kind", ["fp32", "tf32", "bf16"])
def test_products_are_set_so_that_pytorch_itself_and_others_can_read_it(kind: str) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    try:
        Precision(kind).set_matmul_precision()  # type: ignore[arg-type]
        assert torch.get_float32_matmul_precision() == ("high" if kind == "tf32" else "highest")
        assert torch.backends.cudnn.allow_tf32 is (kind == "tf32")
        assert torch.backends.cudnn.rnn.fp32_precision in (("tf32",) if kind == "tf32" else ("ieee", "none"))
        assert torch.export.export(torch.nn.Linear(2, 2), (torch.ones(3, 2),))
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
