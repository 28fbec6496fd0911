"""How a decoder is cut into stages, and what their workers keep, beside PyTorch's own orders."""

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest

from raystride.pipelines.strategies.stage_plan import Schedule, micro_batches_held, stage_workers

ORDERS: dict[Schedule, tuple[str, int]] = {
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}


def order_of(schedule: str, workers: int, stages: int, count: int, rank: int) -> list[Any]:
    """What PyTorch has a worker with so many stages do with `count` micro-batches, in its order."""
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
        own = [stage for stage, worker in enumerate(stage_workers(stages * workers, workers, schedule)) if worker == rank]
        changes = [
            1 if each.computation_type is schedules._ComputationType.FORWARD else -1
            for each in order_of(kind, workers, stages, count, rank)
            if each.computation_type in forward_or_backward
        ]
        held = micro_batches_held(schedule, rank, workers, count)
        assert len(held) == len(own)
        assert sum(held) == max(accumulate(changes))


def test_1f1b_keeps_one_for_each_stage_from_its_own_on() -> None:
    assert [micro_batches_held("1f1b", worker, 4, 8) for worker in range(4)] == [[4], [3], [2], [1]]


def test_of_few_micro_batches_no_more_are_kept_than_there_are() -> None:
    assert micro_batches_held("1f1b", 0, 4, 2) == [2]
    assert micro_batches_held("interleaved", 0, 4, 2) == [2, 2]
    assert micro_batches_held("zbv", 0, 4, 2) == [2, 0]
