"""Schedules at their corners, against PyTorch's where it has them; decay on matrices only."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, OptimizerConfig, SettingError, TrainConfig
from raystride.pipelines.config.schedules import (
    SCHEDULES,
    SHAPES,
    DecayShape,
    ScheduleName,
    describe_endless_warmup,
    learning_rate,
)
from raystride.pipelines.train.optimizer import build_optimizer


def _rates(steps: int, **settings: object) -> list[float]:
    return [learning_rate(OptimizerConfig(**settings), step, steps, 128) for step in range(steps)]  # type: ignore[arg-type]


def test_cosine_is_nanogpts() -> None:
    rates = _rates(2000, learning_rate=1e-3, warmup_steps=100, schedule="cosine", min_lr_ratio=0.1)
    assert rates[0] == pytest.approx(1e-3 / 101)
    assert rates[100] == pytest.approx(1e-3)
    middle = 0.5 * (1 + math.cos(math.pi * (1050 - 100) / 1900))
    assert rates[1050] == pytest.approx(1e-4 + middle * 9e-4)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-3)


def test_linear_falls_in_a_line() -> None:
    rates = _rates(100, learning_rate=1.0, warmup_steps=0, schedule="linear", min_lr_ratio=0.0)
    assert rates == pytest.approx([1 - step / 100 for step in range(100)])


@pytest.mark.parametrize("shape", SHAPES)
def test_wsd_warms_up_stays_and_falls(shape: DecayShape) -> None:
    """The last fifth falls, as a share, in steps, or as far as the warm-up leaves room."""
    rates = _rates(100, learning_rate=1.0, warmup_ratio=0.1, schedule="wsd", min_lr_ratio=0.1, decay_shape=shape)
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert set(rates[10:81]) == {1.0}
    left = {"linear": 0.5, "sqrt": 1 - 0.5**0.5, "cosine": 0.5}[shape]
    assert rates[90] == pytest.approx(0.1 + 0.9 * left)
    in_steps = _rates(
        100, learning_rate=1.0, warmup_steps=10, schedule="wsd", min_lr_ratio=0.1, decay_shape=shape, decay_steps=20
    )
    assert in_steps == rates
    late = _rates(100, learning_rate=1.0, warmup_steps=95, schedule="wsd", decay_steps=20)
    assert max(late) == late[95] == 1.0


def test_the_table_has_each_schedule_and_shape_by_its_name() -> None:
    assert set(SCHEDULES) == set(get_args(ScheduleName))
    assert set(SHAPES) == set(get_args(DecayShape))
    page = (Path(__file__).parents[3] / "docs" / "settings" / "optimizer.md").read_text()
    assert all(f"`{name}`" in page for name in (*SCHEDULES, *SHAPES))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_falls_needs_an_end(name: ScheduleName) -> None:
    """The rate of each step of a run that only hours end is that of the schedule, or it is refused."""
    hours, optimizer = TrainConfig(steps=0, hours=8), OptimizerConfig(schedule=name, warmup_steps=2)
    rates = {learning_rate(optimizer, step, 0, 64) for step in (2, 50, 10_000)}
    if SCHEDULES[name].falls:
        with pytest.raises(SettingError, match=r"train.hours ends the run"):
            Config(train=hours, optimizer=optimizer)
        assert Config(train=replace(hours, steps=100), optimizer=optimizer)
    else:
        assert Config(train=hours, optimizer=optimizer)
        assert len(rates) == (3 if name == "noam" else 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"schedule": "wsd", "warmup_steps": 90},
            r"optimizer.decay_share is 0.2: it gives a decay of 20 steps.*train.steps, 100",
        ),
        ({"schedule": "wsd", "warmup_steps": 90, "decay_steps": 11}, "optimizer.decay_steps is 11"),
        ({"schedule": "wsd", "warmup_ratio": 0.9}, "optimizer.decay_share"),
        ({"decay_share": 0.0}, "optimizer.decay_share"),
        ({"schedule": "noam", "warmup_steps": 0}, "optimizer.warmup_steps"),
    ],
)
def test_parts_that_exceed_the_run_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        Config(train=TrainConfig(steps=100), optimizer=OptimizerConfig(**settings))


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_rates_stay_at_the_lowest_after_the_decay(schedule: str) -> None:
    settings = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule=schedule, min_lr_ratio=0.1, decay_steps=10)  # type: ignore[arg-type]
    assert [learning_rate(settings, step, 40, 128) for step in (10, 15, 20, 39)] == pytest.approx([0.1] * 4)


def test_constant_stays() -> None:
    assert set(_rates(50, learning_rate=0.3, warmup_steps=0, schedule="constant")) == {0.3}


def test_noam_is_equation_3() -> None:
    rates = _rates(10_000, learning_rate=1.0, warmup_steps=4000, schedule="noam")
    assert rates[3999] == max(rates) == pytest.approx(128**-0.5 * 4000**-0.5)
    assert rates[0] == pytest.approx(128**-0.5 * 4000**-1.5)
    assert rates[9999] == pytest.approx(128**-0.5 * 10_000**-0.5)


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 400),
    lowest=st.floats(0, 1),
)
def test_rates_stay_between_their_bounds(schedule: str, steps: int, warmup: int, lowest: float) -> None:
    rates = _rates(steps, learning_rate=1.0, warmup_steps=warmup, schedule=schedule, min_lr_ratio=lowest)
    assert all(0 < rate <= 1 + 1e-12 for rate in rates[:warmup])
    assert all(lowest - 1e-12 <= rate <= 1 + 1e-12 for rate in rates[warmup:])
    assert all(earlier >= later - 1e-12 for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))


def test_only_matrices_decay() -> None:
    model = Decoder(ModelConfig(layers=1, hidden_size=16, heads=2, bias=True), 9)
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.5), model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.update(0.1)
    for name, parameter in model.named_parameters():
        expected = before[name] * (0.95 if parameter.dim() >= 2 else 1.0)
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_are_pytorchs(kind: str) -> None:
    settings = OptimizerConfig(kind=kind, learning_rate=0.01, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]
    ours, theirs = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    theirs.load_state_dict(ours.state_dict())
    reference: torch.optim.Optimizer = (
        torch.optim.AdamW(theirs.parameters(), lr=0.01, betas=settings.betas, weight_decay=0.1, fused=True)
        if kind == "adamw"
        else torch.optim.SGD(theirs.parameters(), lr=0.01, momentum=0.9, weight_decay=0.1, fused=True)
    )
    optimizer = build_optimizer(settings, ours)
    for step in range(5):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        for model in (ours, theirs):
            model.zero_grad()
            (model(x) ** 2).sum().backward()
        optimizer.update(0.01)
        reference.step()
    assert torch.equal(ours.weight, theirs.weight)
    # One that loads what the other remembers of its parameter goes on with it.
    resumed = torch.nn.Linear(4, 4, bias=False)
    resumed.load_state_dict(ours.state_dict())
    other = build_optimizer(settings, resumed)
    other.load_state(resumed.weight, {name: value.clone() for name, value in optimizer.state(ours.weight).items()})
    for weight, updater in ((resumed.weight, other), (theirs.weight, None)):
        weight.grad = torch.full((4, 4), 0.3)
        updater.update(0.01) if updater else reference.step()
    assert torch.equal(resumed.weight, theirs.weight)


@given(st.sampled_from(list(SCHEDULES)), st.integers(1, 60), st.integers(1, 60))
def test_a_warm_up_is_told_just_where_the_highest_rate_is_never_reached(schedule: str, steps: int, warmup: int) -> None:
    settings = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup, schedule=schedule)  # type: ignore[arg-type]
    longer = [learning_rate(settings, step, steps + 200, width=1) for step in range(steps + 200)]
    rates = [learning_rate(settings, step, steps, width=1) for step in range(steps)]
    line = describe_endless_warmup(settings, steps)
    assert not describe_endless_warmup(settings, math.inf)
    assert bool(line) == (max(rates) < max(longer) * (1 - 1e-9))
    if line:
        assert f"warmup_steps is {warmup}," in line
        assert f"{steps} steps" in line
