"""The plan: every sample once an epoch in the planned order, for any number of workers and any interruption."""

import math
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.data.feed.order import Order
from raystride.pipelines.data.feed.plan import Plan


def _fed_positions(plan: Plan, step: int, world: int) -> np.ndarray:
    """Returns the positions that `world` workers feed in a step, in slot order."""
    slots = [plan.slot(step, slot) for rank in range(world) for slot in plan.worker_slots(rank, world)]
    return np.concatenate(slots)


@given(
    samples=st.integers(1, 500),
    slots=st.integers(1, 12),
    slot_size=st.integers(1, 5),
    epochs=st.sampled_from([0.5, 1, 1.7, 3]),
    worlds=st.lists(st.integers(1, 12), min_size=1, max_size=20),
)
def test_every_sample_once_an_epoch_on_workers_that_come_and_go(
    samples: int, slots: int, slot_size: int, epochs: float, worlds: list[int]
) -> None:
    plan = Plan(Order(samples), slots, slot_size, epochs)
    # After each step the run may be interrupted and go on with another number of workers.
    fed = [_fed_positions(plan, step, min(worlds[step % len(worlds)], slots)) for step in range(int(plan.steps))]
    assert np.concatenate([*fed, []]).tolist() == list(range(round(epochs * samples)))


@given(slots=st.integers(1, 200), world=st.integers(1, 200))
def test_shares_are_neighbouring_and_even(slots: int, world: int) -> None:
    plan = Plan(Order(10), slots, 1)
    if world > slots:
        with pytest.raises(ValueError, match=r"raise train\.slots"):
            plan.worker_slots(0, world)
        return
    shares = [plan.worker_slots(rank, world) for rank in range(world)]
    assert [slot for worker_slots in shares for slot in worker_slots] == list(range(slots))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_epochs_go_on_where_the_short_last_step_ended() -> None:
    first = Plan(Order(10), slots=2, slot_size=2, epochs=1)
    assert first.steps == 3
    fed = [_fed_positions(first, step, 1) for step in range(3)]
    longer = Plan(Order(10), slots=2, slot_size=2, epochs=2, first_step=3, first_position=first.position(3))
    fed += [_fed_positions(longer, step, 2) for step in range(3, int(longer.steps))]
    assert np.concatenate(fed).tolist() == list(range(20))
    fewer = Plan(Order(10), 2, 2, epochs=0.5, first_step=3, first_position=10)
    assert (fewer.steps, fewer.position(3)) == (3, 10)


def test_an_endless_plan_goes_on() -> None:
    plan = Plan(Order(10), 2, 2)
    assert math.isinf(plan.steps)
    assert plan.slot(10**9, 1).tolist() == [4 * 10**9 + 2, 4 * 10**9 + 3]


def test_a_trillion_samples_on_16384_ranks() -> None:
    plan = Plan(Order(10**12, 1), slots=16_384, slot_size=4)
    tracemalloc.start()
    for step in (0, 10**9):
        samples = [
            plan.order.sample_ids_at(plan.slot(step, slot))
            for rank in (0, 9_999, 16_383)
            for slot in plan.worker_slots(rank, 16_384)
        ]
        assert len(np.unique(np.concatenate(samples))) == 12
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    early, late = (_count_calls(plan, step) for step in (1, 10**9))
    assert 0 < late <= 2 * early  # a walk through a cycle may take a turn more


def _count_calls(plan: Plan, step: int) -> int:
    """Counts the function calls to find a slot's samples."""
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(event) if event in ("call", "c_call") else None)
    plan.order.sample_ids_at(plan.slot(step, 77))
    sys.setprofile(None)
    return len(called)
