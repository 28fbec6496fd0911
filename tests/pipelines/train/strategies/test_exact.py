"""One tree over the slots: the same bits however many workers share them, and not those of a plain sum."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raystride.pipelines.data.feed.plan import worker_slots
from raystride.pipelines.train.strategies.ddp import DataParallel
from raystride.pipelines.train.strategies.exact import ExactBuckets, _message_tag
from raystride.pipelines.train.strategies.reduction_tree import covering_subtrees, plan_additions, plan_visits, split_node
from tests.distributed import run_distributed
from tests.some import some


def _by_hand(values: Sequence[float]) -> float:
    """Neighbours are added until one is left; the last of an odd number waits."""
    while len(values) > 1:
        values = [sum(values[i : i + 2][1:], values[i]) for i in range(0, len(values), 2)]
    return values[0]


def _values(count: int, seed: int) -> list[float]:
    """Numbers of very different size, whose sum therefore depends on the order."""
    draw = random.Random(seed)
    return [draw.uniform(-1, 1) * 10 ** draw.randint(-2, 2) for _ in range(count)]


def _worker(subtrees: list[range], values: Sequence[float]) -> list[float]:
    """The sums of a worker's subtrees, by what it does after each slot; rows begin with what must not count."""
    plan = plan_visits(subtrees)
    rows = [float("nan")] * (1 + max(visit.row for visit in plan.values()))
    for slot in sorted(plan):
        visit = plan[slot]
        rows[visit.row] = values[slot] if visit.fresh else rows[visit.row] + values[slot]
        for into, row in visit.merges:
            rows[into] += rows[row]
    return rows[: len(subtrees)]


@given(slots=st.integers(1, 40), data=st.data())
def test_any_number_of_workers_adds_along_one_tree(slots: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, slots))
    values = _values(slots, data.draw(st.integers(0, 10**6)))
    everything = range(slots)
    by_worker = [covering_subtrees(everything, worker_slots(slots, rank, world)) for rank in range(world)]
    subtrees = [subtree for found in by_worker for subtree in found]
    assert [slot for subtree in subtrees for slot in subtree] == list(everything)
    rows = [total for found in by_worker for total in _worker(found, values)]
    for into, row in plan_additions(everything, subtrees):
        rows[into] += rows[row]
    assert rows[0] == _by_hand(values)


@given(slots=st.integers(1, 2**12), start=st.integers(0, 2**12), length=st.integers(1, 2**12))
def test_a_worker_needs_few_rows(slots: int, start: int, length: int) -> None:
    start = min(start, slots - 1)
    found = plan_visits(covering_subtrees(range(slots), range(start, min(slots, start + length))))
    assert 1 + max(visit.row for visit in found.values()) <= 2 * max(1, (slots - 1).bit_length())
    whole = plan_visits([range(slots)])
    assert 1 + max(visit.row for visit in whole.values()) <= max(1, (slots - 1).bit_length())


def test_the_order_matters() -> None:
    """Else the other tests could not fail."""
    different = sum(_by_hand(values) != sum(values) for values in (_values(16, seed) for seed in range(100)))
    assert different > 50


def test_the_tree_is_that_of_aligned_powers_of_two() -> None:
    assert split_node(range(6)) == (range(4), range(4, 6))
    assert split_node(range(4, 7)) == (range(4, 6), range(6, 7))
    assert covering_subtrees(range(12), range(4, 8)) == [range(4, 8)]
    assert covering_subtrees(range(12), range(3, 9)) == [range(3, 4), range(4, 8), range(8, 9)]


class Net(nn.Module):
    """Layers of odd sizes, one of which is never used, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Sum of squares, of a size that differs much between ids."""
        logits: torch.Tensor = self.hidden(self.embedding(ids)) @ self.embedding.weight.T
        return (logits**2).sum() * 10.0 ** float(ids[0] - 3)


def _batches(slots: int, step: int) -> list[list[int]]:
    draw = random.Random(100 * slots + step)
    return [[draw.randrange(7) for _ in range(3)] for _ in range(slots)]


def _make(rank: int, world: int, slots: int, bucket_bytes: int) -> tuple[DataParallel, Net]:
    slot_ranges = [worker_slots(slots, each, world) for each in range(world)]
    buckets = partial(ExactBuckets, bucket_bytes=bucket_bytes, extra=4, slot_ranges=slot_ranges, rank=rank)
    strategy = DataParallel(torch.device("cpu"), rank, world, buckets)
    torch.manual_seed(rank)  # ranks start apart; prepare must bring them together
    if world == 1:
        torch.manual_seed(0)
    model, _ = strategy.prepare_model(Net(), lambda model: None)
    return strategy, model


