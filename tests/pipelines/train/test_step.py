"""A step's gradient is the mean over all targets that count, however they are cut into micro-batches and workers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raystride.model.transformer import Decoder
from raystride.pipelines.config import Config, ModelConfig, OptimizerConfig, ScalingConfig, TrainConfig
from raystride.pipelines.data.feed.loader import MicroBatch, Step
from raystride.pipelines.train.checkpoint.train_state import Updater
from raystride.pipelines.train.optimizer import build_optimizer
from raystride.pipelines.train.precision import LossScale
from raystride.pipelines.train.randomness import micro_batch_seed
from raystride.pipelines.train.step import (
    FINE,
    NOT_FINITE,
    OVERFLOW,
    SPIKE,
    VERDICT,
    DelayedHostRead,
    StepCheck,
    StepRules,
    clip_gradients,
    train_step,
)
from raystride.pipelines.train.strategies import LOSS, STOP, TARGETS, build_strategy
from raystride.pipelines.train.strategies.strategy import Single, global_norm
from tests.distributed import run_distributed

CONTEXT = 6
SHAPE = ModelConfig(layers=1, heads=2, hidden_size=8, context=CONTEXT)
IDS = torch.randint(0, 11, (6, CONTEXT + 1), generator=torch.Generator().manual_seed(0))


def _targets() -> torch.Tensor:
    targets = IDS[:, 1:].clone()
    targets[1, 2:] = -100
    targets[4] = -100
    return targets


def _step(rows: list[range]) -> Step:
    batches = [
        MicroBatch(part.start, (IDS[part.start : part.stop, :-1],), _targets()[part.start : part.stop]) for part in rows
    ]
    return Step(number=0, position=0, samples=6, micro_batches=batches, digest=0)


def _sgd(model: torch.nn.Module) -> Updater:
    return build_optimizer(OptimizerConfig(kind="sgd", weight_decay=0.0), model)


def _train_steps(rank: int, world: int, rows_by_rank: list[list[range]], clip_norm: float) -> dict[str, Any]:
    config = Config(train=TrainConfig(slots=6), scaling=ScalingConfig(bucket_mib=1e-4))
    strategy = build_strategy(config, device=torch.device("cpu"), rank=rank, world=world)
    torch.manual_seed(3)
    model, optimizer = strategy.prepare_model(Decoder(SHAPE, 11), _sgd)
    rules = StepRules(seed=0, nominal_targets=6 * CONTEXT, clip_norm=clip_norm, check=StepCheck(strategy.device))
    result = train_step(strategy, model, optimizer, _step(rows_by_rank[rank]), rules, 1.0, (float(rank == world - 1), 0.0))
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {"parameters": parameters, "measured": result.measured, "norm": result.gradient_norm}


def _reference() -> tuple[torch.Tensor, torch.Tensor, float]:
    """Parameters after one update by the plain mean loss, the gradient's norm, and the mean."""
    torch.manual_seed(3)
    model = Decoder(SHAPE, 11)
    loss_sum, counted = model(IDS[:, :-1], _targets())
    (loss_sum / counted).backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return parameters - gradient, gradient.norm(), float(loss_sum.detach() / counted)


@pytest.mark.parametrize(
    "rows",
    [
        [[range(6)]],
        [[range(2), range(2, 3), range(3, 6)]],
        [[range(3)], [range(3, 5), range(5, 6)]],
        [[range(6)], []],
    ],
)
def test_the_gradient_is_the_mean_over_all_targets(rows: list[list[range]]) -> None:
    results = run_distributed(_train_steps, len(rows), rows, 0.0) if len(rows) > 1 else [_train_steps(0, 1, rows, 0.0)]
    parameters, norm, mean = _reference()
    for result in results:
        torch.testing.assert_close(result["parameters"], parameters, rtol=1e-5, atol=1e-6)
        assert float(result["norm"]) == pytest.approx(float(norm), rel=1e-5)
        assert float(result["measured"][LOSS] / result["measured"][TARGETS]) == pytest.approx(mean, rel=1e-5)
        assert result["measured"][TARGETS] == 6 * CONTEXT - 4 - CONTEXT
        assert result["measured"][STOP] == 1


@given(
    values=st.lists(st.floats(-10, 10), min_size=1, max_size=20),
    factor=st.floats(0.1, 10),
    clip=st.sampled_from([0.0, 0.5, 1.0, 100.0]),
)
def test_clipping_limits_the_norm_and_nothing_else(values: list[float], factor: float, clip: float) -> None:
    gradients = [torch.tensor(values, dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)]
    true = torch.cat(gradients) * factor
    norm = global_norm(gradients, gradients[0].device) * factor
    assert float(norm) == pytest.approx(float(true.norm()), rel=1e-9)
    clip_gradients(gradients, norm, torch.tensor(factor, dtype=torch.float64), clip)
    after = torch.cat(gradients)
    expected = true * min(1.0, clip / (float(norm) + 1e-6)) if clip else true
    torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-12)


