"""Buckets sum what every worker has, in an order that only the parameters decide."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raystride.pipelines.config import Config, ScalingConfig, TrainConfig
from raystride.pipelines.train.strategies import build_strategy
from raystride.pipelines.train.strategies.ddp import DataParallel
from raystride.pipelines.train.strategies.reduction import Buckets, _group_parameters
from tests.distributed import run_distributed


class Net(nn.Module):
    """Three layers, one of which a batch may leave out, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Sum of logits squared over a head that shares the embedding's weight."""
        logits: torch.Tensor = self.hidden(self.embedding(ids)) @ self.embedding.weight.T
        return (logits**2).sum()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _reduce(rank: int, world: int, bucket_mib: float, batches_by_rank: list[list[list[int]]]) -> dict[str, Any]:
    torch.manual_seed(rank)  # ranks start apart; prepare must bring them together
    strategy = DataParallel(
        torch.device("cpu"), rank, world, partial(Buckets, bucket_bytes=int(bucket_mib * 2**20), extra=4)
    )
    model, optimizer = strategy.prepare_model(Net(), _sgd)
    result = {}
    for step in range(2):
        strategy.zero_gradients()
        measured = torch.zeros(4)
        batches = batches_by_rank[rank]
        for number, batch in enumerate(batches):
            measured[0] += len(batch)
            strategy.backward(model(torch.tensor(batch)), measured, slot=number, last=number == len(batches) - 1)
        result["measured"] = strategy.reduce_gradients(measured).clone()
        result["works"] = len(strategy._buckets._works)
        result[f"gradients{step}"] = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    result["buckets"] = len(strategy._buckets.flat)
    result["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    return result


@pytest.mark.parametrize("bucket_mib", [25.0, 1e-5])
def test_gradients_are_the_sum_over_workers(bucket_mib: float) -> None:
    # Unequal numbers of micro-batches, and a worker with none.
    batches = [[[1, 2], [3]], [[4, 5, 6]], []]
    results = run_distributed(_reduce, 3, bucket_mib, batches)
    torch.manual_seed(0)
    model = Net()
    for batch in (batch for worker in batches for batch in worker):
        model(torch.tensor(batch)).backward()
    for result in results:
        assert result["measured"].tolist() == [6, 0, 0, 0]
        assert result["works"] == result["buckets"], "those of earlier steps are not kept"
        for name, parameter in model.named_parameters():
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.testing.assert_close(result["gradients0"][name], expected, rtol=1e-5, atol=1e-5)
            assert torch.equal(result["parameters"][name], results[0]["parameters"][name])


def _use_some(rank: int, world: int, steps: list[list[str]]) -> list[dict[str, float | None]]:
    """By step, the gradient of each layer's weight; `steps` names for each rank the layers that it uses."""
    buckets = partial(Buckets, bucket_bytes=8, extra=4)
    strategy = DataParallel(torch.device("cpu"), rank, world, buckets)
    strategy.skips_absent = True
    layers = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in "abc"})
    strategy.prepare_model(layers, _sgd)
    found = []
    for step in steps:
        strategy.zero_gradients()
        if step[rank]:
            loss: Any = sum(layers[name].weight.sum() for name in step[rank])
            strategy.backward(loss, torch.zeros(4), slot=rank, last=True)
        strategy.reduce_gradients(torch.zeros(4))
        gradients = {name: layer.weight.grad for name, layer in layers.items()}
        found.append({name: None if grad is None else float(grad) for name, grad in gradients.items()})
    return found


def test_a_parameter_has_a_gradient_in_the_steps_in_which_any_worker_uses_it() -> None:
    """One that was used before, one that is used again, a step of one worker alone, and one of none."""
    steps = [["ab", "b"], ["c", "c"], ["", "a"], ["", ""], ["abc", "ca"]]
    wanted = [{name: float(sum(name in used for used in step)) or None for name in "abc"} for step in steps]
    assert run_distributed(_use_some, 2, steps) == [wanted, wanted]


def test_buckets_depend_on_the_parameters_alone() -> None:
    sizes = [3, 10, 1, 1, 20, 2]
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    groups = _group_parameters(parameters, max_bytes=4 * 12)
    assert [[p.numel() for p in group] for group in groups] == [[3], [10, 1, 1], [20], [2]]


@pytest.mark.parametrize("multiple_of", [1, 3, 4])
def test_buffers_are_no_longer_than_they_must_be(multiple_of: int) -> None:
    buckets = Buckets(Net().parameters(), bucket_bytes=100, extra=4, multiple_of=multiple_of)
    wanted = [*buckets.sizes[:-1], buckets.sizes[-1] + 4]
    assert [len(flat) for flat in buckets.flat] == [-(-size // multiple_of) * multiple_of for size in wanted]


def test_gradients_lie_in_the_buckets() -> None:
    model = Net()
    buckets = Buckets(model.parameters(), bucket_bytes=100, extra=4)
    assert len(buckets.flat) > 1
    model(torch.tensor([1, 2])).backward()
    total = sum(float(g.abs().sum()) for g in buckets.local_gradients())
    assert total == pytest.approx(sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None))
    buckets.begin_step()
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_one_worker_exchanges_nothing() -> None:
    """Whatever `scaling.strategy` says: there is no process group."""
    for kind, exact in (("auto", False), ("ddp", False), ("single", True), ("ddp", True)):
        config = Config(scaling=ScalingConfig(strategy=kind), train=TrainConfig(slots=3, exact=exact))  # type: ignore[arg-type]
        strategy = build_strategy(config, device=torch.device("cpu"), rank=0, world=1)
        model, _ = strategy.prepare_model(Net(), _sgd)
        strategy.zero_gradients()
        measured = torch.ones(4)
        strategy.backward(model(torch.tensor([1, 2])), measured, slot=0, last=True)
        assert strategy.reduce_gradients(measured).tolist() == [1, 1, 1, 1]
        assert strategy.all_reduce_sum(torch.ones(2)).tolist() == [1, 1]