def _steps(rank: int, world: int, slots: int, bucket_bytes: int, filled: list[int]) -> list[dict[str, torch.Tensor]]:
    """Gradients and measurements of steps in which only the first `filled` slots hold anything."""
    strategy, model = _make(rank, world, slots, bucket_bytes)
    results = []
    for step, full in enumerate(filled):
        strategy.zero_gradients()
        own = [slot for slot in worker_slots(slots, rank, world) if slot < full]
        measured = torch.zeros(4)
        measured[2] = float(rank == world - 1)
        for slot in own:
            loss = model(torch.tensor(_batches(slots, step)[slot]))
            measured[0] += loss.detach()
            measured[1] += 3
            strategy.backward(loss, measured, slot=slot, last=slot == own[-1])
        result = {"measured": strategy.reduce_gradients(measured).clone()}
        result |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        result["gradients"] = torch.cat(strategy.local_gradients())
        results.append(result)
    return results


def _sum_by_hand(slots: int, step: int, filled: Sequence[int]) -> dict[str, torch.Tensor]:
    """Every filled slot's gradient by itself, added by hand."""
    torch.manual_seed(0)
    model = Net()
    by_slot: list[dict[str, Any]] = []
    for slot in filled:
        batch = _batches(slots, step)[slot]
        model.zero_grad()
        loss = model(torch.tensor(batch))
        loss.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        by_slot.append(gradients | {"measured": torch.tensor([loss.item(), 3.0, 0.0, 0.0])})
    empty = {name: torch.zeros_like(value) for name, value in by_slot[0].items()}
    found = dict(zip(filled, by_slot, strict=True))
    total: dict[str, torch.Tensor] = {
        name: _by_hand([found.get(slot, empty)[name] for slot in range(slots)]) for name in empty
    }
    total["measured"][2] += 1
    return total


def _cases(rank: int, world: int, cases: list[tuple[int, int]]) -> list[list[dict[str, torch.Tensor]]]:
    return [_steps(rank, world, slots, bucket_bytes, _with_filled_slots(slots)) for slots, bucket_bytes in cases]


def _with_filled_slots(slots: int) -> list[int]:
    return [slots, 1, max(1, slots - 1), slots]


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_gradients_have_the_bits_of_the_tree_by_hand(world: int) -> None:
    cases = [(slots, bytes_) for slots in sorted({world, 7, 8, 11}) for bytes_ in (1 << 20, 60)]
    by_rank = run_distributed(_cases, world, cases) if world > 1 else [_cases(0, 1, cases)]
    for number, (slots, _) in some(enumerate(cases)):
        for step, full in enumerate(_with_filled_slots(slots)):
            expected = _sum_by_hand(slots, step, range(full))
            for result in (results[number][step] for results in by_rank):
                for name, value in expected.items():
                    assert torch.equal(result[name], value), (name, slots, step)
                assert len(result["gradients"]) == sum(p.numel() for p in Net().parameters())


def test_a_plain_sum_has_other_bits() -> None:
    """So the test above could fail: the same slots, added one after the other."""
    slots, (found,) = 7, _steps(0, 1, 7, 1 << 20, [7])
    torch.manual_seed(0)
    model = Net()
    for batch in _batches(slots, 0):
        model(torch.tensor(batch)).backward()
    assert model.hidden.weight.grad is not None
    assert not torch.equal(found["hidden.weight"], model.hidden.weight.grad)
    torch.testing.assert_close(found["hidden.weight"], model.hidden.weight.grad)


def test_buffers_grow_with_the_logarithm_of_the_slots() -> None:
    for slots, rows in ((1, 1), (2, 1), (8, 3), (64, 6)):
        buckets = ExactBuckets(Net().parameters(), bucket_bytes=1 << 20, extra=4, slot_ranges=[range(slots)], rank=0)
        assert len(buckets._rows) == rows


def test_a_step_that_was_left_halfway_does_not_count_for_the_next() -> None:
    """A guard that goes back leaves a step behind, of which some slots were run."""
    strategy, model = _make(0, 1, 4, 1 << 20)
    # The second step's first slot is empty, so its buffers are begun by nobody but the step itself.
    for slots in ([0, 1, 2], [1, 3]):
        strategy.zero_gradients()
        measured = torch.zeros(4)
        for slot in slots:
            loss = model(torch.tensor(_batches(4, 0)[slot]))
            measured[:2] += torch.stack((loss.detach(), torch.tensor(3.0)))
            strategy.backward(loss, measured, slot=slot, last=slot == 3)
    expected = _sum_by_hand(4, 0, [1, 3])
    assert strategy.reduce_gradients(measured).tolist() == (expected["measured"] - torch.tensor([0, 0, 1.0, 0])).tolist()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected[name]), name


def test_what_travels_between_two_workers_at_a_time_has_tags_of_its_own() -> None:
    tags = [_message_tag(number, row) for number in range(20) for row in range(-1, 2 * 12)]
    assert len(set(tags)) == len(tags)
