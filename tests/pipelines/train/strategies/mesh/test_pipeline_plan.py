"""The cut of a decoder into stages, and the micro-batches that their workers keep, compared with PyTorch's own schedules."""

from itertools import accumulate, combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import ModelConfig
from raystride.pipelines.train.strategies.mesh.pipeline_plan import (
    Schedule,
    assign_stages,
    max_micro_batches_in_flight,
    split_into_stages,
)

ORDERS: dict[Schedule, tuple[str, int]] = {
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}


def order_of(schedule: str, workers: int, stages: int, count: int, rank: int) -> list[Any]:
    """Returns PyTorch's order of operations on a worker with so many stages for `count` micro-batches."""
    from torch.distributed.pipelining import schedules

    rounds = max(1, count // workers)
    facts = SimpleNamespace(
        _n_microbatches=count,
        n_microbatches=count,
        pp_group_size=workers,
        n_local_stages=stages,
        num_stages=stages * workers,
        number_of_rounds=rounds,
        microbatches_per_round=count // rounds,
    )
    return [each for each in getattr(schedules, schedule)._calculate_single_rank_operations(facts, rank) if each is not None]


@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize(("workers", "count"), [(2, 4), (2, 8), (4, 8), (4, 12), (8, 16)])
def test_a_worker_keeps_what_pytorchs_order_leaves_open(schedule: Schedule, workers: int, count: int) -> None:
    from torch.distributed.pipelining import schedules

    kind, stages = ORDERS[schedule]
    forward_or_backward = {schedules._ComputationType[name] for name in ("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT")}
    for rank in range(workers):
        own = [stage for stage, worker in enumerate(assign_stages(stages * workers, workers, schedule)) if worker == rank]
        changes = [
            1 if each.computation_type is schedules._ComputationType.FORWARD else -1
            for each in order_of(kind, workers, stages, count, rank)
            if each.computation_type in forward_or_backward
        ]
        held = max_micro_batches_in_flight(schedule, rank, workers, count)
        assert len(held) == len(own)
        assert sum(held) == max(accumulate(changes))


@pytest.mark.parametrize(("workers", "count"), [(2, 4), (2, 8), (4, 8), (4, 12), (3, 6)])
def test_interleaved_stages_have_what_was_forward_before_the_first_backward(workers: int, count: int) -> None:
    from torch.distributed.pipelining import schedules

    kind, stages = ORDERS["interleaved"]
    for rank in range(workers):
        forward: list[int] = []
        for each in order_of(kind, workers, stages, count, rank):
            if each.computation_type is not schedules._ComputationType.FORWARD:
                break
            forward.append(each.stage_index)
        expected = [forward.count(stage) for stage in (rank, rank + workers)]
        assert max_micro_batches_in_flight("interleaved", rank, workers, count) == expected


def test_1f1b_keeps_one_for_each_stage_from_its_own_on() -> None:
    assert [max_micro_batches_in_flight("1f1b", worker, 4, 8) for worker in range(4)] == [[4], [3], [2], [1]]


def test_of_few_micro_batches_no_more_are_kept_than_there_are() -> None:
    assert max_micro_batches_in_flight("1f1b", 0, 4, 2) == [2]
    assert max_micro_batches_in_flight("interleaved", 0, 4, 2) == [2, 2]
    assert max_micro_batches_in_flight("zbv", 0, 4, 2) == [2, 0]


@given(
    layers=st.integers(1, 9),
    stages=st.integers(1, 4),
    words=st.sampled_from([1, 300, 1000, 3000]),
    context=st.integers(1, 500),
)
def test_the_costliest_stage_costs_as_little_as_can_be(layers: int, stages: int, words: int, context: int) -> None:
    """Beside all ways to cut. A block of GPT-2 has 12 width^2 weights, 4 of attention and 8 of the feed-forward."""
    model, width = ModelConfig(architecture="gpt2", layers=layers, heads=2, hidden_size=16, context=context), 16
    if layers < stages:
        with pytest.raises(ValueError, match=f"{layers} layers .* {stages} stages"):
            split_into_stages(model, words, stages)
        return
    block, head = 6 * 12 * width**2 + 12 * width * context, 6 * words * width
    ways = [(0, *ends, layers) for ends in combinations(range(1, layers), stages - 1)]

    def cost(way: tuple[int, ...]) -> float:
        return max([(end - begin) * block for begin, end in pairwise(way[:-1])] + [(way[-1] - way[-2]) * block + head])

    least = min(map(cost, ways))
    cut = split_into_stages(model, words, stages)
    way = (0, *(stage.stop for stage in cut))
    assert [(stage.start, stage.stop) for stage in cut] == list(pairwise(way))
    assert way[-1] == layers
    assert cost(way) == pytest.approx(least)
    assert way[1] == max(other[1] for other in ways if cost(other) == pytest.approx(least)), "what leaves least"


def test_stages_go_round_and_round_or_there_and_back() -> None:
    assert assign_stages(4, 4, "1f1b") == (0, 1, 2, 3)
    assert assign_stages(6, 3, "interleaved") == (0, 1, 2, 0, 1, 2)
    assert assign_stages(6, 3, "zbv") == (0, 1, 2, 2, 1, 0)