def test_dropout_depends_on_seed_step_and_slot() -> None:
    seeds = {micro_batch_seed(seed, step, slot) for seed in range(4) for step in range(10) for slot in range(10)}
    assert len(seeds) == 400
    assert micro_batch_seed(2**62, 10**9, 10**6) >= 0


def test_a_step_without_any_target_changes_nothing_but_the_count() -> None:
    strategy = Single(torch.device("cpu"))
    model, optimizer = strategy.prepare_model(Decoder(SHAPE, 11), _sgd)
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    step = Step(0, 0, 2, [MicroBatch(0, (IDS[:2, :-1],), torch.full((2, CONTEXT), -100))], 0)
    result = train_step(strategy, model, optimizer, step, StepRules(0, 12, 1.0, StepCheck(strategy.device)), 1.0)
    assert result.measured[TARGETS] == 0
    assert torch.equal(before, torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert (float(result.gradient_norm), float(result.measured[VERDICT])) == (0.0, FINE)


def test_an_update_draws_other_numbers_than_any_dropout() -> None:
    strategy = Single(torch.device("cpu"))
    model, optimizer = strategy.prepare_model(Decoder(SHAPE, 11), _sgd)
    step = Step(7, 0, 2, [MicroBatch(0, (IDS[:2, :-1],), IDS[:2, 1:])], 0)
    rules = StepRules(5, 12, 1.0, StepCheck(strategy.device), random_updates=True)
    train_step(strategy, model, optimizer, step, rules, 0.1)
    seeds = [micro_batch_seed(5, 7, slot) for slot in (-1, 0)]
    assert torch.initial_seed() == seeds[0] != seeds[1]


@pytest.mark.parametrize(("good", "verdict"), [(3, FINE), (4, SPIKE), (5, SPIKE)])
def test_a_spike_is_looked_for_after_a_window_of_good_steps(good: int, verdict: int) -> None:
    check, one = StepCheck(torch.device("cpu"), spike=5.0, window=4), torch.tensor(1.0)
    for number in range(good):
        assert check(torch.tensor(2.0 + 0.1 * (-1) ** number), one) == FINE
        assert check(torch.tensor(float("nan")), one) == NOT_FINITE  # which counts for nothing
    assert check.read_state()[2] == good
    assert check(torch.tensor(9.0), one) == verdict


class Weighted(torch.nn.Module):
    """A weight of 1e-20 times the inputs, which decide whether loss or gradient are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[1e-20]]))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sum of the losses, and the number of targets."""
        return (self.weight * inputs).sum(), torch.tensor(1.0)


@given(st.lists(st.sampled_from([FINE, NOT_FINITE, SPIKE, OVERFLOW]), max_size=12))
@settings(deadline=None, max_examples=25)
def test_of_all_verdicts_in_any_order_an_overflow_alone_lowers_the_scale(verdicts: list[int]) -> None:
    strategy = Single(torch.device("cpu"))
    model, optimizer = strategy.prepare_model(Weighted(), _sgd)
    check, scale = StepCheck(strategy.device, spike=5.0, window=1), LossScale(strategy.device, 2.0**14)
    rules = StepRules(0, 1, 0.0, check, scale=scale)
    values = {FINE: 1.0, NOT_FINITE: float("nan"), SPIKE: 1e10, OVERFLOW: 3e38}
    for verdict in [FINE, *verdicts]:  # a spike is one beside an earlier loss
        step = Step(0, 0, 1, [MicroBatch(0, (torch.tensor([[values[verdict]]]),), torch.zeros(1, 1))], 0)
        result = train_step(strategy, model, optimizer, step, rules, 0.0)
        assert result.measured[VERDICT] == verdict
    assert scale.read_state()[0] == 2.0 ** (14 - verdicts.count(OVERFLOW))
    assert check.read_state()[2] == 1 + verdicts.count(FINE)


def test_wishes_are_known_one_step_later() -> None:
    agreement = DelayedHostRead(torch.device("cpu"))
    asked = torch.zeros(5)
    asked[STOP] = 2
    assert not any(agreement.read_previous(asked))
    assert agreement.read_previous(torch.zeros(5)) == asked.tolist()
    assert not any(agreement.read_previous(torch.zeros(5)))
